"""The operations of a model's constructor, from which each of its tensors can be made separately, bit for bit.

Random numbers are those of the constructor: they are drawn from the generators in the same order. Numbers that are not
needed, such as those of a default initialisation that is overwritten, are drawn and discarded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Storage: TypeAlias = int
"""The number of a storage; tensors that share memory have the same one."""


@final
@dataclass(frozen=True)
class Deferred:
    """A tensor that is not made yet: a view of a storage.

    Attributes:
        is_conj: Whether its values are the conjugates of those in memory.
        is_neg: Whether its values are the negatives of those in memory.
    """

    storage: Storage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    def on(self, memory: torch.UntypedStorage) -> Tensor:
        """Return the tensor, in its described shape, with its values in ``memory``."""
        tensor = torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)
        torch._C._set_conj(tensor, self.is_conj)
        torch._C._set_neg(tensor, self.is_neg)
        return tensor

    def scratch(self) -> Tensor:
        """Return a new tensor of the same shape and layout, with arbitrary values."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@final
@dataclass(frozen=True)
class Operation:
    """One call of the constructor that wrote to deferred tensors or made them.

    Attributes:
        function: The operator of ATen.
        args: Its arguments, in which a :class:`Deferred` stands for each deferred tensor.
        kwargs: Its keyword arguments.
        reads: Storages on whose values the result depends.
        writes: Storages of arguments that it writes to.
        makes: For each tensor that it returns, that tensor if its storage is new, or None.
        default_dtype: The default type of floats when the constructor made the call.
        generator: The generator from which it draws; None: it is not random.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    makes: Sequence[Deferred | None]
    default_dtype: torch.dtype
    generator: torch.Generator | None = None

    def run(self, memory: dict[Storage, torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        """Execute the operation with the storages in ``memory``, and add those that it makes.

        ``nbytes`` has the length of each storage, in bytes.
        """

        def tensor(leaf: Any) -> Any:
            if not isinstance(leaf, Deferred):
                return leaf
            if leaf.storage not in memory:  # it is overwritten
                memory[leaf.storage] = _memory(nbytes[leaf.storage], leaf.dtype)
            return leaf.on(memory[leaf.storage])

        with _default_dtype(self.default_dtype):
            result = self.function(*tree_map(tensor, self.args), **tree_map(tensor, self.kwargs))
        returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for described, made in zip(self.makes, returned, strict=True):
            if described is not None:
                memory[described.storage] = _laid_out(made, described, nbytes[described.storage])

    def storages(self) -> set[Storage]:
        """Return the storages that it needs or makes."""
        return {*self.reads, *self.writes, *(made.storage for made in self.makes if made is not None)}

    def draw_in_vain(self) -> None:
        """Draw as many random numbers as :meth:`run`, and discard them."""

        def scratch(leaf: Any) -> Any:
            return leaf.scratch() if isinstance(leaf, Deferred) else leaf

        with _default_dtype(self.default_dtype):
            self.function(*tree_map(scratch, self.args), **tree_map(scratch, self.kwargs))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _memory(nbytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
    """Return uninitialized memory; in deterministic mode torch fills it, by its dtype."""
    return torch.empty(-(-nbytes // dtype.itemsize), dtype=dtype).untyped_storage()


def _laid_out(made: Tensor, described: Deferred, nbytes: int) -> torch.UntypedStorage:
    """Return the storage of ``made`` in the described layout."""
    if made.dtype != described.dtype:
        raise TypeError(f"a tensor of {described.dtype} was made again in {made.dtype}")
    storage = made.untyped_storage()
    bits = (made.is_conj(), made.is_neg()) == (described.is_conj, described.is_neg)
    if (
        bits
        and (made.stride(), made.storage_offset()) == (described.stride, described.offset)
        and storage.nbytes() == nbytes
    ):
        return storage
    storage = _memory(nbytes, described.dtype)
    described.on(storage).copy_(made)
    return storage


@final
@dataclass
class Tape:
    """Stores the operations of a constructor, in order, and makes its tensors from them."""

    operations: list[Operation] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    """The length of each storage in bytes."""
    _writers: dict[Storage, list[int]] = field(default_factory=dict)
    _draws: list[int] = field(default_factory=list)
    _drawn: int = 0
    """Number of draws whose random numbers have been taken from their generators."""
    _wanted: Counter[int] | None = None
    """For each operation, the tensors still to be made that depend on it; None: unknown yet."""
    _states: dict[int, Tensor] = field(default_factory=dict)
    """The generator state before each past draw that is still needed."""

    def add(self, operation: Operation) -> None:
        """Append an operation of the constructor."""
        index = len(self.operations)
        self.operations.append(operation)
        for storage in {*operation.writes, *(made.storage for made in operation.makes if made is not None)}:
            self._writers.setdefault(storage, []).append(index)
        if operation.generator is not None:
            self._draws.append(index)

    def in_order(self, tensors: Collection[Deferred]) -> list[Deferred]:
        """Return ``tensors`` in the order in which random numbers have to be drawn only once.

        In any other order, some are drawn twice, with the same values.
        """
        last_draws: dict[Deferred, int] = {}
        self._wanted = Counter()
        for tensor in tensors:
            needed = self._needed(tensor)
            self._wanted.update(needed)
            last_draws[tensor] = max((index for index in needed if self.operations[index].generator), default=-1)
        self._states = {index: state for index, state in self._states.items() if self._wanted[index]}
        return sorted(last_draws, key=lambda tensor: last_draws[tensor])

    def value(self, tensor: Deferred) -> Tensor:
        """Make ``tensor``, in its described shape and in separate memory."""
        memory: dict[Storage, torch.UntypedStorage] = {}
        with torch.no_grad():
            for index in self._needed(tensor):
                self._run(index, memory)
        if tensor.storage not in memory:  # nothing was written to it
            memory[tensor.storage] = _memory(self.nbytes[tensor.storage], tensor.dtype)
        return tensor.on(memory[tensor.storage])

    def needs(self, tensor: Deferred) -> int:
        """Return the bytes that :meth:`value` needs for ``tensor``, including those of its inputs."""
        operations = [self.operations[index] for index in self._needed(tensor)]
        storages = {tensor.storage}.union(*(operation.storages() for operation in operations))
        return sum(self.nbytes[storage] for storage in storages)

    def draw_all(self) -> None:
        """Draw all remaining random numbers, so that generators end in the states that the constructor leaves."""
        self._draw_before(len(self.operations))

    def _needed(self, tensor: Deferred) -> list[int]:
        """Return the indices of the operations on which ``tensor`` depends, in order."""
        chosen: set[int] = set()
        wanted = [(tensor.storage, len(self.operations))]
        while wanted:
            storage, before = wanted.pop()
            writers = self._writers.get(storage, [])
            if (place := bisect_left(writers, before)) and (writer := writers[place - 1]) not in chosen:
                chosen.add(writer)
                wanted += [(read, writer) for read in self.operations[writer].reads]
        return sorted(chosen)

    def _run(self, index: int, memory: dict[Storage, torch.UntypedStorage]) -> None:
        operation = self.operations[index]
        if self._wanted is not None:
            self._wanted[index] -= 1
        if operation.generator is None:
            operation.run(memory, self.nbytes)
            return
        self._draw_before(index)
        if self._drawn < len(self._draws) and self._draws[self._drawn] == index:
            self._draw(operation, index)
            operation.run(memory, self.nbytes)
            return
        now = operation.generator.get_state()
        operation.generator.set_state(self._states[index])
        try:
            operation.run(memory, self.nbytes)
        finally:
            operation.generator.set_state(now)
        if not self._is_wanted(index):
            del self._states[index]

    def _draw_before(self, index: int) -> None:
        """Make the outstanding draws before ``index``."""
        while self._drawn < len(self._draws) and (first := self._draws[self._drawn]) < index:
            self._draw(self.operations[first], first)
            self.operations[first].draw_in_vain()

    def _draw(self, operation: Operation, index: int) -> None:
        """Record that the next draw is made, and the state of its generator if it will be made again."""
        assert operation.generator is not None
        if self._is_wanted(index):
            self._states[index] = operation.generator.get_state()
        self._drawn += 1

    def _is_wanted(self, index: int) -> bool:
        return self._wanted is None or self._wanted[index] > 0
