"""The life of a process of a run: forking, death with its parent, signals and heartbeats.

Imports and memory are prepared so that forked children share them. The life of a child ends with its parent's, so that
no orphan is left behind. The first signal that asks a process to end sets a flag on which all ranks agree; a second one
ends the process. Heartbeats are a few numbers in shared memory that the launching process can read after a rank's
death. Imports no torch; :func:`will_fork` replaces functions of torch and keeps state in this module.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import re
import signal
import stat
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import final

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


RANK_NAME = re.compile(r"rank (\d+)", re.ASCII)  # what a process of a run is called by the kernel
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens (prctl(2), Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request took effect
        os._exit(1)


def name_process(rank: int) -> None:
    """Call this process "rank 3" where the kernel lists it (top, ps, /proc/PID/comm), and what it forks, too."""
    with suppress(OSError):  # not on Linux
        Path("/proc/self/comm").write_text(f"rank {rank}")


PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the run has saved and can be started again
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SAME = (
    1.0  # seconds within which a repeated signal is a duplicate, sent by the scheduler and forwarded by the launcher
)


def handled(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals without SIGHUP if this process ignores it, as under nohup."""
    return [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


def leave_hangups() -> None:
    """Leave SIGHUP to the launching process, by a handler: SIG_IGN stands for nohup."""
    for number in handled([signal.SIGHUP]):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    """Do nothing about a signal."""


def note(seen: list[int], number: int) -> None:
    """Append a signal to those seen. SIGHUP and one other count as one: a single shutdown may send both."""
    if seen == [signal.SIGHUP]:
        seen[:] = [number]
    elif number != signal.SIGHUP or not seen:
        seen.append(number)


@final
class Preemption:
    """Installs handlers for the signals ``names`` in this process; the others of SIGNALS keep their default action."""

    def __init__(self, names: Iterable[str]) -> None:
        self._since: dict[int, float] = {}
        for number in handled(signal.Signals[name] for name in names):
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher has blocked them until here

    def is_wanted(self) -> bool:
        """Return whether this process has received a signal; the other ranks may not know of it yet."""
        return bool(self._since)

    def seconds_left(self, grace: float) -> float:
        """Return the seconds left of ``grace`` seconds, counted from the first signal to this process."""
        return grace - (time.monotonic() - min(self._since.values())) if self._since else grace

    def want(self) -> None:
        """Request the end as if a signal had been received."""
        self._since.setdefault(0, time.monotonic())

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self._since:
            return  # as in :func:`note`
        if time.monotonic() - self._since.setdefault(number, time.monotonic()) > _SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_FORMAT = struct.Struct("=qqqd")


@dataclass(frozen=True)
class Beat:
    """The progress of a process.

    ``step`` is in progress (0: none yet), ``first`` is the step after which the process began, and ``done`` the last
    completed step. ``at`` is the Unix time in seconds at which it completed its first step (0.0: none).
    """

    step: int
    first: int
    done: int
    at: float


@final
class Heartbeat:
    """Records the progress of this process, in about 1 µs per step: writing to mapped memory needs no system call."""

    def __init__(self, path: Path, first: int) -> None:
        with path.open("w+b") as file:
            file.truncate(_FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self._first, self._at = first, 0.0
        self.step(first)

    def step(self, done: int) -> None:
        """Record that steps up to ``done`` are complete and the next one begins."""
        if done > self._first and self._at == 0.0:
            self._at = time.time()
        _FORMAT.pack_into(self._memory, 0, done + 1, self._first, done, self._at)


def write_beat(path: Path, beat: Beat) -> None:
    """Write the record of a process on another host, for :func:`read_beat`."""
    with suppress(OSError):  # the folder has been removed
        path.write_bytes(_FORMAT.pack(beat.step, beat.first, beat.done, beat.at))


def read_beat(path: Path) -> Beat | None:
    """Return the last record of a process; None if it wrote none."""
    try:
        beat = Beat(*_FORMAT.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
    return beat if beat.step else None
