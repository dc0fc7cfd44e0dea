"""Records when storages are allocated and freed, and finds the peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, UntypedStorage

from worldsize.dist.per_rank import local

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations")
"""What memory is for, in the order of a report; activations are all that is nothing else."""


@final
@dataclass(frozen=True)
class Peak:
    """The moment of a rank's largest memory.

    Attributes:
        nbytes: Bytes of all tensors.
        parts: Bytes by purpose, one of ``PARTS``.
    """

    nbytes: int
    parts: Mapping[str, int]


@final
class StorageLog:
    """Follows storages until they are freed.

    The purpose of a storage is often known only after its allocation: a gradient is known once the optimizer takes it.
    So sizes are recorded in order, and evaluated at the end.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[int, int]] = []  # number of a storage, and its change in bytes
        self._labels: dict[int, str] = {}
        self._numbers: dict[int, int] = {}  # by the address of a live storage
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        self._foreign: dict[int, weakref.ref[UntypedStorage]] = {}  # by address: storages from before
        self._made = 0
        self._built = 0  # changes before the first step
        self._trained: int | None = None  # changes before the evaluation

    def see(self, storage: UntypedStorage) -> None:
        """Record a storage and its present size."""
        address = storage._cdata
        if address in self._foreign:
            return
        if address not in self._numbers:
            self._made += 1
            self._numbers[address] = self._made
            self._alive[address] = weakref.ref(storage, partial(self._freed, address))
        number, nbytes = self._numbers[address], storage.nbytes()
        if nbytes != self._sizes.get(number, 0):
            self._changes.append((number, nbytes - self._sizes.get(number, 0)))
            self._sizes[number] = nbytes

    def leave_out(self, storage: UntypedStorage) -> None:
        """Exclude a storage that existed before, such as a data set's, unless it has been recorded."""
        address = storage._cdata
        if address not in self._numbers and address not in self._foreign:
            self._foreign[address] = weakref.ref(storage, lambda _: self._foreign.pop(address, None))

    def knows(self, storage: UntypedStorage) -> bool:
        """Return whether the storage has been recorded."""
        return storage._cdata in self._numbers

    def _freed(self, address: int, _: object) -> None:
        del self._alive[address]
        number = self._numbers.pop(address)
        self._changes.append((number, -self._sizes.pop(number, 0)))

    def label(self, part: str, tensors: Iterable[Any]) -> None:
        """Set the purpose of the storages of ``tensors``, unless it has been set."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                number = self._numbers.get(local(tensor).untyped_storage()._cdata)
                if number is not None:
                    self._labels.setdefault(number, part)

    def begin_training(self) -> None:
        """Mark the end of building the replica."""
        self._built = len(self._changes)

    def begin_evaluation(self) -> None:
        """Mark the end of training, at the first call."""
        self._trained = self._trained or len(self._changes)

    def building_peak(self) -> Peak:
        """Return the peak until the replica was built."""
        return self._peak(self._changes[: self._built], after=0)

    def peak(self) -> Peak:
        """Return the peak of training."""
        return self._peak(self._changes[: self._trained], after=self._built)

    def evaluation_peak(self) -> Peak | None:
        """Return the peak of the evaluation; None if there was none."""
        return None if self._trained is None else self._peak(self._changes, after=self._trained)

    def _peak(self, changes: Sequence[tuple[int, int]], after: int) -> Peak:
        most, best, now = 0, -1, 0
        for place, (_, change) in enumerate(changes):
            now += change
            if now > most and place >= after:
                most, best = now, place
        parts: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        for number, change in changes[: best + 1]:
            parts[self._labels.get(number, "activations")] += change
        return Peak(most, dict(parts))
