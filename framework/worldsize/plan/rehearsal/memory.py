"""Counts the bytes of every tensor that one rank allocates and frees."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from worldsize.core import StateDict
from worldsize.dist.per_rank import local
from worldsize.optimizers.names import all_parameters
from worldsize.plan.rehearsal.storage_log import StorageLog


@final
class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the storages of all tensors created inside :meth:`recording`, and their purpose, to ``log``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = StorageLog()
        self._owns: Callable[[FakeTensor], bool] | None = None

    @contextmanager
    def recording(self, owns: Callable[[FakeTensor], bool] | None = None) -> Iterator[None]:
        """Track tensors of any shape created inside; ``owns``: whether a fake belongs to the rank; None: no fakes."""
        self._owns = owns
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_update).remove)
            stack.enter_context(self._resizes_seen())
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts are seen later as the rank's own tensors
        if func is not torch.ops.aten.lift_fresh.default:  # called by torch.tensor() with its new tensor
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and self._is_own(leaf):
                    self.log.leave_out(leaf.untyped_storage())
        made = func(*args, **kwargs or {})
        self.see(made)
        return made

    def see(self, tree: Any) -> None:
        """Count the tensors of ``tree``."""
        for leaf in (tree,) if isinstance(tree, Tensor) else tree_leaves(tree):
            if isinstance(leaf, Tensor) and self._is_own(leaf):
                self.log.see(leaf.untyped_storage())

    def _is_own(self, tensor: Tensor) -> bool:
        """Return whether the rank computes with it, which torch's fakes for shapes are not for."""
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return False
        if isinstance(tensor, FakeTensor):
            return self._owns is not None and self._owns(tensor)
        return self._owns is None

    @contextmanager
    def _resizes_seen(self) -> Iterator[None]:
        """Track storages that change their size without an operator, as FSDP's do when a unit is gathered."""
        resize = UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> UntypedStorage:
            result: UntypedStorage = resize(storage, size)
            if self.log.knows(storage):
                self.log.see(storage)
            return result

        with patch.object(UntypedStorage, "resize_", resized):
            yield

    def label_state(self, state: StateDict) -> None:
        """Label storages of buffers, and of parameters that no optimizer has stepped, from a replica's state."""
        values = [local(each) for each in state["model"].values() if isinstance(each, Tensor)]
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        parameters = {_address(each) for each in tensors if isinstance(each, nn.Parameter)}
        self.log.label("parameters", [each for each in values if _address(each) in parameters])
        self.log.label("buffers", values)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = all_parameters(optimizer)
        self.log.label("parameters", parameters)
        self.log.label("gradients", [each.grad for each in parameters])

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self.log.label("optimizer", _held(tree_leaves(list(optimizer.state.values()))))


def _held(leaves: Iterable[Any]) -> Iterator[Any]:
    """Yield ``leaves``, with the tensors that others hold in place of these, as moments of 8 bits do."""
    for leaf in leaves:
        if isinstance(leaf, DTensor) or not is_traceable_wrapper_subclass(leaf):
            yield leaf
        else:
            yield from (getattr(leaf, name) for name in leaf.__tensor_flatten__()[0])


def _address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has none."""
    own = local(tensor)
    return own.untyped_storage()._cdata if own.layout is torch.strided else None
