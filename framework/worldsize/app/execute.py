"""One composed configuration → plan, run folder, processes, summary."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console

import worldsize.worker  # noqa: F401 - imported once here, before the fork, rather than in every worker
from worldsize.app.record import with_secrets, write_record
from worldsize.config.compose import choices, is_sweep, resolved, sweep_folder
from worldsize.config.places import make_importable, roots
from worldsize.config.settings import Settings, load_settings
from worldsize.config.shape import with_processes
from worldsize.core import Job, Outcome, Plan
from worldsize.engine.data import is_iterable, steps_of
from worldsize.errors import ConfigError
from worldsize.observe.progress import Progress
from worldsize.observe.summary import summary_table
from worldsize.reproducibility.lock import RunLock
from worldsize.reproducibility.manifest import begin_attempt, end_attempt
from worldsize.reproducibility.redact import scrubber
from worldsize.run_directory import RunDirectory, created, planned


def execute(cfg: DictConfig) -> int:
    """Check, record and run; the exit code.

    Raises:
        ConfigError: before any process has started and with no run folder left.
    """
    torch.set_num_threads(1)  # this process forks: it must not have an OpenMP pool
    settings = _settings(cfg)
    run = planned(Path(cfg.run.root), choices()["recipe"], cfg.run.name)
    plan = _plan(settings, run)
    settings.launcher.check(settings.cluster)
    if cfg.launch == "show":
        print(settings.launcher.describe(plan))
        return 0
    clean = scrubber(settings.config, os.environ, Path.home() / ".netrc")
    plan = with_secrets(settings, plan, clean)
    with created(run):
        write_record(settings, plan, run, clean)
    if cfg.launch == "write":
        print(f"{settings.launcher.describe(plan)}\nwritten to {run.path}; nothing was started")
        return 0
    return _launch(settings, plan, run)


def _launch(settings: Settings, plan: Plan, run: RunDirectory) -> int:
    console = Console()
    with RunLock(run.path):
        begin_attempt(run.manifest, hosts=[socket.gethostname()], world_size=plan.world_size)
        job = settings.launcher.launch(plan)
        outcome = _watch(job, settings, run, console)
        result = _result(run, outcome)
        end_attempt(run.manifest, exit_reason=outcome.exit_reason, exit_code=outcome.exit_code, results=result)
    _report(run, outcome, result, console)
    return outcome.exit_code


def _watch(job: Job, settings: Settings, run: RunDirectory, console: Console) -> Outcome:
    with Progress(run.metrics, settings.pace.steps, console):
        return job.wait()


def _result(run: RunDirectory, outcome: Outcome) -> dict[str, Any]:
    """What rank 0 wrote; a run that did not get so far has only its exit reason, and that is written here."""
    if not run.result.exists() or outcome.exit_code != 0:
        run.result.write_text(json.dumps({"exit_reason": outcome.exit_reason}) + "\n")
    result: dict[str, Any] = json.loads(run.result.read_text())
    return result


def _report(run: RunDirectory, outcome: Outcome, result: Mapping[str, Any], console: Console) -> None:
    if failure := outcome.failure:
        print(f"{failure.role} {failure.rank} failed:\n{failure.cause.rstrip()}", file=sys.stderr)
        print(f"run folder: {run.path}", file=sys.stderr)
    elif outcome.exit_reason == "completed":
        console.print(summary_table(result, run.path))
    else:
        print(f"{outcome.exit_reason}; run folder: {run.path}", file=sys.stderr)


def _settings(cfg: DictConfig) -> Settings:
    """Typed settings, with what only the launching process knows filled in."""
    make_importable(roots())
    config = _completed(resolved(cfg))
    settings = load_settings(config)
    if cfg.epochs is None:
        return settings
    cfg.steps = _steps(settings)  # schedules interpolate steps, so the whole is resolved again
    return load_settings(_completed(resolved(cfg)))


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    gpus = torch.cuda.device_count() if config["cluster"]["device"] == "cuda" else 0
    group = config["run"]["group"] or (sweep_folder() if is_sweep() else choices().get("experiment"))
    run = {**config["run"], "group": group, "import_path": [str(root) for root in roots()]}
    return {**config, "cluster": with_processes(config["cluster"], gpus), "run": run}


def _steps(settings: Settings) -> int:
    dataset = settings.recipe.data("train")
    if is_iterable(dataset):
        raise ConfigError("epochs needs a data set with a length; this one is a stream. Set steps instead.")
    return steps_of(settings.config["epochs"], len(dataset), settings.batch_size)


def _plan(settings: Settings, run: RunDirectory) -> Plan:
    return Plan(run.path, settings.cluster, settings.roles, settings.determinism.variables())
