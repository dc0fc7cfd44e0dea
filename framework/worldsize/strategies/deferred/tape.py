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
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves, tree_map

from worldsize.collectives.per_rank import sharded_like

Table: TypeAlias = Literal["_parameters", "_buffers", "__dict__"]
_TABLES: tuple[Table, ...] = ("_parameters", "_buffers", "__dict__")


@final
@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a module, which stays the same when the module is sharded."""

    module: nn.Module
    name: str
    table: Table

    @property
    def tensor(self) -> Tensor:
        """The tensor that is in this place, of any shape."""
        tensor: Tensor = getattr(self.module, self.table)[self.name]
        return tensor

    @property
    def moves(self) -> bool:
        """Whether the tensor moves with its module to another device."""
        return self.table != "__dict__"

    def set(self, tensor: Tensor) -> None:
        """Put ``tensor``, of the same shape, in this place; a parameter or buffer is set through its module."""
        if self.table == "__dict__":
            vars(self.module)[self.name] = tensor  # a parameter that is kept there is not the module's
        else:
            setattr(self.module, self.name, tensor)


@final
@dataclass(frozen=True)
class Devices:
    """The devices on which this process keeps the tensors of its modules; other tensors stay on the host."""

    full: torch.device
    shards: torch.device

    def put(self, made: Tensor, slots: Sequence[Slot]) -> None:
        """Put this process's part of ``made``, in full shape, in place of the tensor that is in all of ``slots``."""
        empty = slots[0].tensor
        if isinstance(empty, DTensor):
            part: Tensor = _part(empty, made, self.shards)
        else:  # what is neither parameter nor buffer stays on the host, as it does when a module moves
            part = made.to(self.full) if any(slot.moves for slot in slots) else made
            part = part.detach()  # another tensor, since others may be made of this memory
        part = like(empty, part)
        try:
            torch.utils.swap_tensors(empty, part)  # type: ignore[no-untyped-call] # whoever else has it has it made
        except RuntimeError:  # something refers to it weakly, as torch's LSTM does, which notes what is set
            for slot in slots:
                slot.set(part)


def slots_of(model: nn.Module) -> Iterator[Slot]:
    """Iterate over the places of all tensors that are attributes of modules."""
    for module in model.modules():
        for table in _TABLES:
            entries: dict[str, Any] = getattr(module, table)
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    yield Slot(module, name, table)


def like(tensor: Tensor, numbers: Tensor, *, leave_out: frozenset[str] = frozenset()) -> Tensor:
    """Return ``numbers``, of the same shape, as a copy of ``tensor``: a parameter if it is one, with its attributes.

    Attributes named in ``leave_out`` are not copied.
    """
    if isinstance(tensor, nn.Parameter):
        numbers = nn.Parameter(numbers, tensor.requires_grad)
    elif tensor.requires_grad:
        numbers.requires_grad_()
    vars(numbers).update({name: value for name, value in vars(tensor).items() if name not in leave_out})
    return numbers


def _part(empty: DTensor, full: Tensor, device: torch.device) -> DTensor:
    size, begin = compute_local_shape_and_global_offset(full.shape, empty.device_mesh, empty.placements)
    box = tuple(slice(first, first + length) for first, length in zip(begin, size, strict=True))
    local = full[box].to(device, copy=True, memory_format=torch.contiguous_format)
    return sharded_like(empty, local)


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
class TapedCall:
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

    operations: list[TapedCall] = field(default_factory=list)
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

    def add(self, operation: TapedCall) -> None:
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

    def _draw(self, operation: TapedCall, index: int) -> None:
        """Record that the next draw is made, and the state of its generator if it will be made again."""
        assert operation.generator is not None
        if self._is_wanted(index):
            self._states[index] = operation.generator.get_state()
        self._drawn += 1

    def _is_wanted(self, index: int) -> bool:
        return self._wanted is None or self._wanted[index] > 0
