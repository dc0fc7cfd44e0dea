"""``worldsize status [RUN ...]``: list the runs in a folder and how each ended, newest first."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from worldsize.errors import WorldsizeError
from worldsize.launch.scheduled import Scheduler, describe_state
from worldsize.messages import duration, printable, report_error
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import RunView, refresh_run
from worldsize.strict_json import sanitize_json

Facts = dict[str, Any]
_FACTS = (
    *(
        "state",
        "recipe",
        "strategy",
        "result",
        "metrics",
        "started_at",
        "seconds",
        "processes",
        "attempts",
        "job",
        "run",
    ),
    *("failure", "error"),
)
_HEAD = ("state", "recipe", "strategy", "result", "duration", "started", "processes", "attempts", "job", "run")


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize status", description=__doc__)
    parser.add_argument("roots", nargs="*", type=Path, metavar="RUN", help="a run folder, or a folder of runs (runs)")
    parser.add_argument("--json", action="store_true", help="print a JSON list, with times in Unix seconds")
    options = parser.parse_args()
    roots = options.roots or [Path("runs")]
    try:
        runs = [run for root in roots for run in runs_below(root)]
    except WorldsizeError as error:
        sys.exit(report_error(error))
    if not runs:
        where = ", ".join(map(str, roots))
        sys.exit(report_error(WorldsizeError(f"no runs found in {where}. Pass a run folder, or a folder of runs.")))
    listed = sorted(map(_collect_facts, runs), key=lambda facts: facts["started_at"] or 0.0, reverse=True)
    if options.json:
        print(json.dumps(sanitize_json(listed), indent=2))
    else:
        _show_runs(listed)
    for facts in listed:
        if facts["error"]:
            print(printable(f"{facts['run']}: {facts['error']}"), file=sys.stderr)


def _collect_facts(run: RunDirectory) -> Facts:
    """Collect the facts about a run; ``error`` is the reason if its record or scheduler cannot be read."""
    facts: Facts = {**dict.fromkeys(_FACTS), "state": "damaged", "run": str(run.path)}
    try:
        view = refresh_run(run)
        facts |= _read_record(view)
    except WorldsizeError as error:
        return {**facts, "error": str(error)}
    try:
        state = describe_state(view, Scheduler(run))
        is_early = state == "completed" and "stopped_early" in view.results
        return {**facts, "state": f"{state} early" if is_early else state}
    except WorldsizeError as error:
        return {**facts, "state": "unknown", "error": str(error)}


def _read_record(view: RunView) -> Facts:
    config, attempts, metrics = view.manifest["config"], view.attempts, view.results.get("metrics") or {}
    now = time.time()
    return {
        "recipe": view.directory.path.parent.name,
        "strategy": str(_get_value(config, "strategy", "_target_") or "").rpartition(".")[2],
        "result": _format_result(config, metrics),
        "metrics": metrics,
        "started_at": attempts[-1]["start_at"] if attempts else None,
        "seconds": sum((each.get("end_at") or now) - each["start_at"] for each in attempts) if attempts else None,
        "processes": f"{attempts[-1]['world_size']}{_format_standby(view)}" if attempts else None,
        "attempts": len(attempts),
        "job": view.job,
        "failure": view.failure,
    }


def _format_result(config: Mapping[str, Any], metrics: Mapping[str, float]) -> str | None:
    """Format the run's optimized metric, or else its first metric, e.g. "accuracy 0.9861"."""
    chosen = _get_value(config, "checkpoint", "keep", "best") or _get_value(config, "sweep", "metric")
    name = chosen if chosen in metrics else next(iter(metrics), None)
    return None if name is None else f"{name} {float(metrics[name]):.4g}"


def _get_value(config: Any, *keys: str) -> Any:
    """Return a value of a configuration; None if it is missing, as in runs of earlier releases."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def _show_runs(listed: Sequence[Facts]) -> None:
    rows = [_HEAD, *map(_format_cells, listed)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    for row, facts in zip(rows, [None, *listed], strict=True):
        console.print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
        if facts and facts["failure"]:
            console.print(f"  {facts['failure']}", style="red")


def _format_cells(facts: Facts) -> tuple[str, ...]:
    """Return the cells of a run, with local times; the folder is last, so that terminals do not truncate it."""
    started, seconds = facts["started_at"], facts["seconds"]
    shown = {
        **facts,
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else None,
        "duration": None if seconds is None else duration(seconds),
    }
    return tuple(printable("" if shown[name] is None else str(shown[name])) for name in _HEAD)


def _format_standby(view: RunView) -> str:
    """Return the number of standby processes on spare nodes, formatted as " + 4"; empty if there are none."""
    shape = view.manifest["cluster"]
    count = shape.get("spare_nodes", 0) * shape["processes_per_node"]
    return f" + {count}" if count else ""
