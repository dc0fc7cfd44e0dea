"""Records where a program waits for a GPU, on fake tensors: reads of values, unpinned copies, and queries."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OWN = ("/framework/worldsize/", "/plugins/", "/recipes/")
_PASSED = ("collectives/exact.py", "devices.py")  # they wait for their caller, and it is recorded, too
_NO_CALLERS = ("<lambda>", "<genexpr>", "<listcomp>", "__torch_function__", "_backward")
_SIZES = (  # the values determine the number of rows in their results
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.bincount.default,
)


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the waits of each phase by kind and by waiting function.

    Tensors created on CUDA are fakes of ``mode``, also outside of its context; others have values.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.phase = mode, "build"
        self.counts: Counter[tuple[str, str, str]] = Counter()  # by phase, functions, kind
        self.host_groups: frozenset[str] | None = None
        """Names of the groups that exchange tensors in host memory; others refuse them, as NCCL does. None: all do."""
        self._pinned: dict[int, Tensor] = {}  # by address; kept alive, so that no other tensor gets the address

    def note(self, kind: str) -> None:
        self.counts[self.phase, _caller(), kind] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy of ``tensor``, of any shape: copies to and from it need not wait."""
        copy = tensor.detach().clone()
        self._pinned[copy.untyped_storage()._cdata] = copy
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and self.host_groups is not None:
            self._check_reach(args, self.host_groups)
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].is_cuda:
                self.note("item")
            return one(args[0].dtype)
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            if args[0].is_cuda:
                self.note("equal")
            return True
        if func in _SIZES and args[0].is_cuda:
            self.note(func.__name__.split(".")[0])
        if kwargs.get("pin_memory"):
            return self.pin(self._called(func, args, {**kwargs, "pin_memory": None}))
        made = self._called(func, args, kwargs)
        if func is torch.ops.aten._to_copy.default:
            self._copied(args[0], made, asynchronous=bool(kwargs.get("non_blocking")))
        elif func is torch.ops.aten.copy_.default:
            self._copied(args[1], args[0], asynchronous=bool(kwargs.get("non_blocking") or args[2:3] == (True,)))
        return made

    def _check_reach(self, args: Sequence[Any], host_groups: Container[str]) -> None:
        """Raise torch's error for a host tensor in a group without a host backend."""
        leaves = tree_leaves(args)
        boxes = [each for each in leaves if isinstance(each, torch.ScriptObject)]
        groups = [ProcessGroup.unbox(each) for each in boxes if each._type().name() == "ProcessGroup"]  # type: ignore[attr-defined]
        on_host = any(isinstance(each, Tensor) and each.device.type == "cpu" for each in leaves)
        if on_host and any(group.group_name not in host_groups for group in groups):
            raise RuntimeError("No backend type associated with device type cpu")

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if device is not None and torch.device(device).type == "cuda" and not is_fake:
            with self.mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _copied(self, source: Tensor, target: Tensor, *, asynchronous: bool) -> None:
        if {source.device.type, target.device.type} != {"cpu", "cuda"} or not source.numel():
            return
        if not asynchronous:
            self.note("copy to the host" if source.is_cuda else "copy from the host")
        elif not source.is_cuda and source.untyped_storage()._cdata not in self._pinned:
            self.note("copy from pageable memory")


def one(dtype: torch.dtype) -> bool | float | int:
    """Return the assumed value of every element of a fake tensor."""
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _caller() -> str:
    """Return the project's innermost function, and its caller if the wait is passed on."""
    names: list[str] = []
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        function = frame.f_code.co_qualname.replace(".<locals>", "")
        if any(own in path for own in OWN) and not function.endswith(_NO_CALLERS):
            name = _short(path)
            names.append(f"{name} {function}")
            if not name.startswith(_PASSED):
                break
        frame = frame.f_back
    return " of ".join(names)


def _short(path: str) -> str:
    _, own, rest = next(path.rpartition(own) for own in OWN if own in path)
    return rest if "worldsize" in own else str(Path(own.strip("/")) / rest)
