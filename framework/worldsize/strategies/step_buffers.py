"""Combination of buffers that change in training, such as BatchNorm's, over logical ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import ConfigError, Dealing
from worldsize.strategies.buffer_combinations import Combination, StepShape, copy_grouped, create_combinations
from worldsize.strategies.declared_buffers import BufferSlot, buffer_slots, trains_apart


class StepBuffers(ABC):
    """Abstract base: the buffers of a model during one step."""

    @abstractmethod
    def add(self, batch: int) -> None:
        """Record the buffer values after micro-batch ``batch``, and restore the initial values.

        Raises:
            ConfigError: the pass changed a buffer without a rule.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """Write the combined values to the buffers, after the last micro-batch of the step.

        Raises:
            ConfigError: a buffer that must be equal on all logical ranks is not.
        """

    @abstractmethod
    def restore(self) -> None:
        """Restore the step's initial values, for example after a discarded pass."""


@final
class BufferMean:
    """Combines the values of saved buffers over logical ranks, each buffer by its rule.

    Each micro-batch starts from the values at the start of the step. Statistics of norm layers are averaged: their
    changes are summed in the fixed tree, so that an unchanged buffer keeps its bits. Batch counters keep their values
    after one micro-batch, so that a step counts once. Other buffers use the rules that the recipe declares; changes of
    buffers without a rule are refused.

    ``logical_ranks``: total over all processes, if their shares may differ because the gang heals; a failed step may
    then be undone and repeated (:meth:`undo`). None if all have as many as this process.
    ``skips_norms``: whether the caller handles the statistics of norm layers.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None,
        dealing: Dealing = "cyclic",
        *,
        logical_ranks: int | None = None,
        skips_norms: bool = False,
    ) -> None:
        self._module = module.module if isinstance(module, DistributedDataParallel) else module
        self._group, self._dealing, self._logical_ranks = group, dealing, logical_ranks
        self._skips_norms = skips_norms
        self._begun = 0  # number of steps
        self._open: StepBuffers | None = None  # buffers of a step that may be undone

    @cached_property
    def _slots(self) -> Sequence[BufferSlot]:
        return buffer_slots(self._module)  # evaluated in the first step, when all rules are declared

    @contextmanager
    def step(self, batches: int) -> Iterator[StepBuffers]:
        """Combine buffers over the step within the context; restore them after an error."""
        buffers = self.begin_step(batches)
        try:
            yield buffers
            buffers.finish_step()
        except BaseException:
            buffers.restore()
            raise

    def begin_step(self, batches: int) -> StepBuffers:
        """Begin a step of ``batches`` micro-batches on this rank."""
        buffers = self._step_buffers(batches)
        self._open = buffers if self._logical_ranks is not None else None
        return buffers

    def snapshot_buffers(self) -> KeptBuffers:
        """Snapshot the saved buffers, to restore them after a discarded pass."""
        return KeptBuffers(self._slots)

    def commit(self) -> None:
        """Accept the values of the step, before the update."""
        self._open = None

    def undo(self) -> None:
        """Restore the values from before an uncommitted step, if the gang heals."""
        if self._open is not None:
            self._open.restore()
            self._open = None

    def _step_buffers(self, batches: int) -> StepBuffers:
        shape = StepShape.from_group(self._group, self._dealing, batches, self._logical_ranks)
        is_alone = shape.logical_ranks == 1 and not trains_apart(self._module)
        if is_alone or not self._slots:
            return _UNTOUCHED if self._logical_ranks is None else KeptBuffers(self._slots)
        self._begun += 1
        compares = self._begun & (self._begun - 1) == 0  # values in steps 1, 2, 4, ..., else only version counters
        watched = [_Watched(slot, compares=compares) for slot in self._slots if slot.rule is None]
        if shape.logical_ranks == 1:
            return _CombinedBuffers([], [], watched)
        ruled = [slot for slot in self._slots if slot.rule is not None and not (self._skips_norms and slot.is_known)]
        return _CombinedBuffers(ruled, create_combinations(ruled, shape), watched)


@final
class _UntouchedBuffers(StepBuffers):
    """Buffers that keep the values from the forward pass, without combining."""

    def add(self, batch: int) -> None: ...

    def finish_step(self) -> None: ...

    def restore(self) -> None: ...


_UNTOUCHED = _UntouchedBuffers()


@final
class KeptBuffers(StepBuffers):
    """A snapshot of buffers, to undo a step or pass; it does not combine values."""

    def __init__(self, slots: Sequence[BufferSlot]) -> None:
        self._held = _snapshot_slots(slots)

    def add(self, batch: int) -> None: ...

    def finish_step(self) -> None: ...

    def restore(self) -> None:
        _restore_slots(self._held)


@final
class _Watched:
    """A buffer without a rule, with its initial value in the step or its version counter."""

    def __init__(self, slot: BufferSlot, *, compares: bool) -> None:
        self._slot, self._tensor = slot, slot.tensor
        self._version = self._tensor._version
        self._first = self._tensor.clone() if compares else None

    def restore(self) -> None:
        """Restore the initial value if it was kept, and watch for changes from now on."""
        if self._first is not None:
            self._tensor.data.copy_(self._first)
        self._slot.set_tensor(self._tensor)
        self._version = self._tensor._version

    def check_buffer(self) -> None:
        """Raise ConfigError if a forward pass changed the buffer."""
        now = self._slot.tensor
        if self._first is not None:
            changed = now is not self._tensor or not _same_bits(now, self._first)
        else:
            changed = now is not self._tensor or now._version != self._version
        if changed:
            raise ConfigError(
                f"the loss modifies the buffer {self._slot.name}, which has no rule in Recipe.buffers. Declare "
                f'{{"{self._slot.name}": "sum"}} for a counter of samples, "mean" for averages over a batch, "equal" '
                'for a counter of steps, "last", or Concatenated(pointer=...) for a queue. Register the buffer '
                "with persistent=False if any process can recompute it."
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.layout is not torch.strided:
        return True  # torch does not change other layouts in place
    return bool(torch.equal(one, other)) or bool(((one == other) | ((one != one) & (other != other))).all())


@final
class _CombinedBuffers(StepBuffers):
    """Buffers in ``slots`` to combine over the step; ``watched``: others that must not change."""

    def __init__(
        self, slots: Sequence[BufferSlot], combinations: Sequence[Combination], watched: Sequence[_Watched]
    ) -> None:
        self._combinations, self._watched = combinations, watched
        self._held = _snapshot_slots(slots)

    def add(self, batch: int) -> None:
        for watched in self._watched:
            watched.check_buffer()
        for combination in self._combinations:
            combination.record_batch(batch)
        _restore_slots(self._held)

    def finish_step(self) -> None:
        for combination in self._combinations:
            combination.write_buffers()

    def restore(self) -> None:
        for watched in self._watched:
            watched.restore()
        _restore_slots(self._held)


_Held = Sequence[tuple[BufferSlot, Tensor, Tensor]]  # slots, their tensors, and copies of these


def _snapshot_slots(slots: Sequence[BufferSlot]) -> _Held:
    return [(held, held.tensor, held.tensor.clone()) for slot in slots for held in slot.slots]


def _restore_slots(held: _Held) -> None:
    copy_grouped([(tensor, first) for _, tensor, first in held])
    for slot, tensor, _ in held:
        slot.set_tensor(tensor)
