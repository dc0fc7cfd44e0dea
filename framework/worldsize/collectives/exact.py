"""Sums and gathers whose result does not depend on how many processes computed the parts.

Every rank writes its own entries into a table that is zero elsewhere; the all-reduce then only adds
zeros, which is exact, and each rank holds all entries and adds them with ``math.fsum``, whose result
is the correctly rounded sum in any order (Shewchuk 1997, doi:10.1007/PL00009321).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from worldsize.collectives.step_timer import wait
from worldsize.core import World

Sums = Mapping[str, tuple[Tensor, Tensor]]


def share(table: Tensor, world: World) -> Callable[[], Tensor]:
    """Begin to sum a float64 table over all ranks.

    That is exact where each entry is written by one rank and is zero on the others. Calling the result waits for the
    other ranks and returns the whole table on the CPU.
    """
    if world.group is None:
        return table.cpu
    work = dist.all_reduce(table := table.to(world.device), group=world.group, async_op=True)

    def whole() -> Tensor:
        wait(work)
        return table.cpu()

    return whole


def gather(part: Tensor, world: World) -> Callable[[], Tensor]:
    """Begin to gather every rank's ``part``, of the same shape.

    Calling the result waits for the other ranks and returns [ranks, *part.shape] on the CPU.
    """
    if world.group is None:
        return part[None].cpu
    parts = part.new_empty(world.size, *part.shape)
    work = dist.all_gather_into_tensor(parts.view(-1), part.view(-1), group=world.group, async_op=True)

    def whole() -> Tensor:
        wait(work)
        return parts.cpu()

    return whole


Key = TypeVar("Key", bound=tuple[Any, ...])


def gather_tensors(parts: Mapping[Key, Tensor], world: World) -> dict[Key, Tensor]:
    """Gather tensors of any shapes from all ranks, each of which has keys of its own; sorted by key, on the CPU."""
    own = {key: part.detach().cpu().contiguous() for key, part in sorted(parts.items())}
    if world.group is None:
        return own
    forms: list[Any] = [None] * world.size
    dist.all_gather_object(forms, [(key, part.dtype, part.shape) for key, part in own.items()], group=world.group)
    sizes = [[shape.numel() * dtype.itemsize for _, dtype, shape in form] for form in forms]
    bytes_n = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)
    pieces = [part.reshape(-1).view(torch.uint8) for part in own.values()]
    if pieces:
        bytes_n[: sum(piece.numel() for piece in pieces)] = torch.cat(pieces)
    gathered: dict[Key, Tensor] = {}
    for form, lengths, row_n in zip(forms, sizes, gather(bytes_n.to(world.device), world)(), strict=True):
        for (key, dtype, shape), piece in zip(form, row_n[: sum(lengths)].split(lengths), strict=True):
            gathered[key] = piece.clone().view(dtype).reshape(shape)
    return dict(sorted(gathered.items()))


def exact_sum(values: Iterable[float]) -> float:
    """Return the correctly rounded sum, the same in any order; of what is not all finite, what floats add up to.

    A sum that is too large for a float is infinite.
    """
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except OverflowError:  # on the way; the sum itself may be small enough
        return _rounded(sum(map(Fraction, numbers), Fraction()))


def _rounded(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def quotient(total: float, count: float) -> float:
    """Return the mean that a sum and its count make; NaN if nothing counts."""
    return total / count if count else math.nan


def reduce_metrics(sums: Mapping[int, Sums], names: tuple[str, ...], world: World) -> dict[str, float]:
    """Return the metrics over all ranks' batches, equal on every rank; NaN if nothing counts.

    Args:
        sums: By the number of each batch that this rank evaluated: each metric as (sum, count), two scalars.
        names: Names of the metrics, the same on every rank.
        world: The ranks that take part.
    """
    batches = _agreed_maximum(max(sums, default=-1) + 1, world)
    table_bmp = torch.zeros(batches, len(names), 2, dtype=torch.float64)
    for index, batch in sums.items():
        for column, name in enumerate(names):
            table_bmp[index, column] = torch.stack([value.double().cpu() for value in batch[name]])
    totals_mp = [[exact_sum(pair) for pair in metric] for metric in share(table_bmp, world)().permute(1, 2, 0).tolist()]
    return {name: quotient(total, count) for name, (total, count) in zip(names, totals_mp, strict=True)}


def _agreed_maximum(value: int, world: World) -> int:
    if world.group is None:
        return value
    agreed = torch.tensor(value, device=world.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=world.group)
    return int(agreed.item())
