"""Rehearses ranks of a run in forked processes, and computes the bytes that they send."""

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
from worldsize.core import Cluster
from worldsize.plan.rehearsal.calls import Call
from worldsize.plan.rehearsal.exchange import CallIndex, Message, SentMessages
from worldsize.plan.rehearsal.memory import Peak
from worldsize.plan.rehearsal.rank import Rehearsed, RehearsedPart, load_splits, rehearse_rank
from worldsize.plan.rehearsal.waiting import differences
from worldsize.world.processes import ready_to_fork

_TIMES = 6  # maximum rehearsals, plus one per step, since decisions may depend on the previous step
_ALL = 64  # largest world with all ranks rehearsed
_NEAR = 8  # maximum ranks on each of the first two nodes of a larger world
_LONGEST = 1800.0  # maximum seconds per rank


def choose_ranks(cluster: Cluster) -> list[int]:
    """Return representative ranks.

    In a large world, these are up to eight ranks on each of the first two nodes, the last rank, and all powers of two
    (the distances in tree algorithms).
    """
    size, per_node = cluster.processes, cluster.processes_per_node
    if size <= _ALL:
        return list(range(size))
    near = [first + local for first in (0, per_node) for local in range(min(per_node, _NEAR)) if first + local < size]
    doubled = [2**power for power in range(size.bit_length()) if 2**power < size]
    return sorted({*near, *doubled, size - 1})


def rehearse(
    settings: Settings,
    ranks: Sequence[int],
    part: RehearsedPart,
    *,
    note: Callable[[int], None] = lambda count: None,
    longest: float = _LONGEST,
) -> list[Rehearsed]:
    """Rehearse ``ranks`` repeatedly with each other's messages, until calls are stable.

    ``note`` is called with the number of ranks done, which restarts at 1 in each repetition. Ranks that take more than
    ``longest`` seconds are killed. The processes are forked: this process must not have an OpenMP pool or have used
    CUDA.

    Raises:
        ConfigError: the recipe cannot load its data.
    """
    data, received, before, unchanged = load_splits(settings, part), SentMessages(), list[Rehearsed](), 0
    for _ in range(_TIMES + part.steps):
        rehearsed = []
        work = partial(rehearse_rank, settings=settings, part=part, data=data, received=received)
        for each in _rehearse_once(ranks, work, longest):
            rehearsed.append(each)
            note(len(rehearsed))
        rehearsed.sort(key=lambda each: each.rank)
        sent = _collect_messages(rehearsed)
        if not before and not _asks_again(rehearsed, sent):
            return rehearsed
        unchanged = unchanged + 1 if before and not _find_changed_ranks(before, rehearsed) else 0
        if unchanged and (unchanged > 1 or sent.integers == received.integers):
            return rehearsed
        before, received, last = rehearsed, sent, before
    restless = _find_changed_ranks(last, rehearsed)
    return [replace(each, is_settled=each.rank not in restless) for each in rehearsed]


def _asks_again(rehearsed: Sequence[Rehearsed], sent: SentMessages) -> bool:
    """Return whether other ranks' messages may change the calls of any rank."""
    if sent.has_news({each.rank for each in rehearsed}):
        return True
    has_failed = any(each.error is not None for each in rehearsed)
    return bool(sent.messages) and (has_failed or bool(differences(rehearsed)))


def _find_changed_ranks(before: Sequence[Rehearsed], after: Sequence[Rehearsed]) -> set[int]:
    """Return the ranks whose calls or errors have changed."""
    return {
        now.rank
        for then, now in zip(before, after, strict=True)
        if (then.calls, then.error, then.refusal) != (now.calls, now.error, now.refusal)
    }


def _collect_messages(rehearsed: Sequence[Rehearsed]) -> SentMessages:
    """Return the messages of all ranks; in each group, only those before the first call that differs."""
    ends = {each.group: each.place - 1 for each in differences(rehearsed)}
    messages: dict[CallIndex, dict[int, Message]] = {}
    for each in rehearsed:
        for place, message in each.messages.items():
            if place.route or place.number < ends.get(place.group, place.number + 1):
                messages.setdefault(place, {})[each.rank] = message
    return SentMessages(messages)


