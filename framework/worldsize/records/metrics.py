"""``metrics.jsonl``: one line a logged step and one an evaluation; strict JSON, readable while it grows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, RunStarted, StepDone
from worldsize.records.strict_json import strict

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


def rewind(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Drop the lines of what comes after ``step``, or (``evaluated`` unset) before the evaluation that belongs to it,
    and a last line that was cut off, by way of a new file.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and _is_before(json.loads(line), step, evaluated)]
    if len(kept) < len(lines):
        rewritten = path.with_name(f".{path.name}")
        rewritten.write_text("".join(kept))
        rewritten.replace(path)


def _is_before(row: Mapping[str, Any], step: int, evaluated: bool) -> bool:
    is_due = row.get("event") == "evaluation" and not evaluated
    return bool(row["step"] < step or (row["step"] == step and not is_due))


def last_metrics(path: Path) -> dict[str, float]:
    """Return the metrics of the last evaluation that was logged; nothing if there was none."""
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    found = [row["metrics"] for row in rows if row["event"] == "evaluation"]
    return {name: float(value) for name, value in found[-1].items()} if found else {}


def metrics_digest(path: Path) -> str:
    """SHA-256 of what the lines say of the computation; times are left out."""
    digest = hashlib.sha256()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        computed = {key: row[key] for key in _COMPUTED if key in row}
        digest.update(json.dumps(computed, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
