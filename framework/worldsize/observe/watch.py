"""Shows a running job using only its files, on any host with access to the folder."""

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
from worldsize.observe.health.files import NodesHealth, score_problems
from worldsize.observe.health.rows import HealthRow, format_node_table
from worldsize.observe.progress import Tail, format_figures, format_split_metrics, remaining
from worldsize.observe.report.read import compute_wait_share, parse_number, waiting_text
from worldsize.observe.report.svg import shorten_text
from worldsize.record.attempt import FAILURE, Attempt, failure_text
from worldsize.record.json_lines import Row, parse_row
from worldsize.record.metrics import EvaluationRow, MetricRow, StepRow, TimingRow, is_metric, is_timing
from worldsize.record.run_directory import RunDirectory

_EVENTS = 6  # number of latest events shown
_RANKS = 16  # maximum ranks shown, the slowest ones
_NODES = 8  # maximum nodes shown, those with the most problems
_HEALTH = 5.0  # seconds between reads of node health
_PER_RANK = 0.01  # additional seconds per rank between reads of all ranks' times
_END = 4096  # bytes at the end of a file that contain its last line
_T = TypeVar("_T")


@final
class Watched:
    """State of a running job, read from its folder.

    Attributes:
        step: the last logged step
        evaluation: the last evaluation
        events: the last few events, without failures of attempts, which are in the manifest
        new_metrics: the last step and the evaluations read by the last call of :meth:`update_rows`
        new_events: the events read by that call
        damaged: total number of unreadable lines
        health: reader of the nodes' latest samples
        times: reader of the ranks' step times
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

    def update_rows(self) -> None:
        """Read new lines of the files, and replace ``new_metrics`` and ``new_events``."""
        last, evaluations = b"", list[EvaluationRow]()
        # the first call reads the whole file, so only rows that are shown are parsed
        for line in self._metrics.read():
            if b'"event": "evaluation"' in line:
                evaluations += [row for row in self._parse_rows([line], is_metric) if row["event"] == "evaluation"]
            elif line.startswith(b"{") and line.endswith(b"}\n"):
                last = line
            else:
                self.damaged += 1
        lines = [last] if last else []
        steps = [row for row in self._parse_rows(lines, is_metric) if row["event"] == "step"]
        events = [row for row in self._parse_rows(self._event_file.read(), _is_event) if row["event"] != FAILURE]
        self.step = steps[-1] if steps else self.step
        self.evaluation = evaluations[-1] if evaluations else self.evaluation
        metrics: list[MetricRow] = [*steps, *evaluations]
        self.new_metrics, self.new_events = sorted(metrics, key=_get_sort_key), events
        self.events = [*self.events, *events][-_EVENTS:]

    def _parse_rows(self, lines: Iterable[bytes], is_valid: Callable[[Row], TypeGuard[_T]]) -> list[_T]:
        """Parse and return the valid lines, and count damaged ones."""
        rows = [parse_row(line) for line in lines]
        valid = [row for row in rows if row is not None and is_valid(row)]
        self.damaged += len(rows) - len(valid)
        return valid


@final
class RankTimes:
    """Reads the times of each rank from its file; with many ranks, at intervals."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = RunDirectory(folder), clock
        self._last: Mapping[int, TimingRow] = {}
        self._next = -math.inf  # time of the next read

    def read_times(self, ranks: int) -> Mapping[int, TimingRow]:
        """Return each rank's times in its last logged step; empty for ranks without times."""
        if self._clock() >= self._next:
            self._last = {rank: last_row(self._run.get_timing_file(rank)) for rank in range(ranks)}
            self._next = self._clock() + _PER_RANK * ranks
        return self._last


def _is_event(row: Row) -> TypeGuard[Row]:
    return is_event(row)


