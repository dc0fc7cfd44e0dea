"""Combines buffers that training changes, such as BatchNorm's statistics, over the logical ranks of a step."""

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
from worldsize.strategies.buffer_combinations import Combination, StepShape, combinations_of, copy_grouped
from worldsize.strategies.declared_buffers import BufferSlot, buffer_slots, trains_apart


class StepBuffers(ABC):
    """The buffers of a model during one step."""

    @abstractmethod
    def add(self, batch: int) -> None:
        """Add the change made by the forward pass of this micro-batch, and restore the values of the step's start.

        Raises:
            ConfigError: it has changed a buffer without a rule.
        """

    @abstractmethod
    def finish(self) -> None:
        """Write the combined values into the buffers, after the last micro-batch of the step.

        Raises:
            ConfigError: a buffer that must be equal on all logical ranks is not.
        """

    @abstractmethod
    def restore(self) -> None:
        """Restore the values of the step's start, after a pass that does not count; also after :meth:`finish`."""


@final
class BufferMean:
    """Combines the saved buffers that training changes over logical ranks, each by its rule.

    Each micro-batch starts from the values at the start of the step. Statistics of norm layers are averaged: the
    changes are summed in the fixed tree, so that an unchanged buffer keeps its bits. Counts of batches end with their
    values after one micro-batch: a step counts once. The others have the rules that the recipe declares; a change of
    one without a rule is refused.

    ``logical_ranks``: those of all processes, which may have different numbers of them; None: all have as many as this
    one. If it is given, the gang heals: a step may end before its update and be repeated (:meth:`undo`).
    ``skips_norms``: whether the statistics of norm layers are left to the caller.
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
        self._begun = 0  # steps
        self._open: StepBuffers | None = None  # of a step that may have to be undone

    @cached_property
    def _slots(self) -> Sequence[BufferSlot]:
        return buffer_slots(self._module)  # first needed in a step, when all rules are declared

    @contextmanager
    def step(self, batches: int) -> Iterator[StepBuffers]:
        """Combine the buffers over the step inside the context; an error leaves them as they were before."""
        buffers = self.begin(batches)
        try:
            yield buffers
            buffers.finish()
        except BaseException:
            buffers.restore()
            raise

    def begin(self, batches: int) -> StepBuffers:
        """Begin a step of ``batches`` micro-batches on this rank."""
        buffers = self._step_buffers(batches)
        self._open = buffers if self._logical_ranks is not None else None
        return buffers

    def kept(self) -> KeptBuffers:
        """Copy the buffers that a checkpoint holds, to restore them after a pass that does not count."""
        return KeptBuffers(self._slots)

    def commit(self) -> None:
        """Keep the values of the step: the update follows."""
        self._open = None

    def undo(self) -> None:
        """Restore the values before a step that ends before its update; only where a gang heals."""
        if self._open is not None:
            self._open.restore()
            self._open = None

    def _step_buffers(self, batches: int) -> StepBuffers:
        shape = StepShape.of(self._group, self._dealing, batches, self._logical_ranks)
        is_alone = shape.logical_ranks == 1 and not trains_apart(self._module)
        if is_alone or not self._slots:
            return _UNTOUCHED if self._logical_ranks is None else KeptBuffers(self._slots)
        self._begun += 1
        compares = self._begun & (self._begun - 1) == 0  # values in steps 1, 2, 4, 8, ...; else the counts of changes
        watched = [_Watched(slot, compares=compares) for slot in self._slots if slot.rule is None]
        if shape.logical_ranks == 1:
            return _CombinedBuffers([], [], watched)
        ruled = [slot for slot in self._slots if slot.rule is not None and not (self._skips_norms and slot.is_known)]
        return _CombinedBuffers(ruled, combinations_of(ruled, shape), watched)


@final
class _UntouchedBuffers(StepBuffers):
    """Buffers that need no combining and keep the values of the forward pass."""

    def add(self, batch: int) -> None: ...

    def finish(self) -> None: ...

    def restore(self) -> None: ...


_UNTOUCHED = _UntouchedBuffers()


@final
class KeptBuffers(StepBuffers):
    """Buffers that need no combining, in a step or pass that may be undone."""

    def __init__(self, slots: Sequence[BufferSlot]) -> None:
        self._held = _held(slots)

    def add(self, batch: int) -> None: ...

    def finish(self) -> None: ...

    def restore(self) -> None:
        _restore(self._held)


@final
class _Watched:
    """A buffer without a rule, and its value at the start of the step, or torch's count of its changes."""

    def __init__(self, slot: BufferSlot, *, compares: bool) -> None:
        self._slot, self._tensor = slot, slot.tensor
        self._version = self._tensor._version
        self._first = self._tensor.clone() if compares else None

    def restore(self) -> None:
        """Restore the value at the start of the step, if it was kept, and count changes from here."""
        if self._first is not None:
            self._tensor.data.copy_(self._first)
        self._slot.set_tensor(self._tensor)
        self._version = self._tensor._version

    def check(self) -> None:
        """Raise ConfigError if a forward pass has changed the buffer."""
        now = self._slot.tensor
        if self._first is not None:
            changed = now is not self._tensor or not _same_bits(now, self._first)
        else:
            changed = now is not self._tensor or now._version != self._version
        if changed:
            raise ConfigError(
                f"the loss changes the buffer {self._slot.name}, and has no rule for its values on the logical ranks "
                "of a step. Declare it in Recipe.buffers: "
                f'{{"{self._slot.name}": "sum"}} for a counter of samples, "mean" for averages over a batch, "equal" '
                'for a counter of steps, "last", or Concatenated(pointer=...) for a queue. Register it with '
                "persistent=False if it is a cache, which any process can compute again."
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.layout is not torch.strided:
        return True  # changed in place by nothing in torch
    return bool(torch.equal(one, other)) or bool(((one == other) | ((one != one) & (other != other))).all())


@final
class _CombinedBuffers(StepBuffers):
    """Buffers ``slots`` that ``combinations`` combine over the step, and others that must not change."""

    def __init__(
        self, slots: Sequence[BufferSlot], combinations: Sequence[Combination], watched: Sequence[_Watched]
    ) -> None:
        self._combinations, self._watched = combinations, watched
        self._held = _held(slots)

    def add(self, batch: int) -> None:
        for watched in self._watched:
            watched.check()
        for combination in self._combinations:
            combination.add(batch)
        _restore(self._held)

    def finish(self) -> None:
        for combination in self._combinations:
            combination.finish()

    def restore(self) -> None:
        for watched in self._watched:
            watched.restore()
        _restore(self._held)


_Held = Sequence[tuple[BufferSlot, Tensor, Tensor]]  # places, the tensors there, and copies of them


def _held(slots: Sequence[BufferSlot]) -> _Held:
    return [(held, held.tensor, held.tensor.clone()) for slot in slots for held in slot.slots]


def _restore(held: _Held) -> None:
    copy_grouped([(tensor, first) for _, tensor, first in held])
    for slot, tensor, _ in held:
        slot.set_tensor(tensor)
