"""Runs commands in a new interpreter or in a fork, and forwards their output line by line.

A new interpreter is isolated from the threads, signal handlers and CUDA contexts of the calling process. Each child has
its own session, so that Ctrl-C in a terminal reaches only the calling process, which forwards it. If the calling
process dies, the kernel sends SIGHUP to the child, whose run then saves a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Thread
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO, final

from worldsize.world.processes import die_with_parent

if TYPE_CHECKING:  # importing torch takes a second
    from worldsize.core import Recipe

_PROGRAM = "from worldsize.api.subprocesses import run_command; run_command()"
_TAIL = 20  # lines of output to keep
_GRACE = 10.0  # seconds to wait for output from processes that outlive a command


@final
@dataclass(frozen=True)
class Ended:
    """Outcome of a command: exit code, last lines of standard output and standard error, and path of its result."""

    code: int
    printed: str
    messages: str
    result: Path | None


def call_command(*words: str, has_result: bool = False) -> Ended:
    """Run ``worldsize WORDS`` in a new interpreter; with ``has_result``, receive the path of its result."""

    def start_interpreter(pipes: _Pipes) -> _Process:
        result_fd = pipes.result if has_result else None
        given = json.dumps([os.getpid(), result_fd, *words]).encode() + b"\n"  # may hold secrets, so not in argv
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=pipes.out,
            stderr=pipes.errors,
            pass_fds=[] if result_fd is None else [result_fd],
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stream:
            stream.write(given)
        return process

    return _forward_output(start_interpreter)


def run_command() -> NoReturn:
    """Run the command that :func:`call_command` writes to standard input; called in the child process."""
    parent, result_fd, *words = json.loads(sys.stdin.buffer.readline())
    _end_with_parent(parent)
    _print_plain()
    sys.argv = ["worldsize", *words]
    from worldsize.cli import main

    main(result_fd)
    sys.exit()


def call_in_fork(recipe: type[Recipe], words: Sequence[str]) -> Ended:
    """Train a recipe class of this process in a fork; otherwise like :func:`call_command`.

    A new thread makes the fork, because OpenMP has a thread pool per thread and a fork must not inherit one.
    """
    from worldsize.api.class_recipe import train_class

    def start_fork(pipes: _Pipes) -> _Process:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            os.setsid()
            _end_with_parent(parent)
            _print_plain()
            os.dup2(pipes.out, 1)
            os.dup2(pipes.errors, 2)
            for each in (pipes.out, pipes.errors, *pipes.sources):  # an open copy would keep the pipe open
                os.close(each)
            train_class(recipe, words, pipes.result)  # ends the process
        return _Fork(child)

    return _forward_output(start_fork)


@final
@dataclass(frozen=True)
class _Pipes:
    """File descriptors for a child's stdout, stderr and result; ``sources`` are the read ends of the first two."""

    out: int
    errors: int
    sources: tuple[int, int]
    result: int


def _end_with_parent(parent: int) -> None:
    """Request SIGHUP when the parent dies. One may arrive per thread of the parent; a run counts them once."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may be ignored, e.g. under nohup
    die_with_parent(parent, signal.SIGHUP)


def _print_plain() -> None:
    """Print lines instead of a live progress bar: Jupyter sets FORCE_COLOR, but would show every state of the bar."""
    os.environ.pop("FORCE_COLOR", None)


class _Process(Protocol):
    @property
    def pid(self) -> int: ...

    def wait(self) -> int: ...


@final
@dataclass(frozen=True)
class _Fork:
    """A forked child with the subset of the ``subprocess.Popen`` interface that this module uses."""

    pid: int

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@final
class _Waiter(Thread):
    """Thread that starts a process and waits until it exits.

    The kernel treats the thread that starts a process as its parent, so the thread must live as long as the process.
    """

    def __init__(self, begin: Callable[[_Pipes], _Process], pipes: _Pipes) -> None:
        super().__init__()
        self._begin, self._pipes = begin, pipes
        self.process: _Process | None = None
        self.code = 1
        self.error: BaseException | None = None
        self.done = Event()

    def run(self) -> None:
        try:
            try:
                self.process = self._begin(self._pipes)
            finally:
                os.close(self._pipes.out)
                os.close(self._pipes.errors)
            self.code = self.process.wait()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()

    def interrupt(self) -> None:
        if self.process is not None and not self.done.is_set():
            os.kill(self.process.pid, signal.SIGINT)


def _forward_output(begin: Callable[[_Pipes], _Process]) -> Ended:
    """Start a process with ``begin`` and forward its output until it exits."""
    (source, out), (messages, errors) = os.pipe(), os.pipe()
    tails = [deque[str](maxlen=_TAIL) for _ in range(2)]
    with TemporaryFile() as result:
        waiter = _Waiter(begin, _Pipes(out, errors, (source, messages), result.fileno()))
        readers = [
            Thread(target=_forward_lines, args=(descriptor, stream, tail), daemon=True)
            for descriptor, stream, tail in zip((source, messages), (sys.stdout, sys.stderr), tails, strict=True)
        ]
        for thread in (waiter, *readers):
            thread.start()
        while not waiter.done.is_set():
            try:
                waiter.done.wait()  # an interrupt inside Thread.join() would mark the thread as stopped
            except KeyboardInterrupt:
                waiter.interrupt()
        for reader in readers:
            reader.join(_GRACE)
        if waiter.error is not None:
            raise waiter.error
        result.seek(0)
        path = os.fsdecode(result.read())
    printed, said = ("\n".join(tail) for tail in tails)
    return Ended(waiter.code, printed, said, Path(path) if path else None)


def _forward_lines(source: int, shown: TextIO, tail: deque[str]) -> None:
    """Print each line and store the last lines in ``tail``; read to the end even if printing fails."""
    with os.fdopen(source, errors="replace") as lines:
        for line in lines:
            tail.append(line.rstrip("\n"))
            with suppress(OSError, ValueError):  # includes UnicodeEncodeError
                print(line, end="", file=shown, flush=True)
