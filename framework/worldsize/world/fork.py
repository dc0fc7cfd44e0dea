"""Prepares a process for forking: imports and memory that its children share."""

from __future__ import annotations

import gc
import logging
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

_logger = logging.getLogger(__name__)

_COUNTS = "_cuda_getDeviceCount"
_ASK = (_COUNTS, "_cuda_init")  # functions of torch._C after which forked processes cannot use CUDA
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
PIPE = "WORLDSIZE_PIPE"  # environment variable with the descriptor of the pipe that a process has handed to itself
_askers: list[str] = []  # the place in the code that called one of them first, in this process or one that forked it


def will_fork() -> None:
    """Keep this process fit to be forked: it makes no OpenMP pool, and notes who asks CUDA's driver."""
    import torch

    torch.set_num_threads(1)
    _note_askers()


@cache
def _note_askers() -> None:
    import torch

    asked = {name: getattr(torch._C, name) for name in _ASK if hasattr(torch._C, name)}  # in builds with CUDA
    for name, ask in asked.items():
        setattr(torch._C, name, partial(_noted, ask, asked))
    if _COUNTS in asked:
        counts = partial(_count_in_child, os.getpid(), asked[_COUNTS], getattr(torch._C, _COUNTS))
        setattr(torch._C, _COUNTS, counts)


def _count_in_child(owner: int, ask: Callable[[], object], noted: Callable[[], object]) -> object:
    """Count the GPUs by the driver, in a child if this process is the ``owner``, so that it can fork others.

    Torch counts MIG devices so, and all GPUs where NVML is missing, as in some containers.
    """
    count = _child_count(ask, tuple(map(os.environ.get, _VISIBLE))) if os.getpid() == owner else None
    return noted() if count is None else count


@cache
def _child_count(ask: Callable[[], object], visible: tuple[str | None, ...]) -> int | None:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            os.write(writing, f"{ask()}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        count = answer.read()
    os.waitpid(child, 0)
    if count == b"0" and "libcuda." in Path("/proc/self/maps").read_text():
        return None  # a library has started CUDA in this process, so that the driver refuses the child
    return int(count) if count else None


def _noted(ask: Callable[[], object], asked: Mapping[str, Callable[[], object]]) -> object:
    """Note who asks first, and put torch's functions back."""
    import torch

    for name, function in asked.items():
        setattr(torch._C, name, function)
    own = (f"{Path(torch.__file__).parent}{os.sep}", __file__)
    frames = [each for each in traceback.extract_stack() if not each.filename.startswith(own)]
    _askers.append(f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "an unknown place")
    return ask()


def leave_bad_fork(program: Sequence[str], pipe: int | None = None) -> None:
    """Replace this forked process by ``program`` if the one that forked it had asked CUDA's driver before.

    CUDA refuses such a process. The new program keeps its number, its environment and its pipes, by which the forking
    process learns of its end. ``pipe``: the descriptor of a further pipe; the environment variable PIPE holds it.
    """
    import torch

    if not torch.cuda._is_in_bad_fork():
        return
    _logger.warning(
        "CUDA was asked before this process was forked, by %s: it starts again by itself, which takes some seconds. "
        "Ask in Recipe.model, not where a module is imported.",
        _askers[0] if _askers else "a library",
    )
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            if stat.S_ISFIFO(os.fstat(int(entry.name)).st_mode):
                os.set_inheritable(int(entry.name), True)
    if pipe is not None:
        os.set_inheritable(pipe, True)
        os.environ[PIPE] = str(pipe)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program[0], [*program])


def ask_the_driver() -> None:
    """Let torch ask CUDA's driver for GPUs in a process that is not forked again before it uses them.

    ``import worldsize`` makes torch ask NVML instead. Each step of an optimizer asks, and each time without a GPU torch
    then searches for NVML's library, which takes 0.1 ms.
    """
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)


@contextmanager
def ready_to_fork() -> Iterator[None]:
    """Freeze the garbage collector, so that processes forked inside neither scan nor copy imported objects."""
    import torch._dynamo  # every optimizer imports it before its first step, and that takes a second
    import torch.distributed.checkpoint.state_dict  # noqa: F401 - whoever loads or hands over a state needs it

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def gpus_hidden() -> Iterator[None]:
    """Hide NVIDIA's and AMD's GPUs from torch within the context, for a step of an optimizer on the CPU.

    Most optimizers of torch ask for the current stream of a GPU that is there, which starts CUDA: processes that are
    forked from this one later could not use it. Where CUDA has been started, nothing is hidden.
    """
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    before = {name: os.environ.get(name) for name in _VISIBLE}
    os.environ.update(dict.fromkeys(_VISIBLE, ""))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
