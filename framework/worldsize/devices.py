"""Kinds of devices by the names that torch gives them: cpu, cuda, xpu, mps, hpu, and those of packages that extend it.

Torch is imported inside the functions, since it takes seconds and the configuration names devices without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, neighbours

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_KNOWN = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")  # what an error message lists, beside this machine's accelerator
_NO_DEVICES = ("meta", "lazy", "vulkan", "opengl", "opencl", "ideep", "mkldnn", "fpga", "ve", "ipu", "hip")
_CALLED = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps"}  # what people also say
_XLA = (
    "cluster.device={kind} needs torch_xla, which worldsize does not drive. Set cluster.device=cpu or cuda; "
    "docs/howto/gpus.md says what TPUs would take."
)


def device_count(kind: str) -> int:
    """Return how many devices of a ``kind`` other than "cpu" torch can use on this machine.

    Raises:
        ConfigError: torch knows no such kind.
    """
    import torch

    check_kind(kind)
    try:
        return int(torch.get_device_module(kind).device_count())
    except RuntimeError:  # the package that brings its module is not installed here
        return 0


def check_kind(kind: str) -> None:
    """Raise ConfigError unless this torch, with the packages that extend it, knows devices of this ``kind``."""
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
            f"cluster.device={kind!r} is unknown{near} Devices that a package adds to torch are "
            "known where it is installed."
        )


def default_backend(kind: str) -> str:
    """Return the backend of torch.distributed for tensors on devices of this ``kind``.

    Raises:
        ConfigError: torch has none.
    """
    if kind in ("cpu", "cuda"):
        return "gloo" if kind == "cpu" else "nccl"
    import torch.distributed as dist

    try:
        return str(dist.get_default_backend_for_device(kind))
    except ValueError as error:
        raise ConfigError(
            f"torch knows no backend of torch.distributed for cluster.device={kind}. Install the package that brings "
            "one, or name it with cluster.backend."
        ) from error


def backend_names(backend: str) -> list[str]:
    """Return the backends that ``backend`` combines: two for "cpu:gloo,cuda:nccl"."""
    return [part.rpartition(":")[2] for part in backend.lower().split(",")]


def backend_for(backend: str, kind: str) -> str:
    """Return the backend for tensors on devices of this ``kind``, as "nccl" of "cpu:gloo,cuda:nccl" for "cuda".

    One that names no devices is for all. Empty: this kind has none.
    """
    by_kind = dict(part.rpartition(":")[::2] for part in backend.lower().split(","))
    return by_kind.get(kind, by_kind.get("", ""))


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` computes beside the host, which has to wait for its results."""
    return device.type not in ("cpu", "meta")


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor``, of any shape, on ``device``, without waiting for queued work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all that it was given; a CPU has."""
    import torch

    if is_accelerator(device):
        torch.get_device_module(device).synchronize()


def synchronize_stream(device: torch.device) -> None:
    """Wait until ``device`` has done what this thread's stream was given, or all where torch does not tell them apart.

    Copies to pinned memory are there then; what runs on other streams goes on.
    """
    queued(device)()


def queued(device: torch.device) -> Callable[[], None]:
    """Return a function that waits, in any thread, for the work queued so far on this thread's stream of ``device``.

    On devices other than CUDA's the call itself waits for all work.
    """
    import torch

    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))

        def wait() -> None:
            with torch.cuda.device(device):  # a new thread's is the first one
                done.synchronize()

        return wait
    synchronize(device)
    return lambda: None