@final
@dataclass(frozen=True)
class _Running:
    """A rank being rehearsed, and the deadline for killing its process."""

    rank: int
    process: ForkProcess
    deadline: float


def _rehearse_once(ranks: Sequence[int], work: Callable[[int], Rehearsed], longest: float) -> Iterator[Rehearsed]:
    """Rehearse ``ranks`` in parallel processes; yield each result as it finishes."""
    at_once, todo = len(os.sched_getaffinity(0)), list(reversed(ranks))
    running: dict[Connection, _Running] = {}
    with ready_to_fork():
        try:
            while todo or running:
                while todo and len(running) < at_once:
                    rank = todo.pop()
                    connection, process = _start_process(work, rank, is_quiet=rank != ranks[0])
                    running[connection] = _Running(rank, process, time.monotonic() + longest)
                left = min(each.deadline for each in running.values()) - time.monotonic()
                for ready in wait(list(running), max(0.0, left)):
                    assert isinstance(ready, Connection)
                    yield _receive_rehearsal(ready, running.pop(ready))
                for late in [each for each, rehearsal in running.items() if rehearsal.deadline <= time.monotonic()]:
                    yield _stop_process(late, running.pop(late), longest)
        finally:
            for each in running.values():
                each.process.kill()


def _start_process(work: Callable[[int], Rehearsed], rank: int, *, is_quiet: bool) -> tuple[Connection, ForkProcess]:
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_rehearsal, args=(sender, work, rank), kwargs={"is_quiet": is_quiet})
    process.start()
    sender.close()
    return receiver, process


def _send_rehearsal(connection: Connection, work: Callable[[int], Rehearsed], rank: int, *, is_quiet: bool) -> None:
    if is_quiet:
        logging.disable(logging.WARNING)  # already logged by a different rank
    connection.send(work(rank))
    connection.close()
    os._exit(0)  # skips the unneeded teardown


def _receive_rehearsal(connection: Connection, running: _Running) -> Rehearsed:
    process = running.process
    try:
        answer: Rehearsed = connection.recv()
    except EOFError:
        process.join()
        answer = _create_failed_rehearsal(running.rank, f"with exit code {process.exitcode}")
    process.join()
    connection.close()
    return answer


def _stop_process(connection: Connection, running: _Running, longest: float) -> Rehearsed:
    running.process.kill()
    running.process.join()
    connection.close()
    reason = f"with a timeout after {longest:g} s. Rehearse fewer steps, or check for an endless loop"
    return _create_failed_rehearsal(running.rank, reason)


def _create_failed_rehearsal(rank: int, reason: str) -> Rehearsed:
    return Rehearsed(rank, [], Peak(0, {}), None, {}, reason)


@final
@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends in one step, and its number of calls.

    Attributes:
        inside: Bytes in groups within one node.
        across: Bytes in groups that span several nodes.
        calls: Number of collectives and messages.
    """

    inside: float
    across: float
    calls: int


def compute_traffic(rehearsed: Rehearsed, processes_per_node: int, *, step: int) -> Traffic:
    """Sum the bytes that a rank sends in ``step``, excluding logging and evaluation."""
    calls = [call for call in rehearsed.calls if call.step == step and call.phase == "step"]
    calls = [call for call in calls if call.operation != "new_group"]
    across = sum(_ring_bytes(call) for call in calls if _reaches_over(call, rehearsed.rank, processes_per_node))
    return Traffic(sum(map(_ring_bytes, calls)) - across, across, len(calls))


def _reaches_over(call: Call, rank: int, processes_per_node: int) -> bool:
    members = call.group.ranks if call.peer is None else (rank, call.peer)
    return len({member // processes_per_node for member in members}) > 1


def _ring_bytes(call: Call) -> float:
    """Return the bytes that a rank sends in a ring (Patarasu & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002)."""
    n = len(call.group.ranks)
    match call.operation:
        case "all_reduce":
            return 2 * (n - 1) / n * call.nbytes
        case "all_gather":
            return (n - 1) * call.nbytes
        case "reduce_scatter" | "all_to_all" | "broadcast" | "reduce":
            return (n - 1) / n * call.nbytes
        case "recv" | "barrier" | "monitored_barrier" | "new_group":
            return 0.0
        case _:
            return float(call.nbytes)
