"""Sums and gathers whose result does not depend on how many processes computed the parts.

A float64 is a whole number of units of 2⁻¹⁰⁷⁴, so a sum of them is a whole number too. Each rank adds its own in a long
accumulator of 66 limbs of 32 bits, kept as int64 so that nothing is carried; the all-reduce adds limbs, exactly and in
any order, and the whole is rounded once (Kulisch and Miranker 1986, doi:10.1137/1028001). What a rank sends does not
grow with the number of parts, nor with the world.
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
_BITS, _MASK = 32, 2**32 - 1  # of a limb, as long as nothing has been added to it
_LIMBS = 66  # hold the largest float64 in units of the smallest one
_UNIT = 1 << 1074  # of which 1.0 is so many
_FRACTION, _SPECIAL = 52, 0x7FF  # of a float64: bits of its fraction; the exponent of what is not finite


def share(table: Tensor, world: World) -> Callable[[], Tensor]:
    """Begin to sum ``table`` over all ranks; calling the result waits for them and returns the sums, on the CPU."""
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
        return _float(sum(map(Fraction, numbers), Fraction()))


def _float(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def quotient(total: float, count: float) -> float:
    """Return the mean that a sum and its count make; NaN if nothing counts."""
    return total / count if count else math.nan


def accumulated(values_n: Tensor) -> Tensor:
    """Add float64 values [..., n] exactly, on their device.

    Returns:
        int64 [..., 69]: the limbs of each sum, the lowest first, then how many values are infinite, minus infinite and
        NaN. Such accumulators can be added up as long as they are of less than 2³¹ values in all.
    """
    bits = values_n.view(torch.int64)
    exponent, fraction = (bits >> _FRACTION) & _SPECIAL, bits & ((1 << _FRACTION) - 1)
    significand = fraction + ((exponent > 0).long() << _FRACTION)
    position = (exponent - 1).clamp(min=0)  # of its lowest bit, in units
    limb, shift = position // _BITS, position % _BITS
    low, high = (significand & _MASK) << shift, (significand >> _BITS) << shift
    sign = torch.where(bits < 0, -1, 1) * (exponent < _SPECIAL)
    limbs = bits.new_zeros(*bits.shape[:-1], _LIMBS)
    first = torch.arange(0, limbs.numel(), _LIMBS, device=bits.device).view(*bits.shape[:-1], 1)
    for place, part in enumerate((low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS)):
        limbs.view(-1).index_add_(0, (first + limb.clamp(max=_LIMBS - 3) + place).flatten(), (sign * part).flatten())
    special = torch.stack([values_n.isposinf(), values_n.isneginf(), values_n.isnan()], -2).sum(-1)
    return torch.cat([limbs, special], -1)


def rounded(accumulators: Tensor) -> list[float]:
    """Round each sum in ``accumulators`` [n, 69] correctly; one that is too large for a float is infinite.

    Of what is not all finite, a sum is what floats add up to.
    """
    return [_rounded(row) for row in accumulators.tolist()]


def _rounded(row: list[int]) -> float:
    *limbs, above, below, undefined = row
    if undefined or (above and below):
        return math.nan
    if above or below:
        return math.inf if above else -math.inf
    return _float(Fraction(sum(limb << (_BITS * place) for place, limb in enumerate(limbs) if limb), _UNIT))


def reduce_metrics(sums: Mapping[int, Sums], names: tuple[str, ...], world: World) -> dict[str, float]:
    """Return the metrics over all ranks' batches, equal on every rank; NaN if nothing counts.

    Args:
        sums: By the number of each batch that this rank evaluated: each metric as (sum, count), two scalars.
        names: Names of the metrics, the same on every rank.
        world: The ranks that take part.
    """
    values_mpb = torch.zeros(len(names), 2, len(sums), dtype=torch.float64)
    for column, batch in enumerate(sums.values()):
        for row, name in enumerate(names):
            values_mpb[row, :, column] = torch.stack([value.double().cpu() for value in batch[name]])
    totals = rounded(share(accumulated(values_mpb).flatten(0, 1), world)())
    return {name: quotient(*totals[2 * row : 2 * row + 2]) for row, name in enumerate(names)}
