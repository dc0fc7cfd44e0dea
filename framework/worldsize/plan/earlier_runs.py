"""Finds what earlier runs of a recipe have measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.checkpoint.format import complete, read
from worldsize.errors import WorldsizeError
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import RunView, look

if TYPE_CHECKING:
    from worldsize.config.settings import Settings


def earlier_runs(folder: Path) -> Iterator[RunView]:
    """Yield the runs in ``folder``, the newest first."""
    runs: list[RunDirectory] = []
    with suppress(WorldsizeError):  # this user may not read the folder
        runs = runs_below(folder)
    for run in reversed(runs):  # by date and time
        with suppress(WorldsizeError):
            yield look(run)


def newest_like(settings: Settings, folder: Path) -> RunView | None:
    """Return the newest complete run in ``folder`` of as many steps on as many processes, or None."""
    for run in earlier_runs(folder):
        with suppress(WorldsizeError, KeyError):
            config, cluster = run.manifest["config"], settings.cluster
            then = config["steps"], config["cluster"]["processes"], config["cluster"]["nodes"]
            if run.exit_reason == "completed" and then == (settings.training.steps, cluster.processes, cluster.nodes):
                return run
    return None


def measured_save(run: RunView) -> float | None:
    """Return the seconds by which a save held up the training of ``run``, if its checkpoints say so."""
    for path in reversed(complete(run.directory.checkpoints)):
        with suppress(WorldsizeError, KeyError):
            return float(read(path).facts["save_interval"]["save_seconds"])
    return None


def measured_restart(run: RunView) -> float | None:
    """Return the mean seconds of a restart of ``run``, if it had any."""
    seconds = run.results.get("goodput", {}).get("recover_seconds")
    return sum(seconds) / len(seconds) if seconds else None
