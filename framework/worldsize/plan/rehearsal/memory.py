"""Tracks the bytes of all tensors of one rank; fake tensors do not use real memory."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import ConfigError, StateDict, Strategy
from worldsize.data.batches import map_tensors
from worldsize.optimizers.groups import all_parameters


@final
class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages created in :meth:`recording`, and their purpose, in ``log``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = StorageLog()
        self._owns: Callable[[FakeTensor], bool] | None = None

    @contextmanager
    def recording(self, owns: Callable[[FakeTensor], bool] | None = None) -> Iterator[None]:
        """Track tensors created in the context; ``owns``: whether a fake tensor belongs to the rank."""
        self._owns = owns
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._label_gradients).remove)
            stack.callback(register_optimizer_step_post_hook(self._label_optimizer_state).remove)
            stack.enter_context(self._resizes_seen())
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched later
        if func is not torch.ops.aten.lift_fresh.default:  # called by torch.tensor() with its new tensor
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and self._is_own(leaf):
                    self.log.leave_out(leaf.untyped_storage())
        made = func(*args, **kwargs or {})
        self.track_tensors(made)
        return made

    def track_tensors(self, tree: Any) -> None:
        """Track the tensors in ``tree``."""
        for leaf in (tree,) if isinstance(tree, Tensor) else tree_leaves(tree):
            if isinstance(leaf, Tensor) and self._is_own(leaf):
                self.log.record_storage(leaf.untyped_storage())

    def _is_own(self, tensor: Tensor) -> bool:
        """Return whether the rank computes with ``tensor``; torch also has fakes for shapes."""
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return False
        if isinstance(tensor, FakeTensor):
            return self._owns is not None and self._owns(tensor)
        return self._owns is None

    @contextmanager
    def _resizes_seen(self) -> Iterator[None]:
        """Track storages resized without an operator, such as FSDP's when it gathers a unit."""
        resize = UntypedStorage.resize_

        def resize_and_track(storage: UntypedStorage, size: int) -> UntypedStorage:
            result: UntypedStorage = resize(storage, size)
            if self.log.has_storage(storage):
                self.log.record_storage(storage)
            return result

        with patch.object(UntypedStorage, "resize_", resize_and_track):
            yield

    def label_state(self, state: StateDict) -> None:
        """Label the storages of buffers, and of parameters that no optimizer has stepped, in a replica's state."""
        values = [get_local_shard(each) for each in state["model"].values() if isinstance(each, Tensor)]
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        parameters = {_get_address(each) for each in tensors if isinstance(each, nn.Parameter)}
        self.log.label_storages("parameters", [each for each in values if _get_address(each) in parameters])
        self.log.label_storages("buffers", values)

    def _label_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = all_parameters(optimizer)
        self.log.label_storages("parameters", parameters)
        self.log.label_storages("gradients", [each.grad for each in parameters])

    def _label_optimizer_state(self, optimizer: Optimizer, *_: Any) -> None:
        self.log.label_storages("optimizer", _unwrap_subclasses(tree_leaves(list(optimizer.state.values()))))


def _unwrap_subclasses(leaves: Iterable[Any]) -> Iterator[Any]:
    """Yield ``leaves``, with wrapper subclasses (8-bit moments) replaced by inner tensors."""
    for leaf in leaves:
        if isinstance(leaf, DTensor) or not is_traceable_wrapper_subclass(leaf):
            yield leaf
        else:
            yield from (getattr(leaf, name) for name in leaf.__tensor_flatten__()[0])


