"""``metrics.jsonl``: one line per logged step and per evaluation; strict JSON, readable while it grows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeGuard, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, RunStarted, StepDone
from worldsize.errors import CheckpointError
from worldsize.record.json_lines import JsonRows, Row, complete_lines, drop_lines, is_number, last_line, row_of
from worldsize.record.run_directory import RunDirectory
from worldsize.strict_json import strict

_EVALUATION = b'"event": "evaluation"'  # is in each line about one, as we write it
_END = 1 << 20  # bytes of a file that hold its last line

# what follows from the computation alone; the rest of a line is time
_COMPUTED = ("event", "step", "samples", "loss", "lr", "grad_norm", "skipped", "metrics")

_OPTIONAL = (
    "facts",
    "metrics",
    "compute_seconds",
    "communication_seconds",
    "update_seconds",
    "exposed_seconds",
    "tokens_per_second",
    "mfu",
    "update_samples",
)


JsonNumber = float | str  # "nan", "inf" and "-inf" are words in strict JSON


class StepRow(TypedDict):
    """A logged step: its number, the samples up to it, its loss, and the mean time of a step on each rank."""

    event: Literal["step"]
    step: int
    samples: int
    loss: JsonNumber
    step_seconds: list[JsonNumber]
    samples_per_second: float
    tokens_per_second: NotRequired[JsonNumber]
    mfu: NotRequired[JsonNumber]
    update_samples: NotRequired[float]
    metrics: NotRequired[dict[str, JsonNumber]]
    facts: NotRequired[dict[str, Any]]


class EvaluationRow(TypedDict):
    """The metrics of an evaluation after a step; those of other splits than "test" are named ``split/name``."""

    event: Literal["evaluation"]
    step: int
    metrics: dict[str, JsonNumber]


MetricRow = StepRow | EvaluationRow


class TimingRow(TypedDict, total=False):
    """The mean times of one rank up to a logged step, in seconds; those that were not measured are left out."""

    step: int
    step_seconds: JsonNumber
    data_seconds: JsonNumber
    compute_seconds: JsonNumber


@final
class MetricsFile:
    """Appends each event to ``path`` and flushes, so that others can follow the file.

    Lines of an earlier attempt about steps that will be repeated are removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first, evaluated=evaluated):
                self._file.close()
                if not _ends_before(self._path, first, evaluated):
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


def is_metric(row: Row) -> TypeGuard[MetricRow]:
    """Return whether a row has the required fields of a step or an evaluation in ``metrics.jsonl``."""
    if type(row.get("step")) is not int or row["step"] < 0:
        return False
    metrics = row.get("metrics", {} if row.get("event") == "step" else None)
    if not isinstance(metrics, dict) or not all(map(is_number, metrics.values())):
        return False
    if row.get("event") == "evaluation":
        return True
    seconds = row.get("step_seconds")
    is_timed = isinstance(seconds, list) and all(map(is_number, seconds))
    positive = all(_is_positive(row.get(key)) for key in ("step", "samples", "samples_per_second"))
    return row.get("event") == "step" and positive and is_number(row.get("loss")) and is_timed


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def is_timing(row: Row) -> TypeGuard[TimingRow]:
    """Return whether a row has the required fields of a rank's ``timing`` file: its step, and seconds by name."""
    return type(row.get("step")) is int and row["step"] >= 0 and all(map(is_number, row.values()))


def metric_rows(path: Path, *, at_most: int | None = None) -> JsonRows:
    """Read ``metrics.jsonl``; if it has more than ``at_most`` lines, all evaluations and every k-th step."""
    return JsonRows(path, is_valid=is_metric, at_most=at_most, keep=_EVALUATION)


def rewind(path: Path, step: int, *, evaluated: bool = True) -> int:
    """Drop damaged lines and those after ``step``; return how many logged steps are left. See :func:`drop_lines`.

    With ``evaluated=False`` the evaluation after the step is also dropped.
    """
    left: set[int] = set()

    def is_kept(row: Row) -> bool:
        is_before = _is_before(row, step, evaluated)
        if is_before and row["event"] == "step":
            left.add(row["step"])
        return is_before

    drop_lines(path, is_valid=is_metric, is_kept=is_kept)
    return len(left)


def rewind_to_checkpoint(run: RunDirectory, manifest: Mapping[str, Any]) -> int:
    """Drop the metrics after the run's newest checkpoint, since these steps will be repeated.

    Return how many logged steps before it the file lacks: the checkpoint was written after their lines.
    """
    from worldsize.checkpoint.format import complete, read, step_of  # torch, for which those who look do not wait

    saved, evaluated = complete(run.checkpoints), True
    if saved:
        with suppress(CheckpointError):  # a damaged one is refused by those who load it
            evaluated = read(saved[-1]).facts.get("evaluated", True)
    step = step_of(saved[-1]) if saved else 0
    left = rewind(run.metrics, step, evaluated=evaluated)
    if not step:
        return 0
    changes = [change for resumed in manifest.get("resumed", ()) for change in resumed["changes"]]
    log_every: int = max([manifest["config"]["log_every"], *(then for key, then, _ in changes if key == "log_every")])
    logged = step // log_every + (log_every > 1)  # the first step is always logged
    return max(0, logged - left)


def _is_before(row: Mapping[str, Any], step: int, evaluated: bool) -> bool:
    is_due = row["event"] == "evaluation" and not evaluated
    return bool(row["step"] < step or (row["step"] == step and not is_due))


def _ends_before(path: Path, step: int, evaluated: bool) -> bool:
    """Return whether the last line is at or before ``step``; lines are in the order of their steps.

    The launching process has read them all, and dropped those that were damaged, when the attempt began.
    """
    row = row_of(last_line(path, within=_END))
    return row is not None and is_metric(row) and _is_before(row, step, evaluated)


def evaluations(path: Path, *, until: float = math.inf) -> list[tuple[int, dict[str, float]]]:
    """Read the step and the metrics of each evaluation that was logged, up to step ``until``, in order."""
    rows = (row_of(line) for line, _ in complete_lines(path) if _EVALUATION in line)
    return [
        (row["step"], {name: float(value) for name, value in row["metrics"].items()})
        for row in rows
        if row and is_metric(row) and row["event"] == "evaluation" and row["step"] <= until
    ]


def last_step(path: Path) -> int:
    """Return the step of the last line, of a logged step or an evaluation; 0 if there is none."""
    return last_row(path)[0]


def last_row(path: Path) -> tuple[int, bool]:
    """Return the step of the last line, and whether it is about an evaluation; step 0 if there is none."""
    row = row_of(last_line(path, within=_END))
    return (row["step"], row["event"] == "evaluation") if row is not None and is_metric(row) else (0, False)


def last_metrics(path: Path) -> dict[str, float]:
    """Return the metrics of the last logged evaluation; empty if there was none."""
    logged = evaluations(path)
    return logged[-1][1] if logged else {}


def metrics_digest(path: Path) -> str:
    """Return the SHA-256 of all values that depend only on the computation; times are left out."""
    digest = hashlib.sha256()
    for row in metric_rows(path):
        computed = {key: row[key] for key in _COMPUTED if key in row}
        digest.update(json.dumps(computed, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
