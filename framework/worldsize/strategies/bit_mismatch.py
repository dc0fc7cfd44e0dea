"""Reports of bits that differ between processes that must have the same ones, and how the run reacts.

The processes exchange what they found as JSON. These waits end with the membership of a healing gang, unlike those of
torch's functions for objects, since a process with failing hardware may hang.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.collectives.group import start_collective
from worldsize.core import BitMismatch, RunContext, World
from worldsize.errors import BitMismatchError

WHOLE = "whole"  # in World.groups: all training processes, if the world is only those with the same part of the model
_T = TypeVar("_T")


def get_whole_group(world: World) -> ProcessGroup:
    """Return the group of all training processes, of which ``world`` may be a part with other tensors."""
    group = world.groups.get(WHOLE, world.group)
    assert group is not None
    return group


@final
@dataclass(frozen=True)
class Mismatch:
    """A mismatch between processes of ``group``.

    Attributes:
        tensor: Description of the first differing tensor.
        group: The processes that compared their bits.
        guilty: Ranks in ``group`` whose bits differ from the majority's; empty if there is no majority.
        suspects: All ranks in ``group`` that took part.
        logical_rank: Logical rank of the micro-batch, if the tensor belongs to one.
    """

    tensor: str
    group: ProcessGroup
    guilty: Set[int]
    suspects: Set[int]
    logical_rank: int | None = None

    def is_named(self, *, guilty: bool) -> bool:
        """Return whether this process is guilty, or with ``guilty=False``, whether it took part."""
        return self.group.rank() in (self.guilty if guilty else self.suspects)


def report_mismatch(context: RunContext, step: int, found: Mismatch | None) -> None:
    """Report a mismatch of bits; then end this process or all of them, or let the gang heal, as configured.

    If the gang heals, all processes on the hosts of guilty ones end, unless there are no other hosts; then only the
    guilty ones do. All training processes must call it.

    Args:
        context: Context of the run.
        step: The step that was computed, or is to be computed next.
        found: The mismatch; None if the processes with which this one compared its bits agree.

    Raises:
        BitMismatchError: the run must end, or this process must.
    """
    world, whole = context.world, get_whole_group(context.world)
    own = None
    if found is not None:
        flags = [found.is_named(guilty=guilty) for guilty in (True, False)]
        own = (found.tensor, found.logical_rank, *flags)
    place = (world.global_rank, socket.gethostname(), str(world.device))
    rows = _gather_values((place, own), whole, world.device)
    named = [(*row, where) for where, row in rows if row is not None]
    guilty = [where for *_, is_guilty, _, where in named if is_guilty]
    places = guilty or [where for *_, is_suspect, where in named if is_suspect]
    ranks, hosts, devices = zip(*places, strict=True)
    (tensor, logical_rank, *_), action = named[0], context.integrity.on_mismatch
    event = BitMismatch(
        step,
        tensor,
        ranks=ranks if guilty else (),
        hosts=hosts,
        devices=devices,
        suspects=() if guilty else ranks,
        logical_rank=logical_rank,
    )
    context.emit(event)
    if action == "warn":
        return
    is_guilty, ends_run = world.global_rank in ranks, action == "stop" or not guilty
    if ends_run or is_guilty or (place[1] in hosts and any(host not in hosts for (_, host, _), _ in rows)):
        raise BitMismatchError(f"{event.describe()} {event.remedy}", is_guilty=is_guilty, ends_run=ends_run)
    # the processes that leave never take part, so this ends with the membership
    start_collective(dist.all_reduce, torch.zeros(1, device=world.device), group=whole).wait()


def broadcast_value(value: _T, source: int, group: ProcessGroup, device: torch.device) -> _T:
    """Return the value of rank ``source``, converted to JSON and back; all ranks of ``group`` must call it."""
    text = json.dumps(value).encode() if group.rank() == source else b""
    size = torch.tensor(len(text), device=device)
    start_collective(dist.broadcast, size, group=group, group_src=source).wait()
    message = _encode(text, int(size), device)
    start_collective(dist.broadcast, message, group=group, group_src=source).wait()
    received: _T = json.loads(_decode(message))
    return received


def _gather_values(value: Any, group: ProcessGroup, device: torch.device) -> list[Any]:
    """Return the values of all ranks, converted to JSON and back; all ranks of ``group`` must call it."""
    text = json.dumps(value).encode()
    most = torch.tensor(len(text), device=device)
    start_collective(dist.all_reduce, most, op=dist.ReduceOp.MAX, group=group).wait()
    own = _encode(text, int(most), device)
    everyones = own.new_empty(group.size() * len(own))
    start_collective(dist.all_gather_into_tensor, everyones, own, group=group).wait()
    return [json.loads(_decode(row)) for row in everyones.view(group.size(), -1)]


def _encode(text: bytes, size: int, device: torch.device) -> Tensor:
    """Return bytes as uint8 (size,), padded with spaces, which JSON ignores."""
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8).to(device)


def _decode(message: Tensor) -> bytes:
    return bytes(message.cpu().numpy())
