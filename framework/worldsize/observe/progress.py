"""Shows a run's progress in the launching process by reading ``metrics.jsonl`` as it grows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from types import TracebackType
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from worldsize.core import Event, RunEnded, RunFailed, RunStarted, parse_metric_key
from worldsize.files import is_file
from worldsize.messages import duration, printable
from worldsize.record.json_lines import complete_lines, parse_row
from worldsize.record.metrics import EvaluationRow, JsonNumber, MetricRow, StepRow, is_metric

_INTERVAL = 0.1  # seconds between reads of the file
_PLAIN_EVERY = 2.0  # seconds between lines without a terminal


@final
class Progress:
    """Shows progress within a context: a live line on a terminal, plain lines otherwise."""

    def __init__(self, metrics: Path, steps: int, console: Console) -> None:
        self._view = _Live(steps, console) if console.is_terminal else Plain(steps, console)
        self._tail = Tail(metrics)
        self._ended = Flag()
        self._thread = Thread(target=self._show_new_rows, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._view.open()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._view.close()

    def _show_new_rows(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(_INTERVAL)
            for line in self._tail.read():
                if (row := parse_row(line)) and is_metric(row):
                    self._view.show(row)


@final
class ProgressListener:
    """Listener that shows progress in a training process that was not launched by worldsize."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._shown = progress, ExitStack()

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._shown.enter_context(self._progress)
            case RunEnded() | RunFailed():
                self._shown.close()


@final
class Tail:
    """Reads lines appended to a file after this object was created, or all if ``from_start``.

    If the file is replaced, the new file is read from the start.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset, self._file = 0, 0
        if not from_start and is_file(path):
            self._offset, self._file = path.stat().st_size, path.stat().st_ino

    def read(self) -> Iterator[bytes]:
        """Yield the lines completed since the last call, or all lines if the file was replaced."""
        with suppress(OSError):  # the file may be readable again at the next call
            if (inode := self._path.stat().st_ino) != self._file:
                self._file, self._offset = inode, 0
            for line, end in complete_lines(self._path, self._offset):
                self._offset = end
                yield line


@final
class _Live:
    def __init__(self, steps: int, console: Console) -> None:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[figures]}"))
        self._bar = Bar(*columns, TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("", total=steps, figures="starting")

    def open(self) -> None:
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()

    def show(self, row: MetricRow) -> None:
        if row["event"] == "step":
            self._bar.update(self._task, completed=row["step"], figures=format_figures(row))
        else:
            self._bar.console.print(_evaluation(row), markup=False)


@final
class Plain:
    """Prints steps at intervals, and evaluations, as plain lines, without a terminal."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console, self._shown = steps, console, 0.0

    def open(self) -> None:
        """Do nothing: plain lines need no preparation."""

    def close(self) -> None:
        """Do nothing: plain lines need no cleanup."""

    def show(self, row: MetricRow) -> None:
        """Print an evaluation; print a step if it is the last one or the interval has elapsed."""
        if row["event"] != "step":
            self._console.print(_evaluation(row), highlight=False, markup=False)
        elif row["step"] == self._steps or time.monotonic() - self._shown > _PLAIN_EVERY:
            self._shown = time.monotonic()
            text = f"step {row['step']}/{self._steps}  {format_figures(row)}  {remaining(row, self._steps)}"
            self._console.print(text, highlight=False, markup=False)


def remaining(row: StepRow, steps: int) -> str:
    """Format the time left until step ``steps``, at the speed in ``row``."""
    samples, speed = (steps - row["step"]) * row["samples"] / row["step"], row["samples_per_second"]
    seconds = samples / speed if speed else math.inf
    return f"ETA {duration(round(seconds)) if math.isfinite(seconds) else 'unknown'}"


def format_figures(row: StepRow) -> str:
    """Format loss, metrics, speed and compilations in a step's row of ``metrics.jsonl``."""
    shown = {"loss": row["loss"], **row.get("metrics", {})}
    return f"{_format_metrics(shown)}  {_format_speed(row)}{_format_compilations(row.get('facts', {}))}"


def _format_speed(row: StepRow) -> str:
    speed = f"{row['samples_per_second']:,.0f} samples/s"
    if isinstance(tokens := row.get("tokens_per_second"), int | float):
        speed += f"  {tokens:,.0f} tokens/s"
    return f"{speed}  MFU {mfu:.1%}" if isinstance(mfu := row.get("mfu"), int | float) else speed


def _format_compilations(facts: Mapping[str, Any]) -> str:
    match facts.get("compiled") if isinstance(facts, Mapping) else None:
        case {"graphs": int(graphs), "seconds": float(seconds)}:
            return f"  {graphs} graphs compiled in {seconds:.0f} s"
    return ""


def _format_metrics(metrics: Mapping[str, JsonNumber]) -> str:
    return "  ".join(f"{printable(name)} {float(value):.4f}" for name, value in metrics.items())


def _evaluation(row: EvaluationRow) -> str:
    return f"step {row['step']}  {format_split_metrics(row['metrics'])}"


def format_split_metrics(metrics: Mapping[str, JsonNumber]) -> str:
    """Format the metrics of an evaluation, grouped by split."""
    splits: dict[str, dict[str, JsonNumber]] = {}
    for key, value in metrics.items():
        split, name = parse_metric_key(key)
        splits.setdefault(split, {})[name] = value
    return "  ".join(f"{printable(split)}: {_format_metrics(own)}" for split, own in splits.items())
