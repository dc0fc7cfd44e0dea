"""``metrics.jsonl``: one line a logged step and one an evaluation; strict JSON, readable while it grows."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, RunStarted, StepDone
from worldsize.records.json_lines import Row, Rows, complete_lines, is_number, row_of
from worldsize.strict_json import strict

_logger = logging.getLogger(__name__)

# what follows from the computation alone; the rest of a line is time
_COMPUTED = ("event", "step", "samples", "loss", "lr", "grad_norm", "skipped", "metrics")

_OPTIONAL = ("facts", "compute_seconds", "communication_seconds", "update_seconds", "exposed_seconds")


@final
class JsonLines:
    """Appends each event to ``path`` and flushes, so that others can follow the file.

    What an earlier attempt wrote of steps that are about to be done again is taken out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first, evaluated=evaluated):
                self._file.close()
                rewind(self._path, first, evaluated=evaluated)
                self._file = self._path.open("a", buffering=1)
            case StepDone():
                self._write({"event": "step", **_told(event)})
            case Evaluated():
                self._write({"event": "evaluation", "step": event.step, "metrics": dict(event.metrics)})
            case RunEnded() | RunFailed():
                self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(strict(line)) + "\n")


def _told(event: StepDone) -> dict[str, Any]:
    told = {each.name: getattr(event, each.name) for each in fields(event) if each.name != "splits"}
    return {name: value for name, value in told.items() if name not in _OPTIONAL or value not in (None, {})}


def is_metric(row: Row) -> bool:
    """Return whether a row says what each line of ``metrics.jsonl`` says of a step or of an evaluation."""
    if type(row.get("step")) is not int or row["step"] < 0:
        return False
    if row.get("event") == "evaluation":
        metrics = row.get("metrics")
        return isinstance(metrics, dict) and all(map(is_number, metrics.values()))
    numbers = all(is_number(row.get(key)) for key in ("samples", "samples_per_second", "loss"))
    return row.get("event") == "step" and numbers and isinstance(row.get("step_seconds"), list)


def metric_rows(path: Path, *, at_most: int | None = None) -> Rows:
    """Read ``metrics.jsonl``; of a file of more than ``at_most`` lines, all evaluations and every k-th step."""
    return Rows(path, is_valid=is_metric, at_most=at_most, keep=b'"event": "evaluation"')


def rewind(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Drop the lines of what comes after ``step``, by way of a new file.

    With ``evaluated`` unset the evaluation that belongs to the step goes too. A last line that was cut off, and lines
    that are damaged, are dropped; the latter with a warning.
    """
    kept, size, damaged = 0, 0, 0  # kept: bytes before the first line that is dropped
    later: list[bytes] = []  # lines that are kept after it
    for line in complete_lines(path):
        row = row_of(line)
        is_damaged = row is None or not is_metric(row)
        damaged += is_damaged
        if row is not None and not is_damaged and _is_before(row, step, evaluated):
            if kept == size:
                kept += len(line)
            else:
                later.append(line)
        size += len(line)
    if damaged:
        _logger.warning("%d damaged lines of %s were left out.", damaged, path)
    if path.exists() and kept < path.stat().st_size:
        rewritten = path.with_name(f".{path.name}")
        shutil.copyfile(path, rewritten)
        os.truncate(rewritten, kept)
        with rewritten.open("ab") as file:
            file.writelines(later)
        rewritten.replace(path)


def _is_before(row: Row, step: int, evaluated: bool) -> bool:
    is_due = row["event"] == "evaluation" and not evaluated
    return bool(row["step"] < step or (row["step"] == step and not is_due))


def last_metrics(path: Path) -> dict[str, float]:
    """Return the metrics of the last evaluation that was logged; nothing if there was none."""
    last: Row = {}
    for row in metric_rows(path):
        last = row["metrics"] if row["event"] == "evaluation" else last
    return {name: float(value) for name, value in last.items()}


def metrics_digest(path: Path) -> str:
    """SHA-256 of what the lines say of the computation; times are left out."""
    digest = hashlib.sha256()
    for row in metric_rows(path):
        computed = {key: row[key] for key in _COMPUTED if key in row}
        digest.update(json.dumps(computed, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