def last_row(path: Path) -> TimingRow:
    """Read the last line of a rank's timing file, which may be growing; empty without one."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
        lines = file.read().splitlines()
        return next((row for line in reversed(lines) if (row := parse_row(line)) and is_timing(row)), TimingRow())
    return TimingRow()


def _get_sort_key(row: MetricRow) -> tuple[int, bool]:
    """Return a sort key for the order of writing: a step, then its evaluation."""
    return row["step"], row["event"] == "evaluation"


def render_screen(watched: Watched, manifest: Mapping[str, Any], state: str) -> RenderableType:
    """Render the job for a terminal; ``state`` is the run's state in one word."""
    parts: list[RenderableType] = [_render_header(manifest, state)]
    if manifest["attempts"] and (failure := manifest["attempts"][-1].get("failure")):
        parts.append(Text(shorten_text(failure_text(failure)), style="red"))
    if step := watched.step:
        parts += [_progress(step, manifest["config"].get("steps") or step["step"])]
        parts += [_build_rank_table(times := watched.times.read_times(len(step["step_seconds"])), step)]
        if waiting := waiting_text(
            {rank: compute_wait_share([row] if row else []) for rank, row in times.items()}, manifest["config"]
        ):
            parts.append(Text(waiting, style="yellow"))
    if nodes := watched.health.get_current_samples():
        parts.append(_build_node_table(nodes))
    if evaluation := watched.evaluation:
        words = format_split_metrics({name: parse_number(value) for name, value in evaluation["metrics"].items()})
        parts.append(Text(f"after step {evaluation['step']}  {shorten_text(words)}"))
    parts += [Text(shorten_text(describe_event(event), at_most=200), style="red") for event in watched.events]
    parts += [Text(describe_damage(watched), style="yellow")] if watched.damaged else []
    return Group(*parts)


def describe_damage(watched: Watched) -> str:
    """Format the number of unreadable lines, for display."""
    return f"skipped {watched.damaged} damaged lines in the run's files"


def _render_header(manifest: Mapping[str, Any], state: str) -> Text:
    attempts: Sequence[Attempt] = manifest["attempts"]
    hosts = ", ".join(dict.fromkeys(attempts[-1]["hosts"])) if attempts else ""
    size = manifest["cluster"]["processes"]
    earlier = ", ".join(each["exit_reason"] for each in attempts[:-1])
    count = f"attempt {len(attempts)}" + f" (before: {earlier})" * bool(earlier)
    text = f"{manifest['run_id']}  {count}  world size {size}  {hosts}"
    return Text.assemble(
        (shorten_text(state), "green" if state == "completed" else "bold"), "  ", shorten_text(text, at_most=200)
    )


def _progress(step: StepRow, steps: int) -> Table:
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=steps, completed=step["step"], width=30)
    row.add_row(f"step {step['step']}/{steps}", bar, format_figures(step), remaining(step, steps))
    return row


def _build_rank_table(times: Mapping[int, TimingRow], step: StepRow) -> Table:
    """Build the table of ranks with their times.

    The slowest rank is the one with the longest own time, if known, since step times include waits for other ranks.
    """
    seconds = [
        (parse_number(each), *_own_seconds(times.get(rank, {}))) for rank, each in enumerate(step["step_seconds"])
    ]
    order = sorted(range(len(seconds)), key=lambda rank: _slowness(*seconds[rank][:2]), reverse=True)
    is_known = any(own == own for _, own, _ in seconds)
    names = ("own: data and compute", "data") if is_known else ("", "")
    table = Table("rank", "step", *names, "", box=None, pad_edge=False)
    for rank in sorted(order[:_RANKS]):
        is_slowest = rank == order[0] and len(order) > 1
        cells = [f"{1e3 * each:.2f} ms" if each == each else "" for each in seconds[rank]]
        table.add_row(str(rank), *cells, "slowest" if is_slowest else "", style="yellow" if is_slowest else None)
    if len(order) > _RANKS:
        table.caption = f"the slowest {_RANKS} of {len(order)} ranks"
    return table


def _build_node_table(rows: Mapping[int, HealthRow]) -> Table:
    """Build the table of the nodes with the most problems, and their health."""
    shown = sorted(sorted(rows, key=lambda node: -score_problems(rows[node]))[:_NODES])
    columns, cells = format_node_table({node: rows[node] for node in shown})
    table = Table(*columns, box=None, pad_edge=False)
    for texts in cells:
        table.add_row(*(Text(shorten_text(each, at_most=80)) for each in texts))
    if len(rows) > _NODES:
        table.caption = f"{_NODES} of {len(rows)} nodes"
    return table


def _own_seconds(row: TimingRow) -> tuple[float, float]:
    """Return the seconds of a rank's own work, and of its wait for data; NaN if not recorded."""
    data = parse_number(row.get("data_seconds"))
    return data + parse_number(row.get("compute_seconds")), data


def _slowness(step: float, own: float) -> float:
    return own if own == own else step
