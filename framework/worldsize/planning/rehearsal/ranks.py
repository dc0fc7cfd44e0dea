"""Rehearses many ranks of a run, each in a process that is forked for it, as many at once as there are cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from worldsize.config.settings import Settings
from worldsize.planning.rehearsal.differences import Difference, differences
from worldsize.planning.rehearsal.exchange import Place, Said, Words
from worldsize.planning.rehearsal.rank import Part, Rehearsed, data_of, rehearse_rank
from worldsize.planning.rehearsal.storage_log import Peak
from worldsize.world.fork import ready_to_fork

_TIMES = 4  # that ranks are rehearsed, at most
_ALL = 64  # ranks, of which all are rehearsed


def chosen_ranks(settings: Settings) -> list[int]:
    """Return the ranks that stand for all: of a large world the first two nodes', the last, and a few between."""
    size, per_node = settings.cluster.processes, settings.cluster.processes_per_node
    if size <= _ALL:
        return list(range(size))
    near = range(min(size, 2 * min(per_node, 8)))
    doubled = [2**power for power in range(size.bit_length()) if 2**power < size]  # every distance that trees have
    return sorted({*near, *doubled, size - 1})


def rehearse(
    settings: Settings, ranks: Sequence[int], part: Part, *, note: Callable[[int], None] = lambda count: None
) -> list[Rehearsed]:
    """Rehearse ``ranks`` until they agree, or part where they have parted before, knowing now what the others say.

    ``note`` is told how many are done, beginning with 1 again where they are rehearsed again. The processes are forked:
    this one must have no OpenMP pool, and must not have used CUDA.
    """
    heard, data, parted = Said(), data_of(settings, part), list[Difference]()
    for _ in range(_TIMES):
        rehearsed = []
        for each in _rehearsed_once(
            ranks, partial(rehearse_rank, settings=settings, part=part, data=data, heard=heard)
        ):
            rehearsed.append(each)
            note(len(rehearsed))
        parted, before = differences(rehearsed), parted
        if not parted or parted == before:
            break
        heard = _said(rehearsed)
    return sorted(rehearsed, key=lambda each: each.rank)


def _said(rehearsed: Sequence[Rehearsed]) -> Said:
    words: dict[Place, dict[int, Words]] = {}
    for each in rehearsed:
        for place, own in each.words.items():
            words.setdefault(place, {})[each.rank] = own
    return Said(words)


def _rehearsed_once(ranks: Sequence[int], work: Callable[[int], Rehearsed]) -> Iterator[Rehearsed]:
    """Yield what each of ``ranks`` does, as it becomes known."""
    at_once, context, todo = len(os.sched_getaffinity(0)), get_context("fork"), list(reversed(ranks))
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    with ready_to_fork():
        try:
            while todo or running:
                while todo and len(running) < at_once:
                    mine, theirs = context.Pipe(duplex=False)
                    rank = todo.pop()
                    process = context.Process(
                        target=_send, args=(theirs, work, rank), kwargs={"is_quiet": rank != ranks[0]}
                    )
                    process.start()
                    theirs.close()
                    running[mine] = rank, process
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    rank, process = running.pop(ready)
                    yield _received(ready, rank, process)
        finally:
            for _, process in running.values():
                process.kill()


def _send(connection: Connection, work: Callable[[int], Rehearsed], rank: int, *, is_quiet: bool) -> None:
    if is_quiet:
        logging.disable(logging.WARNING)  # another rank has said it
    connection.send(work(rank))
    connection.close()
    os._exit(0)  # what it has made needs no taking apart


def _received(connection: Connection, rank: int, process: ForkProcess) -> Rehearsed:
    try:
        answer: Rehearsed = connection.recv()
    except EOFError:
        process.join()
        answer = Rehearsed(rank, [], Peak(0, {}), None, {}, f"its process ended with exit code {process.exitcode}")
    process.join()
    connection.close()
    return answer
