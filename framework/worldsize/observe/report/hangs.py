"""Lists who waited for whom when a gang hung, from what each process wrote of itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import final

from worldsize.observe.report.read import Record
from worldsize.record.flight import HungProcess, hung_processes
from worldsize.spans import named

_SHOWN = 24  # rows of a hang


@final
@dataclass(frozen=True)
class Row:
    """Processes that did the same when their gang hung."""

    who: str
    doing: str
    waits: bool
    """Whether they waited for others."""
    stack: tuple[str, ...]


@final
@dataclass(frozen=True)
class Hang:
    """The hang that ended an attempt; processes that waited for nobody, whom others waited for, come first."""

    attempt: int
    rows: tuple[Row, ...]
    left_out: int


def hangs(record: Record) -> list[Hang]:
    """Return the hangs of a run, the last one first."""
    by_attempt: defaultdict[int, list[HungProcess]] = defaultdict(list)
    for process in hung_processes(record.folder / "logs"):
        by_attempt[process.attempt].append(process)
    return [_hang(attempt, by_attempt[attempt]) for attempt in sorted(by_attempt, reverse=True)]


def _hang(attempt: int, processes: list[HungProcess]) -> Hang:
    alike: defaultdict[tuple[str, str, bool, tuple[str, ...]], set[int]] = defaultdict(set)
    for each in processes:  # two of a rank if it was started again within the attempt
        alike[each.role, each.doing, each.waits, each.stack].add(each.rank)
    rows = [
        Row(f"{role} {named([*ranks])}", doing, waits, stack) for (role, doing, waits, stack), ranks in alike.items()
    ]
    ordered = sorted(rows, key=lambda row: row.waits)
    return Hang(attempt, tuple(ordered[:_SHOWN]), max(0, len(ordered) - _SHOWN))
