"""Shows a running job from its files alone, so that any host that sees the folder can show it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from worldsize.files import open_regular
from worldsize.observe.events import describe_event, is_event
from worldsize.observe.health.files import NodesHealth, badness
from worldsize.observe.health.rows import HealthRow, table_of
from worldsize.observe.progress import Tail, by_split, figures, remaining
from worldsize.observe.report.read import number, waited_share, waiting_text
from worldsize.observe.report.svg import plain
from worldsize.record.attempt import FAILURE, Attempt, failure_text
from worldsize.record.json_lines import Row, row_of
from worldsize.record.metrics import EvaluationRow, MetricRow, StepRow, TimingRow, is_metric, is_timing
from worldsize.record.run_directory import RunDirectory

_EVENTS = 6  # the last ones
_RANKS = 16  # the slowest, if there are more
_NODES = 8  # those that deserve a look most, if there are more
_HEALTH = 5.0  # seconds between two looks at the health of nodes
_PER_RANK = 0.01  # seconds that each rank adds to the time between two looks at the times of all
_END = 4096  # bytes of a file that hold its last line
_T = TypeVar("_T")


@final
class Watched:
    """State of a running job, read from its folder.

    Attributes:
        step: the last step that was logged
        evaluation: the last evaluation
        events: the last few events, without failures of attempts, which the manifest has
        new_metrics: the last step and the evaluations since the previous call of look()
        new_events: the events since then
        damaged: lines that could not be read so far
        health: the last samples of the nodes
        times: the times of the ranks
    """

    def __init__(self, folder: Path) -> None:
        self._metrics = Tail(folder / "metrics.jsonl", from_start=True)
        self._event_file = Tail(folder / "events.jsonl", from_start=True)
        self.step: StepRow | None = None
        self.evaluation: EvaluationRow | None = None
        self.events: list[Row] = []
        self.new_metrics: list[MetricRow] = []
        self.new_events: list[Row] = []
        self.damaged = 0
        self.health = NodesHealth(folder, interval=_HEALTH)
        self.times = RankTimes(folder)

    def look(self) -> None:
        """Read what was appended to the files, and replace ``new_metrics`` and ``new_events`` with it."""
        last, evaluations = b"", list[EvaluationRow]()
        # the first call reads all of a long run, so only rows that are shown are parsed
        for line in self._metrics.read():
            if b'"event": "evaluation"' in line:
                evaluations += [row for row in self._rows([line], is_metric) if row["event"] == "evaluation"]
            elif line.startswith(b"{") and line.endswith(b"}\n"):
                last = line
            else:
                self.damaged += 1
        lines = [last] if last else []
        steps = [row for row in self._rows(lines, is_metric) if row["event"] == "step"]
        events = [row for row in self._rows(self._event_file.read(), _is_event) if row["event"] != FAILURE]
        self.step = steps[-1] if steps else self.step
        self.evaluation = evaluations[-1] if evaluations else self.evaluation
        metrics: list[MetricRow] = [*steps, *evaluations]
        self.new_metrics, self.new_events = sorted(metrics, key=_place), events
        self.events = [*self.events, *events][-_EVENTS:]

    def _rows(self, lines: Iterable[bytes], is_valid: Callable[[Row], TypeGuard[_T]]) -> list[_T]:
        """Parse lines, and count those that are damaged."""
        rows = [row_of(line) for line in lines]
        valid = [row for row in rows if row is not None and is_valid(row)]
        self.damaged += len(rows) - len(valid)
        return valid


@final
class RankTimes:
    """Reads the times of each rank, which has a file of its own: those of many ranks at intervals."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = RunDirectory(folder), clock
        self._last: Mapping[int, TimingRow] = {}
        self._next = -math.inf  # when they are read again

    def look(self, ranks: int) -> Mapping[int, TimingRow]:
        """Return the times of each rank in its last logged step; empty for one that does not record them."""
        if self._clock() >= self._next:
            self._last = {rank: last_row(self._run.timing(rank)) for rank in range(ranks)}
            self._next = self._clock() + _PER_RANK * ranks
        return self._last


def _is_event(row: Row) -> TypeGuard[Row]:
    return is_event(row)


def last_row(path: Path) -> TimingRow:
    """Read the last line of a rank's timing file, which may be growing; empty if there is none."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
        lines = file.read().splitlines()
        return next((row for line in reversed(lines) if (row := row_of(line)) and is_timing(row)), TimingRow())
    return TimingRow()


def _place(row: MetricRow) -> tuple[int, bool]:
    """Return the sort key of lines in order of writing: a step's evaluation comes after the step."""
    return row["step"], row["event"] == "evaluation"


