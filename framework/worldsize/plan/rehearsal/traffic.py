"""Computes the bytes that one rank sends in a step, if its collectives are rings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from worldsize.plan.rehearsal.calls import Call
from worldsize.plan.rehearsal.rank import Rehearsed


@final
@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends in one step, and its number of calls.

    Attributes:
        inside: Bytes in groups whose members are all on one node.
        across: Bytes in groups that span several nodes.
        calls: Collectives and messages.
    """

    inside: float
    across: float
    calls: int


def traffic(rehearsed: Rehearsed, processes_per_node: int, *, step: int) -> Traffic:
    """Sum the bytes that a rank sends in ``step`` itself, without logging and evaluation."""
    calls = [call for call in rehearsed.calls if call.step == step and call.phase == "step"]
    calls = [call for call in calls if call.operation != "new_group"]
    across = sum(_sent(call) for call in calls if _reaches_over(call, rehearsed.rank, processes_per_node))
    return Traffic(sum(map(_sent, calls)) - across, across, len(calls))


def _reaches_over(call: Call, rank: int, processes_per_node: int) -> bool:
    members = call.group.ranks if call.peer is None else (rank, call.peer)
    return len({member // processes_per_node for member in members}) > 1


def _sent(call: Call) -> float:
    """Return the bytes that a rank sends in a ring (Patarasu and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002)."""
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
