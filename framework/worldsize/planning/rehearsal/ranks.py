"""Rehearses many ranks of a run, each in a process that is forked for it, as many at once as there are cores."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import final

from worldsize.config.settings import Settings
from worldsize.planning.rehearsal.differences import differences
from worldsize.planning.rehearsal.exchange import Place, Said, Words
from worldsize.planning.rehearsal.rank import Part, Rehearsed, data_of, rehearse_rank
from worldsize.planning.rehearsal.storage_log import Peak
from worldsize.world.fork import ready_to_fork

_TIMES = 6  # that ranks are rehearsed, at most, beside once for each step: what they decide may depend on the last
_ALL = 64  # ranks, of which all are rehearsed
_NEAR = 8  # ranks of each of the first two nodes of a larger world
_LONGEST = 1800.0  # seconds that one rank takes, at most


def chosen_ranks(settings: Settings) -> list[int]:
    """Return the ranks that stand for all.

    In a large world these are eight at most of each of the first two nodes, the last, and those at distances that trees
    have.
    """
    size, per_node = settings.cluster.processes, settings.cluster.processes_per_node
    if size <= _ALL:
        return list(range(size))
    near = [first + local for first in (0, per_node) for local in range(min(per_node, _NEAR)) if first + local < size]
    doubled = [2**power for power in range(size.bit_length()) if 2**power < size]
    return sorted({*near, *doubled, size - 1})


def rehearse(
    settings: Settings,
    ranks: Sequence[int],
    part: Part,
    *,
    note: Callable[[int], None] = lambda count: None,
    longest: float = _LONGEST,
) -> list[Rehearsed]:
    """Rehearse ``ranks`` until they call what they called before, knowing now what the others say.

    ``note`` is told how many are done, beginning with 1 again where they are rehearsed again. A rank that takes more
    than ``longest`` seconds is ended. The processes are forked: this one must have no OpenMP pool, and must not have
    used CUDA.

    Raises:
        ConfigError: the recipe cannot load its data.
    """
    data, heard, before, unchanged = data_of(settings, part), Said(), list[Rehearsed](), 0
    for _ in range(_TIMES + part.steps):
        rehearsed = []
        work = partial(rehearse_rank, settings=settings, part=part, data=data, heard=heard)
        for each in _rehearsed_once(ranks, work, longest):
            rehearsed.append(each)
            note(len(rehearsed))
        rehearsed.sort(key=lambda each: each.rank)
        said = _said(rehearsed)
        if not before and not _asks_again(rehearsed, said):
            return rehearsed
        unchanged = unchanged + 1 if before and not _changed(before, rehearsed) else 0
        if unchanged and (unchanged > 1 or said.integers == heard.integers):
            return rehearsed
        before, heard, last = rehearsed, said, before
    restless = _changed(last, rehearsed)
    return [replace(each, is_settled=each.rank not in restless) for each in rehearsed]


def _asks_again(rehearsed: Sequence[Rehearsed], said: Said) -> bool:
    """Return whether any rank may call something else once it has heard the others."""
    if said.has_news({each.rank for each in rehearsed}):
        return True
    has_failed = any(each.error is not None for each in rehearsed)
    return bool(said.words) and (has_failed or bool(differences(rehearsed)))


def _changed(before: Sequence[Rehearsed], after: Sequence[Rehearsed]) -> set[int]:
    """Return the ranks that call something else than before, or fail in another way."""
    return {
        now.rank
        for then, now in zip(before, after, strict=True)
        if (then.calls, then.error, then.refusal) != (now.calls, now.error, now.refusal)
    }


def _said(rehearsed: Sequence[Rehearsed]) -> Said:
    """Return what ranks say, in each group until its calls part: after that one answers to something else."""
    ends = {each.group: each.place - 1 for each in differences(rehearsed)}
    words: dict[Place, dict[int, Words]] = {}
    for each in rehearsed:
        for place, own in each.words.items():
            if place.route or place.number < ends.get(place.group, place.number + 1):
                words.setdefault(place, {})[each.rank] = own
    return Said(words)


@final
@dataclass(frozen=True)
class _Running:
    """A rank that is being rehearsed, and the moment at which it is ended."""

    rank: int
    process: ForkProcess
    deadline: float


def _rehearsed_once(ranks: Sequence[int], work: Callable[[int], Rehearsed], longest: float) -> Iterator[Rehearsed]:
    """Yield what each of ``ranks`` does, as it becomes known."""
    at_once, todo = len(os.sched_getaffinity(0)), list(reversed(ranks))
    running: dict[Connection, _Running] = {}
    with ready_to_fork():
        try:
            while todo or running:
                while todo and len(running) < at_once:
                    rank = todo.pop()
                    connection, process = _started(work, rank, is_quiet=rank != ranks[0])
                    running[connection] = _Running(rank, process, time.monotonic() + longest)
                left = min(each.deadline for each in running.values()) - time.monotonic()
                for ready in wait(list(running), max(0.0, left)):
                    assert isinstance(ready, Connection)
                    yield _received(ready, running.pop(ready))
                for late in [each for each, own in running.items() if own.deadline <= time.monotonic()]:
                    yield _ended(late, running.pop(late), longest)
        finally:
            for each in running.values():
                each.process.kill()


def _started(work: Callable[[int], Rehearsed], rank: int, *, is_quiet: bool) -> tuple[Connection, ForkProcess]:
    context = get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, work, rank), kwargs={"is_quiet": is_quiet})
    process.start()
    theirs.close()
    return mine, process


def _send(connection: Connection, work: Callable[[int], Rehearsed], rank: int, *, is_quiet: bool) -> None:
    if is_quiet:
        logging.disable(logging.WARNING)  # another rank has said it
    connection.send(work(rank))
    connection.close()
    os._exit(0)  # what it has made needs no taking apart


def _received(connection: Connection, running: _Running) -> Rehearsed:
    process = running.process
    try:
        answer: Rehearsed = connection.recv()
    except EOFError:
        process.join()
        answer = _without_answer(running.rank, f"its process ended with exit code {process.exitcode}")
    process.join()
    connection.close()
    return answer


def _ended(connection: Connection, running: _Running, longest: float) -> Rehearsed:
    running.process.kill()
    running.process.join()
    connection.close()
    reason = f"its process was ended after {longest:g} seconds: rehearse fewer steps, or look for an endless loop"
    return _without_answer(running.rank, reason)


def _without_answer(rank: int, reason: str) -> Rehearsed:
    return Rehearsed(rank, [], Peak(0, {}), None, {}, reason)