def _get_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage, or None without one."""
    own = get_local_shard(tensor)
    return own.untyped_storage()._cdata if own.layout is torch.strided else None


PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations")
"""Purposes of memory, in the order of a report; activations include everything else."""


@final
@dataclass(frozen=True)
class Peak:
    """A rank's peak memory.

    Attributes:
        nbytes: Bytes of all tensors.
        parts: Bytes by purpose, one of ``PARTS``.
    """

    nbytes: int
    parts: Mapping[str, int]


@final
class StorageLog:
    """Tracks storages until they are freed.

    The purpose of a storage is often known only after its allocation; e.g. a gradient is recognized at the optimizer
    step. Size changes are thus recorded in order, and evaluated at the end.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[int, int]] = []  # storage number, and change in bytes
        self._labels: dict[int, str] = {}
        self._numbers: dict[int, int] = {}  # by address, of live storages
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        self._foreign: dict[int, weakref.ref[UntypedStorage]] = {}  # by address: storages that existed before
        self._made = 0
        self._built = 0  # number of changes before the first step
        self._trained: int | None = None  # number of changes before the evaluation

    def record_storage(self, storage: UntypedStorage) -> None:
        """Record a storage and its current size."""
        address = storage._cdata
        if address in self._foreign:
            return
        if address not in self._numbers:
            self._made += 1
            self._numbers[address] = self._made
            self._alive[address] = weakref.ref(storage, partial(self._record_free, address))
        number, nbytes = self._numbers[address], storage.nbytes()
        if nbytes != self._sizes.get(number, 0):
            self._changes.append((number, nbytes - self._sizes.get(number, 0)))
            self._sizes[number] = nbytes

    def leave_out(self, storage: UntypedStorage) -> None:
        """Exclude a storage from before the rehearsal, such as a data set's, unless it has been recorded."""
        address = storage._cdata
        if address not in self._numbers and address not in self._foreign:
            self._foreign[address] = weakref.ref(storage, lambda _: self._foreign.pop(address, None))

    def has_storage(self, storage: UntypedStorage) -> bool:
        """Return whether the storage has been recorded."""
        return storage._cdata in self._numbers

    def _record_free(self, address: int, _: object) -> None:
        del self._alive[address]
        number = self._numbers.pop(address)
        self._changes.append((number, -self._sizes.pop(number, 0)))

    def label_storages(self, part: str, tensors: Iterable[Any]) -> None:
        """Set the purpose of the storages of ``tensors``, unless it has been set."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                number = self._numbers.get(get_local_shard(tensor).untyped_storage()._cdata)
                if number is not None:
                    self._labels.setdefault(number, part)

    def begin_training(self) -> None:
        """Mark the start of training, after the replica was built."""
        self._built = len(self._changes)

    def begin_evaluation(self) -> None:
        """Mark the start of evaluation, after training; later calls are ignored."""
        self._trained = self._trained or len(self._changes)

    def building_peak(self) -> Peak:
        """Return the peak memory while building the replica."""
        return self._compute_peak(self._changes[: self._built], after=0)

    def compute_training_peak(self) -> Peak:
        """Return the peak memory during training."""
        return self._compute_peak(self._changes[: self._trained], after=self._built)

    def evaluation_peak(self) -> Peak | None:
        """Return the peak memory during evaluation, or None without an evaluation."""
        return None if self._trained is None else self._compute_peak(self._changes, after=self._trained)

    def _compute_peak(self, changes: Sequence[tuple[int, int]], after: int) -> Peak:
        most, best, now = 0, -1, 0
        for place, (_, change) in enumerate(changes):
            now += change
            if now > most and place >= after:
                most, best = now, place
        parts: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        for number, change in changes[: best + 1]:
            parts[self._labels.get(number, "activations")] += change
        return Peak(most, dict(parts))


@final
class FakeTensors:
    """Creates fake tensors, without memory or values, in :meth:`create_fakes`; ``item()`` returns 1."""

    def __init__(self) -> None:
        self.mode = _Mode(allow_non_fake_inputs=True)

    @contextmanager
    def create_fakes(self) -> Iterator[None]:
        """Make torch create fake tensors in this block."""
        with self.mode, _Numbers():  # type: ignore[no-untyped-call]
            yield

    def check_model(self, state: StateDict, strategy: Strategy) -> None:
        """Check that the model has fake tensors, since real ones cannot be mixed with them.

        Raises:
            ConfigError: ``strategy`` does not shard the model, or the recipe's constructor cannot be deferred.
        """
        tensors = [get_local_shard(each) for each in state["model"].values() if isinstance(each, Tensor)]
        if not any(isinstance(each, FakeTensor) for each in tensors):  # a buffer may already have been computed
            raise ConfigError(
                f"--fake requires a model with fake tensors, but {type(strategy).__name__} built real tensors. "
                "Remove --fake, or choose a sharded strategy such as fsdp (limits on constructors: "
                "docs/strategies.md)."
            )

    def is_own_tensor(self, tensor: FakeTensor) -> bool:
        """Return whether the rank owns ``tensor``, unlike DTensor's fakes for global shapes."""
        return tensor.fake_mode is self.mode and self.mode.depth < 2

    def replace_tensors(self, data: Any) -> Any:
        """Return ``data`` with all tensors replaced by fake tensors."""
        return map_tensors(data, self.mode.from_tensor, lambda own: own)


@final
class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake-tensor mode that counts nested entries, since DTensor re-enters the mode of its tensors."""

    depth = 0

    def __enter__(self) -> Self:
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        super().__exit__(*error)


@final
class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns 1 for each value that a program reads from a fake tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **kwargs or {})
