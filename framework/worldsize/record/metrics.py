"""``metrics.jsonl``: one line of strict JSON per logged step and per evaluation."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeGuard, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, RunStarted, StepDone
from worldsize.record.json_lines import JsonRows, Row, complete_lines, drop_lines, is_number, last_line, parse_row
from worldsize.strict_json import sanitize_json

_EVALUATION = b'"event": "evaluation"'  # part of every evaluation's line
_END = 1 << 20  # bytes to read from the end of a file for its last line

# fields that depend only on the computation; the others depend on time
_COMPUTED = ("event", "step", "samples", "loss", "lr", "grad_norm", "skipped", "metrics")

_NOT_WRITTEN = ("splits", "losses_sha256", "indices_sha256")  # in other files

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
    "tokens",
    "epoch",
)


JsonNumber = float | str  # strict JSON needs strings for "nan", "inf" and "-inf"


class StepRow(TypedDict):
    """A logged step: number, total samples, loss, mean step time per rank, and optional fields."""

    event: Literal["step"]
    step: int
    samples: int
    loss: JsonNumber
    step_seconds: list[JsonNumber]
    samples_per_second: float
    tokens_per_second: NotRequired[JsonNumber]
    mfu: NotRequired[JsonNumber]
    update_samples: NotRequired[float]
    tokens: NotRequired[int]
    epoch: NotRequired[float]
    metrics: NotRequired[dict[str, JsonNumber]]
    facts: NotRequired[dict[str, Any]]


class EvaluationRow(TypedDict):
    """Metrics of an evaluation; splits other than "test" are prefixed, as in ``split/name``."""

    event: Literal["evaluation"]
    step: int
    metrics: dict[str, JsonNumber]


MetricRow = StepRow | EvaluationRow


class TimingRow(TypedDict, total=False):
    """Mean times in seconds of one rank up to a logged step; unmeasured times are omitted."""

    step: int
    step_seconds: JsonNumber
    data_seconds: JsonNumber
    compute_seconds: JsonNumber


@final
class MetricsFile:
    """Listener that appends logged steps and evaluations to ``path``, and flushes each line.

    When a run starts, lines of an earlier attempt are removed for steps that will be repeated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first, evaluated=evaluated):
                self._file.close()
                if not _ends_before(self._path, first, evaluated):
                    truncate_metrics(self._path, first, evaluated=evaluated)
                self._file = self._path.open("a", buffering=1)
            case StepDone():
                self._write_line({"event": "step", **_collect_fields(event)})
            case Evaluated():
                self._write_line({"event": "evaluation", "step": event.step, "metrics": dict(event.metrics)})
            case RunEnded() | RunFailed():
                self._file.close()

    def _write_line(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(sanitize_json(line)) + "\n")


def collect_computed_values(event: StepDone) -> dict[str, Any]:
    """Return the values of a logged step that depend only on the computation, as they are in its line."""
    return extract_computed({"event": "step", **_collect_fields(event)})


def extract_computed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in a row that depend only on the computation."""
    return {key: row[key] for key in _COMPUTED if key in row}


def _collect_fields(event: StepDone) -> dict[str, Any]:
    told = {each.name: getattr(event, each.name) for each in fields(event) if each.name not in _NOT_WRITTEN}
    return {name: value for name, value in told.items() if name not in _OPTIONAL or value not in (None, {})}


def is_metric(row: Row) -> TypeGuard[MetricRow]:
    """Return whether a row has valid fields of a step or an evaluation in ``metrics.jsonl``."""
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
    """Return whether a row of a rank's ``timing`` file is valid: a step, and seconds by name."""
    return type(row.get("step")) is int and row["step"] >= 0 and all(map(is_number, row.values()))


def metric_rows(path: Path, *, at_most: int | None = None) -> JsonRows:
    """Read ``metrics.jsonl``; above ``at_most`` lines, all evaluations but not all steps."""
    return JsonRows(path, is_valid=is_metric, at_most=at_most, keep=_EVALUATION)


def truncate_metrics(path: Path, step: int, *, evaluated: bool = True) -> int:
    """Drop damaged lines and lines after ``step``; return the number of remaining logged steps.

    With ``evaluated=False``, the evaluation after ``step`` is dropped, too.
    """
    left: set[int] = set()

    def is_kept(row: Row) -> bool:
        is_before = _is_before(row, step, evaluated)
        if is_before and row["event"] == "step":
            left.add(row["step"])
        return is_before

    drop_lines(path, is_valid=is_metric, is_kept=is_kept)
    return len(left)


def _is_before(row: Mapping[str, Any], step: int, evaluated: bool) -> bool:
    is_due = row["event"] == "evaluation" and not evaluated
    return bool(row["step"] < step or (row["step"] == step and not is_due))


def _ends_before(path: Path, step: int, evaluated: bool) -> bool:
    """Return whether the last line belongs to ``step`` or an earlier step.

    An evaluation of ``step`` itself only counts if ``evaluated``. Lines are sorted by step. The launching process has
    already read all lines and dropped damaged ones at the start of the attempt.
    """
    row = parse_row(last_line(path, within=_END))
    return row is not None and is_metric(row) and _is_before(row, step, evaluated)


def evaluations(path: Path, *, until: float = math.inf) -> list[tuple[int, dict[str, float]]]:
    """Read the step and the metrics of each logged evaluation up to step ``until``, in order."""
    rows = (parse_row(line) for line, _ in complete_lines(path) if _EVALUATION in line)
    return [
        (row["step"], {name: float(value) for name, value in row["metrics"].items()})
        for row in rows
        if row and is_metric(row) and row["event"] == "evaluation" and row["step"] <= until
    ]


def logged_values(path: Path, *, until: int, last: int) -> list[tuple[int, float, float | None]]:
    """Read number, loss and gradient norm of the ``last`` logged steps up to step ``until``, in order."""
    values: deque[tuple[int, float, float | None]] = deque(maxlen=last)
    for line, _ in complete_lines(path):
        row = parse_row(line)
        if row and is_metric(row) and row["event"] == "step" and row["step"] <= until:
            norm: Any = row.get("grad_norm")
            values.append((row["step"], float(row["loss"]), float(norm) if is_number(norm) else None))
    return list(values)


def last_step(path: Path) -> int:
    """Return the step in the last line (a logged step or an evaluation), or 0 without lines."""
    return last_row(path)[0]


def last_row(path: Path) -> tuple[int, bool]:
    """Return the last line's step, and whether it is an evaluation; (0, False) without lines."""
    row = parse_row(last_line(path, within=_END))
    return (row["step"], row["event"] == "evaluation") if row is not None and is_metric(row) else (0, False)


def last_metrics(path: Path) -> dict[str, float]:
    """Return the metrics of the last logged evaluation, or an empty dict."""
    logged = evaluations(path)
    return logged[-1][1] if logged else {}


def metrics_digest(path: Path) -> str:
    """Return the SHA-256 of logged values that depend only on the computation, without times."""
    digest = hashlib.sha256()
    for row in metric_rows(path):
        digest.update(json.dumps(extract_computed(row), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
