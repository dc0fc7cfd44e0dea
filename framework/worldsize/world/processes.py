"""Process lifecycle: forking, parent-death signals, signal handling and heartbeats.

Imports and memory are prepared so that forked children share them. Children are killed when their parent dies, so that
they cannot become orphans. The first termination signal sets a flag that all ranks agree on; a second one ends the
process. Heartbeats are a few numbers in a memory-mapped file, so the launching process can read them after a rank has
died. This module does not import torch at the top level; :func:`will_fork` patches torch and keeps its state here.
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
_ASK = (_COUNTS, "_cuda_init")  # functions of torch._C; once called, forked processes cannot use CUDA
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
PIPE = "WORLDSIZE_PIPE"  # environment variable: descriptor of the pipe that a process passes to itself across exec
_askers: list[str] = []  # file and line of the first call to a function in _ASK, in this process or an ancestor


def will_fork() -> None:
    """Prepare for forking: avoid an OpenMP pool, record the first call to the CUDA driver."""
    import torch

    torch.set_num_threads(1)
    _note_askers()


@cache
def _note_askers() -> None:
    import torch

    asked = {name: getattr(torch._C, name) for name in _ASK if hasattr(torch._C, name)}  # CUDA builds only
    for name, ask in asked.items():
        setattr(torch._C, name, partial(_record_caller, ask, asked))
    if _COUNTS in asked:
        counts = partial(_count_in_child, os.getpid(), asked[_COUNTS], getattr(torch._C, _COUNTS))
        setattr(torch._C, _COUNTS, counts)


def _count_in_child(owner: int, ask: Callable[[], object], noted: Callable[[], object]) -> object:
    """Count the GPUs with the driver; process ``owner`` uses a child, to stay forkable.

    Torch uses the driver to count MIG devices, or any GPUs if NVML is missing, as in some containers.
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
        return None  # a library started CUDA in this process, so the driver rejects the child
    return int(count) if count else None


def _record_caller(ask: Callable[[], object], asked: Mapping[str, Callable[[], object]]) -> object:
    """Record the caller, restore torch's original functions, and call ``ask``."""
    import torch

    for name, function in asked.items():
        setattr(torch._C, name, function)
    own = (f"{Path(torch.__file__).parent}{os.sep}", __file__)
    frames = [each for each in traceback.extract_stack() if not each.filename.startswith(own)]
    _askers.append(f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "an unknown location")
    return ask()


def leave_bad_fork(program: Sequence[str], pipe: int | None = None) -> None:
    """Replace this forked process with ``program`` if its parent called the CUDA driver.

    CUDA cannot be used in such a process. The new program keeps the process ID, environment and pipes, so the parent
    still notices its exit. It inherits the descriptor ``pipe``, too, and finds its number in the variable PIPE.
    """
    import torch

    if not torch.cuda._is_in_bad_fork():
        return
    _logger.warning(
        "CUDA was used by %s before this process was forked. Restarting the process, which takes a few seconds. To "
        "avoid this, use CUDA in Recipe.model, not at import time.",
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
    """Let torch query the CUDA driver again; only for a process that will not fork before using GPUs.

    ``import worldsize`` makes torch query NVML instead. Every optimizer step makes this query, and on a host without a
    GPU torch then searches for the NVML library each time, which takes 0.1 ms.
    """
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)


@contextmanager
def ready_to_fork() -> Iterator[None]:
    """Import slow modules and freeze the garbage collector, so that forks share their memory."""
    import torch._dynamo  # optimizers import it before their first step, which takes a second
    import torch.distributed.checkpoint.state_dict  # noqa: F401 - needed to load or transfer a state

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def gpus_hidden() -> Iterator[None]:
    """Hide NVIDIA and AMD GPUs from torch in this context, for an optimizer step on the CPU.

    Most torch optimizers request the current stream of an available GPU, which initializes CUDA and makes it unusable
    in processes forked later. Does nothing if CUDA is already initialized.
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


RANK_NAME = re.compile(r"rank (\d+)", re.ASCII)  # kernel's name for a process of a run, see name_process
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel signal this process when its creating thread exits (prctl(2), Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the request took effect
        os._exit(1)


def name_process(rank: int) -> None:
    """Name this process and its children "rank 3", as shown by top, ps and /proc/PID/comm."""
    with suppress(OSError):  # not on Linux
        Path("/proc/self/comm").write_text(f"rank {rank}")


PREEMPTED = 75  # EX_TEMPFAIL in sysexits.h: the run saved a checkpoint and can be resumed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SAME = 1.0  # seconds in which a repeated signal is a duplicate (sent by the scheduler and forwarded by the launcher)


def filter_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return ``numbers``, without SIGHUP if this process ignores it, as under nohup."""
    return [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


def leave_hangups() -> None:
    """Ignore SIGHUP with an empty handler (SIG_IGN would mean nohup); the launcher handles it."""
    for number in filter_signals([signal.SIGHUP]):
        signal.signal(number, _ignore_signal)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing; a signal handler."""


@final
class Preemption:
    """Installs handlers for the signals ``names``; the other SIGNALS keep their default action."""

    def __init__(self, names: Iterable[str]) -> None:
        self._since: dict[int, float] = {}
        for number in filter_signals(signal.Signals[name] for name in names):
            signal.signal(number, self._record_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocked them until now

    def is_wanted(self) -> bool:
        """Return whether this process has received a signal; other ranks may not have yet."""
        return bool(self._since)

    def seconds_left(self, grace: float) -> float:
        """Return how many of the ``grace`` seconds since this process's first signal are left."""
        return grace - (time.monotonic() - min(self._since.values())) if self._since else grace

    def request_stop(self) -> None:
        """Request preemption, as if a signal had been received."""
        self._since.setdefault(0, time.monotonic())

    def _record_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self._since:
            return  # a shutdown may send SIGHUP after other signals
        if time.monotonic() - self._since.setdefault(number, time.monotonic()) > _SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_FORMAT = struct.Struct("=qqqd")


@dataclass(frozen=True)
class Beat:
    """Progress of a process.

    ``step`` is the step in progress (0 if none yet), ``first`` the last step before the process started, and ``done``
    the last completed step. ``at`` is the Unix time in seconds of its first completed step (0.0 if none).
    """

    step: int
    first: int
    done: int
    at: float


@final
class Heartbeat:
    """Records progress in mapped memory: about 1 µs per step, without a system call."""

    def __init__(self, path: Path, first: int) -> None:
        with path.open("w+b") as file:
            file.truncate(_FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self._first, self._at = first, 0.0
        self.step(first)

    def step(self, done: int) -> None:
        """Record that step ``done`` is complete and the next step starts."""
        if done > self._first and self._at == 0.0:
            self._at = time.time()
        _FORMAT.pack_into(self._memory, 0, done + 1, self._first, done, self._at)


def write_beat(path: Path, beat: Beat) -> None:
    """Write the progress that a remote host reported for a process, for :func:`read_beat`."""
    with suppress(OSError):  # the folder was removed
        path.write_bytes(_FORMAT.pack(beat.step, beat.first, beat.done, beat.at))


def read_beat(path: Path) -> Beat | None:
    """Return the last recorded progress of a process; None if it has not recorded any."""
    try:
        beat = Beat(*_FORMAT.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
    return beat if beat.step else None