def screen(watched: Watched, manifest: Mapping[str, Any], state: str) -> RenderableType:
    """Render the job for a terminal; ``state`` is the run's state in one word."""
    parts: list[RenderableType] = [_header(manifest, state)]
    if manifest["attempts"] and (failure := manifest["attempts"][-1].get("failure")):
        parts.append(Text(plain(failure_text(failure)), style="red"))
    if step := watched.step:
        parts += [_progress(step, manifest["config"].get("steps") or step["step"])]
        parts += [_ranks(times := watched.times.look(len(step["step_seconds"])), step)]
        if waiting := waiting_text(
            {rank: waited_share([row] if row else []) for rank, row in times.items()}, manifest["config"]
        ):
            parts.append(Text(waiting, style="yellow"))
    if nodes := watched.health.look():
        parts.append(_nodes(nodes))
    if evaluation := watched.evaluation:
        words = by_split({name: number(value) for name, value in evaluation["metrics"].items()})
        parts.append(Text(f"after step {evaluation['step']}  {plain(words)}"))
    parts += [Text(plain(describe_event(event), at_most=200), style="red") for event in watched.events]
    parts += [Text(damage_of(watched), style="yellow")] if watched.damaged else []
    return Group(*parts)


def damage_of(watched: Watched) -> str:
    """Describe how many lines could not be read."""
    return f"{watched.damaged} damaged lines of the run's files were left out"


def _header(manifest: Mapping[str, Any], state: str) -> Text:
    attempts: Sequence[Attempt] = manifest["attempts"]
    hosts = ", ".join(dict.fromkeys(attempts[-1]["hosts"])) if attempts else ""
    size = manifest["cluster"]["processes"]
    earlier = ", ".join(each["exit_reason"] for each in attempts[:-1])
    count = f"attempt {len(attempts)}" + f" (before: {earlier})" * bool(earlier)
    text = f"{manifest['run_id']}  {count}  world size {size}  {hosts}"
    return Text.assemble((plain(state), "green" if state == "completed" else "bold"), "  ", plain(text, at_most=200))


def _progress(step: StepRow, steps: int) -> Table:
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=steps, completed=step["step"], width=30)
    row.add_row(f"step {step['step']}/{steps}", bar, figures(step), remaining(step, steps))
    return row


def _ranks(times: Mapping[int, TimingRow], step: StepRow) -> Table:
    """List ranks with their times.

    The slowest rank has the longest own time, if that is known, since a step waits for all ranks.
    """
    seconds = [(number(each), *_own_seconds(times.get(rank, {}))) for rank, each in enumerate(step["step_seconds"])]
    order = sorted(range(len(seconds)), key=lambda rank: _slowness(*seconds[rank][:2]), reverse=True)
    is_known = any(own == own for _, own, _ in seconds)
    names = ("own: data and compute", "data") if is_known else ("", "")
    table = Table("rank", "step", *names, "", box=None, pad_edge=False)
    for rank in sorted(order[:_RANKS]):
        is_slowest = rank == order[0] and len(order) > 1
        cells = [f"{1e3 * each:.2f} ms" if each == each else "" for each in seconds[rank]]
        table.add_row(str(rank), *cells, "slowest" if is_slowest else "", style="yellow" if is_slowest else None)
    if len(order) > _RANKS:
        table.caption = f"the slowest {_RANKS} of {len(order)}"
    return table


def _nodes(rows: Mapping[int, HealthRow]) -> Table:
    """List nodes with their health, those that deserve a look most."""
    shown = sorted(sorted(rows, key=lambda node: -badness(rows[node]))[:_NODES])
    columns, cells = table_of({node: rows[node] for node in shown})
    table = Table(*columns, box=None, pad_edge=False)
    for texts in cells:
        table.add_row(*(Text(plain(each, at_most=80)) for each in texts))
    if len(rows) > _NODES:
        table.caption = f"{_NODES} of {len(rows)} nodes"
    return table


def _own_seconds(row: TimingRow) -> tuple[float, float]:
    """Return the seconds of a rank's own work, and of its wait for data; NaN if not recorded."""
    data = number(row.get("data_seconds"))
    return data + number(row.get("compute_seconds")), data


def _slowness(step: float, own: float) -> float:
    return own if own == own else step
