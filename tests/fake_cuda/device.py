"""A simulated GPU: torch.cuda answers, tensors on cuda:0 are fakes, and every wait for it is recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_init as fsdp_init
import torch.nn.parallel.distributed as ddp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tests.fake_cuda.waits import Waits, one

GPU = torch.device("cuda", 0)
_CAPABILITY, _NAME = (9, 0), "NVIDIA H100 80GB HBM3"
_STREAMS = count(1)


class Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Creates fakes on CUDA without initializing it."""

    @property
    def avoid_device_init(self) -> bool:
        return True


def believe_in_devices(library: str, devices: int) -> None:
    """Let torch's C++ count ``devices``, once its CUDA guard has been replaced by a no-op."""
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.c_int.in_dll(ctypes.CDLL(library), "fake_devices").value = devices


@contextmanager
def faked(devices: int) -> Iterator[Waits]:
    """Give torch this many GPUs inside the context, and record the waits for the first."""
    mode = Mode(allow_non_fake_inputs=True)
    waits = Waits(mode)
    with ExitStack() as stack:
        for owner, name, replacement in [*_cuda(waits, devices), *_tensors(waits), *_distributed()]:
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # it queries the GPU's capabilities
        stack.enter_context(waits)
        yield waits


Patch = tuple[Any, str, Any]


def _nothing(*_: Any, **__: Any) -> None: ...


def _cuda(waits: Waits, devices: int) -> Sequence[Patch]:
    class Stream(torch.Stream):
        def __new__(cls, *_: Any, **__: Any) -> Self:
            return super().__new__(cls, stream_id=next(_STREAMS), device_index=0, device_type=1)

        def __init__(self, *_: Any, **__: Any) -> None: ...

        wait_stream = wait_event = _nothing

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None:
            waits.note("stream")

        def query(self) -> bool:
            return True

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        record = wait = _nothing

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            waits.note("event")

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    main, generator = Stream(), torch.Generator()
    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": _nothing,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "device_count": lambda: devices,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: main,
        "default_stream": lambda *_: main,
        "stream": lambda *_: nullcontext(),
        "synchronize": lambda *_: waits.note("device"),
        "get_rng_state": lambda *_: generator.get_state(),
        "set_rng_state": _nothing,
        "get_device_name": lambda *_: _NAME,
        "get_device_capability": lambda *_: _CAPABILITY,
        "is_bf16_supported": lambda *_, **__: True,
        "max_memory_allocated": lambda *_: 0,
    }
    return [
        *((torch.cuda, name, answer) for name, answer in answers.items()),
        (torch.cuda, "default_generators", (generator,)),
        (torch.accelerator, "current_stream", lambda *_: main),
    ]


def _tensors(waits: Waits) -> Sequence[Patch]:
    tolist, numpy = Tensor.tolist, Tensor.numpy

    def listed(tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return tolist(tensor)
        if tensor.is_cuda:
            waits.note("tolist")

        def rows(shape: Sequence[int]) -> Any:
            return [rows(shape[1:]) for _ in range(shape[0])] if shape else one(tensor.dtype)

        return rows(tuple(tensor.shape))

    def as_numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor) and tensor.is_cuda:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return numpy(tensor, *args, **kwargs)

    return [
        (Tensor, "tolist", listed),
        (Tensor, "numpy", as_numpy),
        (Tensor, "record_stream", _nothing),
        (Tensor, "pin_memory", lambda tensor, *_: waits.pin(tensor)),
        (nn.Module, "_apply", _apply),
        (nn.functional, "scaled_dot_product_attention", _attention),
    ]


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stand in for Module._apply: it sets ``data``, and a fake's ``data`` cannot change its device."""
    moved: dict[int, Tensor] = {}
    with torch.no_grad():
        for each in module.modules():
            for table in (each._parameters, each._buffers):
                for name, tensor in table.items():
                    if tensor is not None and id(tensor) not in moved:
                        new = function(tensor)
                        is_parameter = isinstance(tensor, nn.Parameter) and new is not tensor
                        moved[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                        moved[id(moved[id(tensor)])] = moved[id(tensor)]
                    if tensor is not None:
                        table[name] = moved[id(tensor)]  # type: ignore[assignment]
    return module


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for torch's function: it queries the driver for an available kernel."""
    scores: Tensor = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


def _distributed() -> Sequence[Patch]:
    import worldsize.strategies.synchronous as own
    from worldsize.collectives import staged

    wrapped: Any = DistributedDataParallel._ddp_init_helper

    def wrap(module: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(module, *args, **kwargs)
        module.reducer, module.logger = _Reducer(module.reducer), _Logger()

    register: Any = vars(dist)["_register_comm_hook"]

    def register_hook(reducer: _Reducer, state: Any, hook: Any) -> None:
        reducer.has_hook = True
        register(reducer.inner, state, hook)

    from_group = DeviceMesh.from_group

    def mesh_of(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():  # a mesh is a tensor of ranks, and torch needs its values
            return from_group(*args, **kwargs)

    def equal_objects(objects: list[Any], mine: Any, *_: Any, **__: Any) -> None:
        objects[:] = [mine] * len(objects)

    return [
        (DeviceMesh, "from_group", staticmethod(mesh_of)),
        (dist, "all_gather_object", equal_objects),
        (dist, "broadcast_object_list", _nothing),
        # C++ code that reads addresses of tensors; fakes have none
        (ddp, "_verify_param_shape_across_processes", _nothing),
        (own, "_verify_param_shape_across_processes", _nothing),
        (ddp, "_sync_module_states", _nothing),
        (DistributedDataParallel, "_sync_buffers", _nothing),
        (DistributedDataParallel, "_ddp_init_helper", wrap),
        (dist, "_register_comm_hook", register_hook),
        (fsdp_init, "_move_states_to_device", _nothing),
        (staged, "Future", lambda **_: Future()),  # torch for CPUs does not create one for a stream
    ]


class _Reducer:
    """DDP's reducer without its CUDA timers and its own all-reduce: the fake group does not complete it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.has_hook = inner, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare_for_forward(self) -> None:
        if not self.has_hook:
            vars(dist)["_register_comm_hook"](self, None, _unchanged)

    def _rebuild_buckets(self) -> bool:
        return False


def _unchanged(_: None, bucket: GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


class _Logger:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing
