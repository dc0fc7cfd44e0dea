"""Messages to the user on standard error: what worldsize, plugins and recipes log; refusals; questions.

Also formats values for people: durations, sizes, and lists of ranks. Imports nothing heavy.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, TextIO, final

from worldsize.errors import WorldsizeError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


CONFIG_ERROR = 2  # exit code of what cannot run as it is configured
FIRST_LOST = 76  # exit code of a host's agent that has lost the first host
LOGGERS = ("worldsize", "plugins", "recipes")  # whose records are shown
_BROKEN_PIPE = 141  # 128 + SIGPIPE, with which other programs end then


class _Line(logging.Formatter):
    """Prefixes warnings with their level; messages of errors already say that something failed."""

    def format(self, record: logging.LogRecord) -> str:
        text = printable_lines(record.getMessage())
        return f"warning: {text}" if record.levelno == logging.WARNING else text


class _StandardError(logging.Handler):
    """Writes to the current ``sys.stderr``, which is a different file in a forked worker."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    r"""Escape what a terminal would interpret or hide: control characters, line ends, direction marks.

    Use it for text from files and hosts that other users may write: ``"a\nb"`` is shown as ``a\\nb``.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """Escape each line of a multi-line message as :func:`printable` does."""
    return "\n".join(map(printable, text.split("\n")))


def last_error(text: str) -> str:
    """Return the error at the end of a traceback in one line; of another text the first line."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no cause"]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] if frames else 1 :] if lines[0].startswith("Traceback") else lines
    return next((line for line in after if not line[0].isspace()), lines[-1]).strip()


def duration(seconds: float) -> str:
    """Format seconds as "3.2 s", "5 min 7 s", "2 h 10 min" or "12.5 days"; NaN raises ValueError."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 2:
        return f"{seconds:.3g} s"
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:,.1f} days"


def size(count: float) -> str:
    """Format bytes in decimal units, with three digits: 1 kB is 1000 B."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def show_messages() -> None:
    """Show what modules of worldsize, plugins and recipes log; called once by each program, and inherited by its forks.

    Characters that the terminal's encoding lacks are escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # it flushes, perhaps to a full disk
                stream.reconfigure(errors="backslashreplace")
    handler = _StandardError()
    handler.setFormatter(_Line())
    for logger in map(logging.getLogger, LOGGERS):
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a configured root logger would show every message a second time


def refuse(error: WorldsizeError) -> int:
    """Log an error, escaped, since it may quote untrusted text; return the exit code."""
    print(printable_lines(str(error)), file=sys.stderr)
    return CONFIG_ERROR


def ask(facts: Mapping[str, Sequence[str]], *, yes: bool, deed: str) -> None:
    """Show ``facts``, every value on a line of its own and escaped, and ask whether ``deed`` shall be done.

    ``yes``: it was agreed to on the command line; the facts are shown all the same.

    Raises:
        WorldsizeError: it was not agreed to, or nobody is there to ask.
    """
    width = max(map(len, facts))
    for name, values in facts.items():
        for label, value in zip([name, *[""] * len(values)], values or ["none"], strict=False):
            print(f"{label:{width}}  {printable(value)}", file=sys.stderr)
    if yes:
        return
    if not sys.stdin.isatty():
        raise WorldsizeError("this record was not written by this user on this machine. Look at it, then pass --yes.")
    print(f"This record was not written by you. {deed} [y/N] ", end="", file=sys.stderr, flush=True)
    if input().strip().lower() not in ("y", "yes"):
        raise WorldsizeError("nothing was installed or run.")


@final
class _LastingFile(io.RawIOBase):
    """Output to a file or terminal that a run can outlive: bytes that it refuses are dropped, after one warning.

    ``needs_reader``: a pipe that nobody reads any more is an error all the same.
    """

    def __init__(self, descriptor: int, name: str, *, needs_reader: bool) -> None:
        self._descriptor, self._name, self._needs_reader = descriptor, name, needs_reader
        self._has_failed = False

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:  # a full disk, a closed pipe, a terminal that hung up
            if self._needs_reader and isinstance(error, BrokenPipeError):
                raise
            if not self._has_failed:
                self._has_failed = True
                self._warn(error)
        return memoryview(data).nbytes

    def _warn(self, error: OSError) -> None:
        """Warn on standard error, not through ``sys.stderr``: that may be buffered by the writer which calls this."""
        fact = f"warning: {self._name} cannot be written ({error.strerror})"
        with suppress(OSError):
            os.write(2, f"{fact}; the run goes on, and its folder has the logs\n".encode())


def outlive_output(*, needs_reader: bool = False) -> None:
    """Let no error of the terminal, or of the files and pipes in its place, end this process from now on.

    ``needs_reader``: of a command that only shows something, which ends once nobody reads it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # not a file, as in tests
            descriptor = stream.fileno()
            with suppress(OSError):
                stream.flush()
            lines, unbuffered = stream.line_buffering, stream.write_through  # the latter: python -u
            raw = _LastingFile(descriptor, name, needs_reader=needs_reader)
            file = raw if unbuffered else io.BufferedWriter(raw)
            kind = {"line_buffering": lines, "write_through": unbuffered}
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, "backslashreplace", **kind))


@contextmanager
def until_output_closes() -> Iterator[None]:
    """Exit silently once nobody reads the output any more, as in ``train.py --help | head -1``."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise  # it was another connection that broke
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in closed:
            os.dup2(nothing, stream.fileno())  # what is still buffered is written there when Python ends
        sys.exit(_BROKEN_PIPE)


def _is_closed(stream: TextIO) -> bool:
    """Whether the reading end of the pipe has been closed."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # no file at all
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def named(ranks: Sequence[int]) -> str:
    """Name ranks for people: "rank 5", "ranks 0-4, 6-63"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(ranks: Sequence[int]) -> str:
    """Abbreviate ranks: "0-3, 8", or "0, 8 .. 56" at equal distances."""
    ordered = sorted(ranks)
    distances = {after - before for before, after in pairwise(ordered)}
    if len(ordered) > 3 and len(distances) == 1 and distances != {1}:
        return f"{ordered[0]}, {ordered[1]} .. {ordered[-1]}"
    texts, first = [], 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            start, end = ordered[first], ordered[place - 1]
            texts.append(f"{start}" if start == end else f"{start}-{end}")
            first = place
    return ", ".join(texts)
