"""Rules that combine the buffer values of all logical ranks in a step into one value.

Each rule depends only on the values at the start of the step and after each logical rank's pass, so any assignment of
logical ranks to processes gives the same result. Values that are not summed are sent as bytes, to avoid rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.collectives.group import start_collective
from worldsize.collectives.ordered import Counter, Tree, reduce_ordered, sum_level
from worldsize.collectives.staged import finish_reduction
from worldsize.core import Concatenated, ConfigError, Dealing
from worldsize.strategies.declared_buffers import BufferSlot


@final
@dataclass(frozen=True)
class StepShape:
    """Assignment of a step's logical ranks to processes.

    ``batches``: number of this process's micro-batches.
    """

    logical_ranks: int
    batches: int
    group: ProcessGroup | None
    dealing: Dealing

    @staticmethod
    def from_group(group: ProcessGroup | None, dealing: Dealing, batches: int, logical_ranks: int | None) -> StepShape:
        """Create the shape for ``batches`` micro-batches on this process.

        ``logical_ranks``: total, if processes have different numbers.
        """
        size = dist.get_world_size(group) if group else 1
        return StepShape(logical_ranks or batches * size, batches, group, dealing)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return dist.get_rank(self.group) if self.group else 0

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return dist.get_world_size(self.group) if self.group else 1

    @property
    def passes(self) -> int:
        """Number of passes per process if all processes need the same number.

        This is the largest number of micro-batches on a process.
        """
        return -(-self.logical_ranks // self.size)

    def logical_rank(self, batch: int) -> int:
        """Return the logical rank of this process's micro-batch ``batch``."""
        return self.rank * self.batches + batch if self.dealing == "block" else self.rank + batch * self.size

    def get_owner(self, logical_rank: int) -> int:
        """Return the rank of the process that computes ``logical_rank``."""
        return logical_rank // self.batches if self.dealing == "block" else logical_rank % self.size

    def map_nodes(self) -> dict[int, int]:
        """Map each micro-batch to its local node in the summation tree."""
        if self.dealing == "block":
            return {batch: batch for batch in range(self.batches)}
        tree = Tree(self.logical_ranks, self.size)
        return {leaf: node for node in range(tree.count_nodes(self.rank)) for leaf in tree.list_leaves(node)}

    def sum_nodes(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the sum (n,) of all processes' tree nodes; ``rows``: this process's, each (n,)."""
        if self.group is None:
            return sum_level(rows)
        nodes = self.logical_ranks if self.dealing == "block" else Tree(self.logical_ranks, self.size).nodes
        return finish_reduction(reduce_ordered(rows, self.group, self.dealing, nodes=nodes))

    def reduce_over_ranks(self, tensor: Tensor, largest: bool = False) -> Tensor:
        """All-reduce an integer tensor in place (sum, or maximum if ``largest``), and return it."""
        if self.group is not None:
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            start_collective(dist.all_reduce, tensor, op, group=self.group).wait()
        return tensor


class Combination(ABC):
    """Abstract base: combines the buffers that share a rule, over one step."""

    @abstractmethod
    def record_batch(self, batch: int) -> None:
        """Record the values after the pass of this process's micro-batch ``batch``."""

    @abstractmethod
    def write_buffers(self) -> None:
        """Write the combined values; the buffers have been reset to the step's initial values."""


def create_combinations(slots: Sequence[BufferSlot], shape: StepShape) -> list[Combination]:
    """Group ``slots`` by rule into combinations, in the same order on all processes."""
    by_rule: dict[str, list[BufferSlot]] = {}
    for slot in slots:
        by_rule.setdefault(slot.rule if isinstance(slot.rule, str) else "", []).append(slot)
    queues = [_Queue(slot, shape) for slot in by_rule.pop("", [])]
    made: list[Combination] = []
    if means := by_rule.get("mean"):
        made.append(_Mean(means, shape))
    sums = by_rule.get("sum", [])
    for dtype in dict.fromkeys(slot.tensor.dtype for slot in sums):
        made.append(_Sum([slot for slot in sums if slot.tensor.dtype == dtype], shape))
    for rule, kind in (("same", _Same), ("equal", _Equal), ("last", _Last)):
        if chosen := by_rule.get(rule):
            made.append(kind(chosen, shape))
    return [*made, *queues]


class _Changes(Combination):
    """Abstract base: sums the changes of all logical ranks in the fixed tree."""

    def __init__(self, slots: Sequence[BufferSlot], shape: StepShape) -> None:
        self._shape, self._node = shape, shape.map_nodes()
        self._counters = [Counter() for _ in set(self._node.values())]
        by_dtype: dict[torch.dtype, list[BufferSlot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.tensor.dtype, []).append(slot)
        self._slots = list(by_dtype.values())
        self._places = [[slot.tensor for slot in same] for same in self._slots]
        self._first = [_flatten_tensors(places) for places in self._places]  # initial values by dtype, each (n,)

    def record_batch(self, batch: int) -> None:
        changes = []
        for slots, places, first_n in zip(self._slots, self._places, self._first, strict=True):
            now_n = _flatten_tensors([_read_value(slot, place) for slot, place in zip(slots, places, strict=True)])
            changes.append(self._compute_change(now_n, first_n))
        self._counters[self._node[batch]].add(changes)

    def _sum_changes(self) -> Tensor:
        """Return the summed changes of all buffers, a tensor (n,)."""
        return self._shape.sum_nodes([torch.cat(counter.waiting[0]) for counter in self._counters])

    def _write_changes(self, changes_n: Tensor) -> None:
        parts = torch.split(changes_n, [first_n.numel() for first_n in self._first])
        for slots, first_n, part_n in zip(self._slots, self._first, parts, strict=True):
            places = [slot.tensor for slot in slots]
            values = torch.split(self._apply_change(first_n, part_n), [place.numel() for place in places])
            copy_grouped([(place, value.view(place.shape)) for place, value in zip(places, values, strict=True)])

    def _compute_change(self, now: Tensor, first: Tensor) -> Tensor:
        """Return the difference from ``first``, or the new value where ``first`` is not finite."""
        if not first.is_floating_point():
            return now - first
        return torch.where(now == first, 0, now - first.nan_to_num(0, 0, 0))

    def _apply_change(self, first: Tensor, change: Tensor) -> Tensor:
        if not first.is_floating_point():
            return first + change
        return torch.where(change == 0, first, first.nan_to_num(0, 0, 0) + change)


@final
class _Mean(_Changes):
    """Adds the mean of the changes to the initial values."""

    def write_buffers(self) -> None:
        self._write_changes(self._sum_changes() / self._shape.logical_ranks)


@final
class _Sum(_Changes):
    """Adds the sum of the changes to the initial values; all buffers have the same dtype."""

    def write_buffers(self) -> None:
        self._write_changes(self._sum_changes())


@final
class _Same(Combination):
    """Keeps the values after the first micro-batch, which are equal for all micro-batches."""

    def __init__(self, slots: Sequence[BufferSlot], shape: StepShape) -> None:
        self._slots = slots
        self._values: Sequence[Tensor] = ()

    def record_batch(self, batch: int) -> None:
        if not self._values:
            self._values = [slot.tensor.clone() for slot in self._slots]

    def write_buffers(self) -> None:
        copy_grouped([(slot.tensor, value) for slot, value in zip(self._slots, self._values, strict=True)])


@final
class _Equal(Combination):
    """Keeps a micro-batch's values; they must be bitwise equal on all logical ranks."""

    def __init__(self, slots: Sequence[BufferSlot], shape: StepShape) -> None:
        self._slots, self._shape = slots, shape
        self._first = [slot.tensor for slot in slots]
        self._least: Tensor | None = None  # bytewise minimum of all buffers
        self._most: Tensor | None = None

    def record_batch(self, batch: int) -> None:
        values = _concatenate_bytes(
            [_read_value(slot, first) for slot, first in zip(self._slots, self._first, strict=True)]
        )
        self._least = values if self._least is None else torch.minimum(self._least, values)
        self._most = values if self._most is None else torch.maximum(self._most, values)

    def write_buffers(self) -> None:
        assert self._least is not None
        assert self._most is not None
        most, inverse = self._shape.reduce_over_ranks(torch.cat([self._most, 255 - self._least]), largest=True).chunk(2)
        parts = zip(_split_bytes(most, self._first), _split_bytes(255 - inverse, self._first), self._slots, strict=True)
        for value, least, slot in parts:
            if not torch.equal(value, least):
                raise ConfigError(
                    f'the buffer {slot.name} is declared as "equal" in Recipe.buffers but differs between logical '
                    'ranks. Declare it as "sum", "mean" or "last", or compute it without using data or random numbers.'
                )
            _write_value(slot, _decode_value(value, slot.tensor))


@final
class _Last(Combination):
    """Keeps the values after the last logical rank of the step."""

    def __init__(self, slots: Sequence[BufferSlot], shape: StepShape) -> None:
        self._slots, self._shape = slots, shape
        self._first = [slot.tensor for slot in slots]
        self._values = _concatenate_bytes(self._first)

    def record_batch(self, batch: int) -> None:
        values = [
            _read_value(slot, first) for slot, first in zip(self._slots, self._first, strict=True)
        ]  # read on every rank, so that all raise if a shape changed
        if self._shape.logical_rank(batch) == self._shape.logical_ranks - 1:
            self._values = _concatenate_bytes(values)

    def write_buffers(self) -> None:
        group, owner = self._shape.group, self._shape.get_owner(self._shape.logical_ranks - 1)
        if group is not None:
            start_collective(dist.broadcast, self._values, group=group, group_src=owner).wait()
        for slot, value in zip(self._slots, _split_bytes(self._values, self._first), strict=True):
            _write_value(slot, _decode_value(value, slot.tensor))


@final
class _Queue(Combination):
    """Appends the new rows of all logical ranks to a queue, in order; see :class:`Concatenated`."""

    def __init__(self, slot: BufferSlot, shape: StepShape) -> None:
        assert isinstance(slot.rule, Concatenated)
        self._slot, self._shape, self._dim = slot, shape, slot.rule.dim
        self._first, self._pointer = slot.tensor.clone(), slot.pointer.tensor
        self._start = int(self._pointer)
        self._rows: dict[int, Tensor] = {}  # new rows (rows, ...) by logical rank

    @property
    def _length(self) -> int:
        return self._first.shape[self._dim]

    def record_batch(self, batch: int) -> None:
        now = _read_value(self._slot, self._first)
        count = (int(_read_value(self._slot.pointer, self._pointer)) - self._start) % self._length
        if count == 0 and not torch.equal(now, self._first):
            count = self._length
        places = torch.arange(self._start, self._start + count, device=now.device) % self._length
        self._rows[self._shape.logical_rank(batch)] = now.movedim(self._dim, 0)[places]

    def write_buffers(self) -> None:
        counts = torch.zeros(self._shape.logical_ranks, dtype=torch.int64, device=self._first.device)
        for rank, rows in self._rows.items():
            counts[rank] = len(rows)
        counts = self._shape.reduce_over_ranks(counts)
        ends = counts.cumsum(0).tolist()
        total, kept = ends[-1], min(ends[-1], self._length)  # later rows overwrite earlier ones
        queue = self._first.movedim(self._dim, 0)
        rows_kd = queue.new_zeros(kept, *queue.shape[1:]).contiguous()
        for rank, rows in self._rows.items():
            end = ends[rank] - (total - kept)
            rows = rows[max(0, len(rows) - end) :] if end > 0 else rows[:0]
            rows_kd[end - len(rows) : end] = rows
        if kept:
            self._shape.reduce_over_ranks(rows_kd.view(torch.uint8))
            places = torch.arange(self._start + total - kept, self._start + total, device=queue.device) % self._length
            queue = queue.clone()
            queue[places] = rows_kd
            _write_value(self._slot, queue.movedim(0, self._dim))
        _write_value(self._slot.pointer, torch.full_like(self._pointer, (self._start + total) % self._length))


def _read_value(slot: BufferSlot, first: Tensor) -> Tensor:
    """Return the current tensor of ``slot``; raise ConfigError if its shape or dtype changed."""
    now = slot.tensor
    if (now.shape, now.dtype) != (first.shape, first.dtype):
        raise ConfigError(
            f"the loss changes the buffer {slot.name} from {list(first.shape)} {first.dtype} to {list(now.shape)} "
            f"{now.dtype}. Keep the shape and dtype, or register the buffer with persistent=False."
        )
    return now


def _write_value(slot: BufferSlot, value: Tensor) -> None:
    copy_grouped([(slot.tensor, value)])


def copy_grouped(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, with one kernel per dtype."""
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in pairs:
        place = place.data  # .data keeps the autograd graph valid
        if type(place) is Tensor and type(value) is Tensor:
            places, values = groups.setdefault((place.device, place.dtype, place.layout), ([], []))
            places.append(place)
            values.append(value)
        else:  # foreach does not mix DTensors and tensors
            place.copy_(value)
    for places, values in groups.values():
        torch._foreach_copy_(places, values)


def _flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate copies of ``tensors``, of one dtype, into one tensor (n,)."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _concatenate_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate copies of the bytes of ``tensors`` into one tensor, uint8 (n,)."""
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors])


def _split_bytes(row_n: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split concatenated bytes, uint8 (n,), into one part per tensor of ``like``."""
    return torch.split(row_n, [tensor.nbytes for tensor in like])


def _decode_value(part_n: Tensor, like: Tensor) -> Tensor:
    return part_n.clone().view(like.dtype).view_as(like)
