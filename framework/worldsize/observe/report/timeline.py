"""The timeline of a run: attempts, failures, restarts, stragglers, hangs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from worldsize.messages import format_ranks
from worldsize.observe.events import GOOD_NEWS, OVERFLOW, describe_event
from worldsize.observe.report.read import Line, Record
from worldsize.record.attempt import FAILURE, Attempt, failure_text
from worldsize.record.flight import HungProcess, hung_processes

_MARKS = 100  # maximum number of marks shown
_GOOD = ("completed", "running")


@final
@dataclass(frozen=True)
class Bar:
    """An attempt: ``start``, ``first`` step (or None) and ``end`` as percentages of the run."""

    label: str
    start: float
    first: float | None
    end: float
    is_good: bool


@final
@dataclass(frozen=True)
class Mark:
    """An event ``seconds`` after the start, at ``at`` percent of the run."""

    at: float
    seconds: float
    text: str
    is_good: bool


@final
@dataclass(frozen=True)
class Timeline:
    """The attempts and marks of a run; ``seconds`` is the run's duration."""

    seconds: float
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    left_out: int  # number of marks dropped at the end

    @property
    def ticks(self) -> list[float]:
        """Seconds since the start at each quarter of the run, from 0 to its end."""
        return [self.seconds * quarter / 4 for quarter in range(5)]


def timeline(record: Record) -> Timeline | None:
    """Build the timeline of a run, or return None if it has not started."""
    if not record.attempts:
        return None
    spans = _compute_spans(record)
    start, end = spans[0][0], max(end for _, end in spans)
    seconds = max(end - start, 1e-9)

    def compute_percent(time: float) -> float:
        return round(min(max(100 * (time - start) / seconds, 0.0), 100.0), 2)

    bars = []
    for attempt, (begun, ended) in zip(record.attempts, spans, strict=True):
        first = attempt["first_step_at"]
        label, is_good = f"attempt {attempt['number']}: {attempt['exit_reason']}", attempt["exit_reason"] in _GOOD
        bars.append(
            Bar(
                label,
                compute_percent(begun),
                None if first is None else compute_percent(first),
                compute_percent(ended),
                is_good,
            )
        )
    facts = sorted([*_list_attempt_facts(record, spans), *_list_event_facts(record.events)])
    marks = [
        Mark(compute_percent(time), max(time - start, 0.0), text, is_good) for time, text, is_good in facts[:_MARKS]
    ]
    return Timeline(seconds, tuple(bars), tuple(marks), max(0, len(facts) - _MARKS))


def _compute_spans(record: Record) -> list[tuple[float, float]]:
    """Return start and end of each attempt in Unix time; the end may be inferred."""
    starts = [float(attempt["start_at"]) for attempt in record.attempts]
    following = [*starts[1:], max(starts[-1], _last_activity(record))]
    ends = [attempt["end_at"] or after for attempt, after in zip(record.attempts, following, strict=True)]
    return [(start, max(start, end)) for start, end in zip(starts, ends, strict=True)]


def _last_activity(record: Record) -> float:
    """Return the Unix time when a step or event was last recorded, or 0."""
    files = [record.folder / name for name in ("metrics.jsonl", "events.jsonl")]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


Fact = tuple[float, str, bool]


def _list_attempt_facts(record: Record, spans: list[tuple[float, float]]) -> Iterator[Fact]:
    for attempt, (begun, ended) in zip(record.attempts, spans, strict=True):
        name, count = f"attempt {attempt['number']}", attempt["world_size"]
        words = [f"{name} started: world size {count}, on {', '.join(dict.fromkeys(attempt['hosts']))}"]
        words += [f"{key} {now} instead of {then}" for key, then, now in record.list_changes(attempt["number"])]
        yield begun, "; ".join(words), True
        if attempt["first_step_at"] is not None:
            yield attempt["first_step_at"], f"{name}: first step", True
        if attempt["end_at"] is not None:
            yield ended, f"{name} ended: {_describe_ending(attempt)}", attempt["exit_reason"] in _GOOD
    for earlier, later in pairwise(record.attempts):
        if earlier["steps"] and later["steps"] and later["first_step_at"] is not None and earlier["end_at"]:
            repeated = earlier["steps"][1] - later["steps"][0]
            recovery = max(later["first_step_at"] - earlier["end_at"], 0.0)
            again = f"; {repeated} steps repeated" if repeated > 0 else ""
            yield later["first_step_at"], f"recovered in {recovery:.1f} s{again}", True


def _describe_ending(attempt: Attempt) -> str:
    step = f" after step {attempt['steps'][1]}" if attempt["steps"] else ""
    code = "" if attempt["exit_code"] in (0, None) else f" (exit code {attempt['exit_code']})"
    why = f": {failure_text(attempt['failure'])}" if "failure" in attempt else ""
    lost = f", first host {attempt['lost_host']} lost" if "lost_host" in attempt else ""
    return f"{attempt['exit_reason']}{step}{code}{lost}{why}"


def _list_event_facts(events: Iterable[Line]) -> Iterator[Fact]:
    """Yield events, but only the first of many overflows, which the summary counts."""
    has_overflowed = False
    for event in events:
        if event["event"] != FAILURE and isinstance(event.get("time"), int | float):  # failures are shown by attempt
            if event["event"] == OVERFLOW:
                if has_overflowed:
                    continue
                has_overflowed = True
            yield event["time"], describe_event(event), event["event"] in GOOD_NEWS


_SHOWN = 24  # maximum number of rows per hang


@final
@dataclass(frozen=True)
class Row:
    """Processes that were in the same state when their gang hung."""

    who: str
    doing: str
    waits: bool
    """Whether the processes were waiting for others."""
    stack: tuple[str, ...]


@final
@dataclass(frozen=True)
class Hang:
    """The hang that ended an attempt; rows of processes that were not waiting come first."""

    attempt: int
    rows: tuple[Row, ...]
    left_out: int


def list_hangs(record: Record) -> list[Hang]:
    """Return the hangs of a run, the last one first."""
    by_attempt: defaultdict[int, list[HungProcess]] = defaultdict(list)
    for process in hung_processes(record.folder / "logs"):
        by_attempt[process.attempt].append(process)
    return [_create_hang(attempt, by_attempt[attempt]) for attempt in sorted(by_attempt, reverse=True)]


def _create_hang(attempt: int, processes: list[HungProcess]) -> Hang:
    alike: defaultdict[tuple[str, str, bool, tuple[str, ...]], set[int]] = defaultdict(set)
    for each in processes:  # a rank restarted within the attempt has two records
        alike[each.role, each.doing, each.waits, each.stack].add(each.rank)
    rows = [
        Row(f"{role} {format_ranks([*ranks])}", doing, waits, stack)
        for (role, doing, waits, stack), ranks in alike.items()
    ]
    ordered = sorted(rows, key=lambda row: row.waits)
    return Hang(attempt, tuple(ordered[:_SHOWN]), max(0, len(ordered) - _SHOWN))
