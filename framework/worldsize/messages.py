"""Messages to the user on standard error: logs of worldsize, plugins and recipes, errors, and questions.

It also formats durations, sizes and lists of ranks for people. This module has no slow imports.
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


CONFIG_ERROR = 2  # exit code for an invalid configuration
FIRST_LOST = 76  # exit code of an agent that lost the first host
LOGGERS = ("worldsize", "plugins", "recipes")  # loggers whose records are shown
_BROKEN_PIPE = 141  # 128 + SIGPIPE, the conventional exit code


class _Line(logging.Formatter):
    """Prefixes warnings with "warning: "; errors are shown as they are."""

    def format(self, record: logging.LogRecord) -> str:
        text = printable_lines(record.getMessage())
        return f"warning: {text}" if record.levelno == logging.WARNING else text


class _StandardError(logging.Handler):
    """Writes to the current ``sys.stderr``, which forked workers replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    r"""Escape control characters, line ends, direction marks and other unprintable characters.

    Use it for untrusted text from files and other hosts. A line end becomes the two characters ``\n``.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """Escape each line of a multi-line message as :func:`printable` does."""
    return "\n".join(map(printable, text.split("\n")))


def last_error(text: str) -> str:
    """Return the error at the end of a traceback as one line; for any other text, return its first line."""
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


def format_bytes(count: float) -> str:
    """Format bytes in decimal units with three digits; 1 kB is 1000 B."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def show_messages() -> None:
    """Show the logs of worldsize, plugins and recipes in this process and its forks; call it once.

    Characters that the terminal's encoding cannot represent are escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # reconfigure() flushes, perhaps to a full disk
                stream.reconfigure(errors="backslashreplace")
    handler = _StandardError()
    handler.setFormatter(_Line())
    for logger in map(logging.getLogger, LOGGERS):
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a configured root logger would show every message a second time


def report_error(error: WorldsizeError) -> int:
    """Print an error, escaped because it may quote untrusted text, and return the exit code."""
    print(printable_lines(str(error)), file=sys.stderr)
    return CONFIG_ERROR


def ask_for_consent(facts: Mapping[str, Sequence[str]], *, yes: bool, deed: str) -> None:
    """Show ``facts``, one escaped value per line, and ask the question ``deed``, e.g. "Run this code?".

    With ``yes``, the user has already agreed on the command line, so the facts are shown without asking.

    Raises:
        WorldsizeError: the user did not agree, or standard input is not a terminal.
    """
    width = max(map(len, facts))
    for name, values in facts.items():
        for label, value in zip([name, *[""] * len(values)], values or ["none"], strict=False):
            print(f"{label:{width}}  {printable(value)}", file=sys.stderr)
    if yes:
        return
    if not sys.stdin.isatty():
        raise WorldsizeError(
            "this record was written by another user or on another machine. Inspect it, then pass --yes."
        )
    print(f"This record was not written by you. {deed} [y/N] ", end="", file=sys.stderr, flush=True)
    if input().strip().lower() not in ("y", "yes"):
        raise WorldsizeError("nothing was installed or run.")


@final
class _LastingFile(io.RawIOBase):
    """Output stream that survives write errors: warns about the first one, and discards data that cannot be written.

    With ``needs_reader``, a closed pipe still raises BrokenPipeError.
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
                self._warn_once(error)
        return memoryview(data).nbytes

    def _warn_once(self, error: OSError) -> None:
        """Warn on file descriptor 2, because ``sys.stderr`` may be the buffered writer that called this method."""
        fact = f"warning: failed to write to {self._name} ({error.strerror})"
        with suppress(OSError):
            os.write(2, f"{fact}; the run continues, with its logs in the run folder\n".encode())


def outlive_output(*, needs_reader: bool = False) -> None:
    """Keep this process running when stdout or stderr can no longer be written, e.g. after the terminal closes.

    ``needs_reader``: still exit on a closed pipe, for commands that only display something.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # not a file, as in tests
            descriptor = stream.fileno()
            with suppress(OSError):
                stream.flush()
            lines, unbuffered = stream.line_buffering, stream.write_through  # write_through is set by python -u
            raw = _LastingFile(descriptor, name, needs_reader=needs_reader)
            file = raw if unbuffered else io.BufferedWriter(raw)
            kind = {"line_buffering": lines, "write_through": unbuffered}
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, "backslashreplace", **kind))


@contextmanager
def until_output_closes() -> Iterator[None]:
    """Exit silently when the reader of the output closes the pipe, as in ``train.py --help | head -1``."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise  # stdout and stderr are open, so another pipe broke
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in closed:
            os.dup2(nothing, stream.fileno())  # Python flushes the remaining buffer there at exit
        sys.exit(_BROKEN_PIPE)


def _is_closed(stream: TextIO) -> bool:
    """Return whether ``stream`` is a pipe whose reading end is closed."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # not a file
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for messages: "rank 5", "ranks 0-4, 6-63"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {abbreviate_ranks(ranks)}"


def abbreviate_ranks(ranks: Sequence[int]) -> str:
    """Abbreviate a list of ranks: "0-3, 8", or "0, 8 .. 56" for equally spaced ranks."""
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
