"""Exact sums and gathers, independent of the number of processes.

A float64 is an integer multiple of 2⁻¹⁰⁷⁴, and so is a sum of float64s. Each rank adds its own values in a long
accumulator of 66 limbs with 32 bits each, stored as int64 so that carries are not needed. The all-reduce adds limbs
exactly, in any order, and the result is rounded once (Kulisch and Miranker 1986, doi:10.1137/1028001). The number of
bytes that a rank sends depends neither on the number of values nor on the world size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.collectives.group import start_collective
from worldsize.core import World
from worldsize.devices import move_to_device

Key = TypeVar("Key", bound=tuple[Any, ...])

Sums = Mapping[str, tuple[Tensor, Tensor]]
_BITS, _MASK = 32, 2**32 - 1  # bits per limb before any carry, and their mask
_LIMBS = 66  # enough for the largest float64 in units of the smallest
_UNIT = 1 << 1074  # 1.0 in units of the smallest float64
_FRACTION, _SPECIAL = 52, 0x7FF  # float64: number of fraction bits; exponent of infinities and NaN


def _reachable(tensor: Tensor, world: World) -> tuple[Tensor, ProcessGroup | None]:
    """Return the tensor to exchange and its group; host memory uses the gloo group, if any.

    This avoids waiting for the device. Without a gloo group, ranks exchange a copy of ``tensor`` on the device.
    """
    if tensor.device.type == "cpu" != world.device.type:
        group = world.groups.get(f"host/{world.role}")
        return (tensor, group) if group else (move_to_device(tensor, world.device), world.group)
    return tensor, world.group


def start_all_reduce(table: Tensor, world: World) -> Callable[[], Tensor]:
    """Start an all-reduce of ``table``, a tensor of any shape in host memory, over all ranks.

    Calling the result waits for the other ranks and returns the sums, in the same shape, on the CPU.
    """
    if world.group is None:
        return lambda: table
    sums, group = _reachable(table, world)
    work = start_collective(dist.all_reduce, sums, group=group)

    def wait_for_sums() -> Tensor:
        work.wait()
        return sums.cpu()

    return wait_for_sums


def start_all_gather(part: Tensor, world: World) -> Callable[[], Tensor]:
    """Start an all-gather of ``part``, of equal shape on all ranks, possibly in host memory.

    Calling the result waits for the other ranks and returns a tensor (ranks, *part.shape) on the CPU.
    """
    if world.group is None:
        return part[None].cpu
    mine, group = _reachable(part, world)
    parts = mine.new_empty(world.size, *part.shape)
    work = start_collective(dist.all_gather_into_tensor, parts.view(-1), mine.view(-1), group=group)

    def wait_for_parts() -> Tensor:
        work.wait()
        return parts.cpu()

    return wait_for_parts


def gather_tensors(parts: Mapping[Key, Tensor], world: World) -> dict[Key, Tensor]:
    """Gather tensors of any shapes and dtypes from all ranks; keys must differ between ranks.

    Returns:
        The tensors of all ranks, sorted by key, on the CPU.
    """
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
    for form, lengths, row_n in zip(forms, sizes, start_all_gather(bytes_n, world)(), strict=True):
        for (key, dtype, shape), piece in zip(form, row_n[: sum(lengths)].split(lengths), strict=True):
            gathered[key] = piece.clone().view(dtype).reshape(shape)
    return dict(sorted(gathered.items()))


def exact_sum(values: Iterable[float]) -> float:
    """Return the correctly rounded sum, independent of the order.

    A sum too large for a float is infinite. NaN and infinities are handled as in float addition.
    """
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except OverflowError:  # a partial sum overflowed; the total may not
        return _convert_to_float(sum(map(Fraction, numbers), Fraction()))


def _convert_to_float(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def quotient(total: float, count: float) -> float:
    """Return ``total / count``, or NaN if the count is 0."""
    return total / count if count else math.nan


def accumulate_values(values_n: Tensor) -> Tensor:
    """Add float64 values (..., n) over their last dimension exactly, on their device.

    Returns:
        int64, shape (..., 69): the limbs of each sum, lowest first, then the counts of +inf, -inf and NaN values.
        Accumulators can be added as long as they hold fewer than 2³¹ values in total.
    """
    bits = values_n.view(torch.int64)
    exponent, fraction = (bits >> _FRACTION) & _SPECIAL, bits & ((1 << _FRACTION) - 1)
    significand = fraction + ((exponent > 0).long() << _FRACTION)
    position = (exponent - 1).clamp(min=0)  # of the lowest bit, relative to the smallest float64
    limb, shift = position // _BITS, position % _BITS
    low, high = (significand & _MASK) << shift, (significand >> _BITS) << shift
    sign = torch.where(bits < 0, -1, 1) * (exponent < _SPECIAL)
    limbs = bits.new_zeros(*bits.shape[:-1], _LIMBS)
    first = torch.arange(0, limbs.numel(), _LIMBS, device=bits.device).view(*bits.shape[:-1], 1)
    for place, part in enumerate((low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS)):
        limbs.view(-1).index_add_(0, (first + limb.clamp(max=_LIMBS - 3) + place).flatten(), (sign * part).flatten())
    special = torch.stack([values_n.isposinf(), values_n.isneginf(), values_n.isnan()], -2).sum(-1)
    return torch.cat([limbs, special], -1)


def round_sums(accumulators: Tensor) -> list[float]:
    """Round each sum in ``accumulators`` (n, 69) correctly, see :func:`accumulate_values`.

    A sum too large for a float is infinite. NaN and infinities are handled as in float addition.
    """
    return [_round_sum(row) for row in accumulators.tolist()]


def _round_sum(row: list[int]) -> float:
    *limbs, above, below, undefined = row
    if undefined or (above and below):
        return math.nan
    if above or below:
        return math.inf if above else -math.inf
    return _convert_to_float(Fraction(sum(limb << (_BITS * place) for place, limb in enumerate(limbs) if limb), _UNIT))


def _stack_on_host(scalars: Sequence[Tensor]) -> Tensor:
    """Stack ``scalars`` from several devices in host memory, waiting for each device once."""
    stacked = torch.empty(len(scalars), dtype=scalars[0].dtype)
    for device in dict.fromkeys(scalar.device for scalar in scalars):
        places = [place for place, scalar in enumerate(scalars) if scalar.device == device]
        stacked[places] = torch.stack([scalars[place] for place in places]).cpu()
    return stacked


def reduce_metrics(sums: Mapping[int, Sums], names: tuple[str, ...], world: World) -> dict[str, float]:
    """Return the metrics over all ranks' batches, equal on every rank; NaN if the count is 0.

    Args:
        sums: Metrics of this rank's batches, by batch index: each metric as (sum, count), two scalars.
        names: Names of the metrics, the same on every rank.
        world: The participating ranks.
    """
    values_mpb = torch.zeros(len(names), 2, len(sums), dtype=torch.float64)
    if values := [value.double() for batch in sums.values() for name in names for value in batch[name]]:
        values_mpb = _stack_on_host(values).view(len(sums), len(names), 2).permute(1, 2, 0).contiguous()
    totals = round_sums(start_all_reduce(accumulate_values(values_mpb).flatten(0, 1), world)())
    return {name: quotient(*totals[2 * row : 2 * row + 2]) for row, name in enumerate(names)}
