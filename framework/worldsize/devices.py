"""Device types as torch names them: cpu, cuda, xpu, ..., and those added by extensions.

The functions import torch themselves, because the import takes seconds and composing a configuration does not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, neighbours

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_KNOWN = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")  # listed in errors, plus this machine's accelerator
_NO_DEVICES = ("meta", "lazy", "vulkan", "opengl", "opencl", "ideep", "mkldnn", "fpga", "ve", "ipu", "hip")
_CALLED = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps"}  # alias to torch's name
_XLA = (
    "cluster.device={kind} is not supported, because it requires torch_xla. Set cluster.device=cpu or cuda; "
    "docs/howto/gpus.md describes the steps to support TPUs."
)


def device_count(kind: str) -> int:
    """Return the number of accelerators of type ``kind`` (not "cpu") that torch can use on this machine.

    Raises:
        ConfigError: torch does not support this kind.
    """
    import torch

    check_kind(kind)
    try:
        return int(torch.get_device_module(kind).device_count())
    except RuntimeError:  # the package that provides its module is not installed here
        return 0


def check_kind(kind: str) -> None:
    """Raise ConfigError unless torch, with its extensions, supports devices of this ``kind``."""
    import torch

    if kind in ("xla", "tpu"):
        raise ConfigError(_XLA.format(kind=kind))
    accelerator = torch.accelerator.current_accelerator()
    try:
        known = torch.device(kind).type == kind and kind not in _NO_DEVICES
    except RuntimeError:
        known = False
    if not known:
        names = {*_KNOWN, *([accelerator.type] if accelerator else [])}
        near = neighbours(_CALLED.get(kind, kind), names)
        raise ConfigError(
            f"cluster.device={kind!r} is unknown{near} For a device from a torch extension, install its package."
        )


def default_backend(kind: str) -> str:
    """Return the default torch.distributed backend for tensors on devices of this ``kind``.

    Raises:
        ConfigError: torch has no such backend.
    """
    if kind in ("cpu", "cuda"):
        return "gloo" if kind == "cpu" else "nccl"
    import torch.distributed as dist

    try:
        return str(dist.get_default_backend_for_device(kind))
    except ValueError as error:
        raise ConfigError(
            f"torch.distributed has no backend for cluster.device={kind}. Install a package with such a "
            "backend, or set cluster.backend."
        ) from error


def backend_names(backend: str) -> list[str]:
    """Return the backends that ``backend`` combines, e.g. gloo and nccl for "cpu:gloo,cuda:nccl"."""
    return [part.rpartition(":")[2] for part in backend.lower().split(",")]


def backend_for(backend: str, kind: str) -> str:
    """Return the backend for tensors on devices of this ``kind``: "nccl" for "cuda" in "cpu:gloo,cuda:nccl".

    A backend without a device prefix applies to all kinds. The result is empty if this kind has no backend.
    """
    by_kind = dict(part.rpartition(":")[::2] for part in backend.lower().split(","))
    return by_kind.get(kind, by_kind.get("", ""))


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` computes asynchronously, so that the host must wait for results."""
    return device.type not in ("cpu", "meta")


def move_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``tensor`` to ``device`` asynchronously; before reading it on a CPU, call :func:`synchronize_stream`."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on ``device``; return immediately for a CPU."""
    import torch

    if is_accelerator(device):
        torch.get_device_module(device).synchronize()


def synchronize_stream(device: torch.device) -> None:
    """Wait for this thread's CUDA stream; on other devices, wait for the whole device.

    Afterwards, copies to pinned memory are complete; other streams may still be running.
    """
    record_queued_work(device)()


def record_queued_work(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the work queued so far on this thread's stream; any thread may call it.

    On devices other than CUDA, this function itself waits at once, for all work on ``device``.
    """
    import torch

    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))

        def wait_for_event() -> None:
            with torch.cuda.device(device):  # a new thread defaults to device 0
                done.synchronize()

        return wait_for_event
    synchronize(device)
    return lambda: None
