"""Evaluates a run's checkpoint in new processes, without changing the run's metrics."""

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

from worldsize.checkpoint.format import (
    Checkpoint,
    Retention,
    complete,
    parse_step,
    read_checkpoint,
    read_digest,
    verify_checkpoint,
)
from worldsize.config.purpose import Evaluate
from worldsize.config.recorded import format_config
from worldsize.config.settings import Settings
from worldsize.core import Launcher, format_display_name
from worldsize.errors import ConfigError
from worldsize.launch.execute import build_checked_settings
from worldsize.launch.record import add_secrets, create_scrubber
from worldsize.messages import printable
from worldsize.record.inputs import check_data, recipe_fingerprint
from worldsize.record.redaction import Scrubber
from worldsize.record.run_directory import RunDirectory, create_run_folder
from worldsize.record.run_record import RunView, read_result, write_configuration
from worldsize.strict_json import sanitize_json

_logger = logging.getLogger(__name__)


def choose_checkpoint(record: RunView, name: str) -> Path:
    """Return the folder of the checkpoint ``name``: "best", "last" or a step number.

    Raises:
        ConfigError: the checkpoint does not exist.
    """
    run = record.directory
    folders = complete(run.checkpoints)
    if not folders:
        raise ConfigError(
            f"the run {run.path} has no checkpoint. Resume the run, or train with checkpoint.at_end=true."
        )
    if name == "last":
        return folders[-1]
    if name == "best":
        return _find_best(record, folders)
    steps = {parse_step(path): path for path in folders}
    if re.fullmatch(r"[0-9]{1,18}", name) and int(name) in steps:
        return steps[int(name)]
    known = ", ".join(map(str, steps))
    raise ConfigError(f"checkpoint={name} not found; available: best, last, {known}.")


def _find_best(record: RunView, folders: Sequence[Path]) -> Path:
    retention = read_retention(record)
    if retention is None:
        raise ConfigError(
            "checkpoint=best requires a run with checkpoint.keep.best, the metric of the best checkpoint. "
            "Pass a step number, or train with checkpoint.keep.best."
        )
    best = retention.find_best(folders)
    if best is None:
        raise ConfigError(
            f"checkpoint=best: none of the checkpoints has the metric {retention.best!r}. Pass a step number."
        )
    return best


def read_retention(record: RunView) -> Retention | None:
    """Return the policy for a run's best checkpoint; None without ``checkpoint.keep.best``."""
    keep = record.manifest["config"]["checkpoint"].get("keep") or {}
    metric, direction = keep.get("best"), keep.get("direction", "max")
    if not isinstance(metric, str) or direction not in ("max", "min"):
        return None
    return Retention(best=metric, direction=direction)


def evaluate_checkpoint(
    cfg: DictConfig, record: RunView, path: Path, *, split: str | None, words: Sequence[str]
) -> tuple[Table, Path] | int:
    """Evaluate the checkpoint in ``path`` with the configuration ``cfg``.

    Writes ``evaluation.json`` and the processes' logs to a new folder in the run's ``evaluations``.

    Returns:
        A table of the metrics, and the folder. If processes failed, only their exit code.

    Raises:
        WorldsizeError: the checkpoint is damaged, the recipe lacks the split, its data has changed, or the cluster
            cannot run the evaluation.
    """
    checkpoint = read_checkpoint(path)
    settings = build_checked_settings(cfg, Evaluate(path, split))
    check_data(record.manifest["data"], recipe_fingerprint(settings.recipe))
    launcher = settings.launcher
    if not isinstance(launcher, Launcher):
        raise ConfigError(
            f"evaluate requires a launcher that starts processes on this machine, got {type(launcher).__name__}. "
            "Set cluster=laptop or cluster=node, and cluster.processes=N."
        )
    launcher.check(settings.cluster)
    verify_checkpoint(checkpoint)  # last of the checks, since it reads the whole checkpoint
    stamp = time.strftime("%Y-%m-%d_%H%M%S", time.gmtime())
    name = f"step_{checkpoint.step:07d}_{stamp}_{os.urandom(3).hex()}"
    run = RunDirectory(record.directory.path / "evaluations" / name)
    clean = create_scrubber(cfg, settings.config)
    with create_run_folder(run, is_private=settings.run.private):
        write_configuration(run, config=format_config(clean.scrub_tree(settings.config)))
    if code := _run_processes(settings, launcher, run, clean):
        return code
    metrics = read_result(run)["metrics"]
    _write_evaluation(run, checkpoint, settings, metrics=metrics, words=clean.scrub_arguments(words))
    return _format_table(metrics, checkpoint, run), run.path


def _run_processes(settings: Settings, launcher: Launcher, run: RunDirectory, clean: Scrubber) -> int:
    """Start the processes and wait until they exit; return the exit code."""
    plan = settings.create_plan(run.path)
    settings.strategy.prepare(run.get_servers_folder(1))
    outcome = launcher.launch(replace(add_secrets(settings.config, plan, clean), attempt=1)).wait()
    if failure := outcome.failure:
        _logger.error("%s %d failed:\n%s", failure.role, failure.rank, failure.cause.rstrip())
        _logger.error("logs: %s", run.path / "logs")
    return outcome.exit_code


def _write_evaluation(
    run: RunDirectory, checkpoint: Checkpoint, settings: Settings, *, metrics: Mapping[str, float], words: Sequence[str]
) -> None:
    evaluation: dict[str, Any] = {
        "time": time.time(),
        "checkpoint": checkpoint.path.name,
        "sha256": read_digest(checkpoint.path),
        "step": checkpoint.step,
        "splits": list(settings.evaluation.splits),
        "batches": settings.evaluation.batches,
        "metrics": metrics,
        "strategy": type(settings.strategy).__name__,
        "processes": settings.cluster.processes,
        "overrides": list(words),
    }
    (run.path / "evaluation.json").write_text(json.dumps(sanitize_json(evaluation), indent=2) + "\n")


def _format_table(metrics: Mapping[str, float], checkpoint: Checkpoint, run: RunDirectory) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in metrics.items():
        table.add_row(Text(printable(format_display_name(name))), repr(value))
    table.add_row("step", f"{checkpoint.step:,}")
    table.add_row("checkpoint", Text(printable(str(checkpoint.path))))
    table.add_row("written to", Text(printable(str(run.path / "evaluation.json"))))
    return table
