"""Evaluates a checkpoint of a run in separate processes; the run's own metrics do not change."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.table import Table
from rich.text import Text

from worldsize.checkpoint.format import Checkpoint, Retention, complete, digest_of, read, step_of, verify
from worldsize.config.settings import Settings
from worldsize.core import Launcher, spoken_name
from worldsize.errors import ConfigError
from worldsize.launch.execute import checked
from worldsize.launch.record import config_text, scrubber_of, with_secrets
from worldsize.messages import printable
from worldsize.record.inputs import check_data, recipe_fingerprint
from worldsize.record.redaction import Scrubber
from worldsize.record.run_directory import RunDirectory, created
from worldsize.record.run_record import RunView, read_result, write_configuration
from worldsize.strict_json import strict

_logger = logging.getLogger(__name__)


def chosen_checkpoint(record: RunView, name: str) -> Path:
    """Return the folder of the checkpoint ``name``: "best", "last" or the number of a step.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    run = record.directory
    folders = complete(run.checkpoints)
    if not folders:
        raise ConfigError(f"the run {run.path} has no checkpoint. Resume it, or train it with checkpoint.at_end=true.")
    if name == "last":
        return folders[-1]
    if name == "best":
        return _best(record, folders)
    steps = {step_of(path): path for path in folders}
    if re.fullmatch(r"[0-9]{1,18}", name) and int(name) in steps:
        return steps[int(name)]
    known = ", ".join(map(str, steps))
    raise ConfigError(f"checkpoint={name}: the run has none of that step. Known: best, last, {known}.")


def _best(record: RunView, folders: Sequence[Path]) -> Path:
    keep = record.manifest["config"]["checkpoint"].get("keep") or {}
    metric, direction = keep.get("best"), keep.get("direction", "max")
    if not isinstance(metric, str) or direction not in ("max", "min"):
        raise ConfigError(
            "checkpoint=best: the run has no metric for the best checkpoint. "
            "Give a step, or train with checkpoint.keep.best."
        )
    best = Retention(best=metric, direction=direction).best_of(folders)
    if best is None:
        raise ConfigError(f"checkpoint=best: no checkpoint of the run has the metric {metric!r}. Give a step.")
    return best


def evaluate_checkpoint(
    cfg: DictConfig, record: RunView, path: Path, *, split: str | None, words: Sequence[str]
) -> tuple[Table | None, int]:
    """Evaluate the checkpoint in ``path`` with the configuration ``cfg``; return a metrics table and an exit code.

    The results are written to a folder below the run's ``evaluations``: ``evaluation.json`` and the processes' logs.

    Raises:
        WorldsizeError: the checkpoint is damaged, the recipe has no such split, its data have changed, or the cluster
            cannot evaluate it.
    """
    checkpoint = read(path)
    _alter(cfg, path, split)
    settings = checked(cfg)
    check_data(record.manifest["data"], recipe_fingerprint(settings.recipe))
    launcher = settings.launcher
    if not isinstance(launcher, Launcher):
        raise ConfigError(
            f"evaluate starts its processes on this machine, and {type(launcher).__name__} does not. "
            "Add cluster=laptop, or cluster=node, and cluster.processes=N."
        )
    launcher.check(settings.cluster)
    verify(checkpoint)  # reads the whole checkpoint, so cheap checks come first
    run = _folder(record.directory, checkpoint.step)
    clean = scrubber_of(cfg, settings)
    with created(run, is_private=settings.run.private):
        write_configuration(run, config=config_text(clean.tree(settings.config)))
    code = _play(settings, launcher, run, clean)
    if code:
        return None, code
    metrics = read_result(run)["metrics"]
    _write(run, checkpoint, settings, metrics=metrics, words=clean.words(words))
    return _table(metrics, checkpoint, run), 0


def _alter(cfg: DictConfig, path: Path, split: str | None) -> None:
    """Change the configuration so that its processes evaluate instead of training."""
    cfg.run.evaluates = str(path.resolve())
    cfg.logger, cfg.faults, cfg.profile.steps, cfg.init_from = None, [], None, None
    cfg.checkpoint.keep.best = cfg.early_stopping.metric = cfg.sweep.metric = cfg.schedule_metric = (
        None  # it may need metrics of another split
    )
    if split is not None:
        cfg.evaluation.splits = [split]
    if "on_failure" in cfg.strategy:  # nobody goes on with an evaluation: it is done again
        cfg.strategy.on_failure, cfg.cluster.min_processes, cfg.autoscale = "restart", None, None
        cfg.cluster.spares = cfg.cluster.spare_nodes = 0
    for key in {"max_restarts", "terminal_logs"} & cfg.launcher.keys():
        cfg.launcher[key] = 0 if key == "max_restarts" else False


def _folder(run: RunDirectory, step: int) -> RunDirectory:
    """Return the path of a new folder for an evaluation of ``step``."""
    stamp = time.strftime("%Y-%m-%d_%H%M%S", time.gmtime())
    return RunDirectory(run.path / "evaluations" / f"step_{step:07d}_{stamp}_{os.urandom(3).hex()}")


def _play(settings: Settings, launcher: Launcher, run: RunDirectory, clean: Scrubber) -> int:
    """Start the processes and wait for them to end; return the exit code."""
    plan = settings.plan(run.path)
    settings.strategy.prepare(run.servers(1))
    outcome = launcher.launch(replace(with_secrets(settings, plan, clean), attempt=1)).wait()
    if failure := outcome.failure:
        _logger.error("%s %d failed:\n%s", failure.role, failure.rank, failure.cause.rstrip())
        _logger.error("logs: %s", run.path / "logs")
    return outcome.exit_code


def _write(
    run: RunDirectory, checkpoint: Checkpoint, settings: Settings, *, metrics: Mapping[str, float], words: Sequence[str]
) -> None:
    evaluation: dict[str, Any] = {
        "time": time.time(),
        "checkpoint": checkpoint.path.name,
        "sha256": digest_of(checkpoint.path),
        "step": checkpoint.step,
        "splits": list(settings.evaluation.splits),
        "batches": settings.evaluation.batches,
        "metrics": metrics,
        "strategy": type(settings.strategy).__name__,
        "processes": settings.cluster.processes,
        "overrides": list(words),
    }
    (run.path / "evaluation.json").write_text(json.dumps(strict(evaluation), indent=2) + "\n")


def _table(metrics: Mapping[str, float], checkpoint: Checkpoint, run: RunDirectory) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in metrics.items():
        table.add_row(Text(printable(spoken_name(name))), repr(value))
    table.add_row("step", f"{checkpoint.step:,}")
    table.add_row("checkpoint", Text(printable(str(checkpoint.path))))
    table.add_row("written to", Text(printable(str(run.path / "evaluation.json"))))
    return table
