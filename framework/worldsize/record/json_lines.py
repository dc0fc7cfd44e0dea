"""Read JSON-lines files, including files that are still being written or are damaged.

:func:`wrap_read_errors` converts errors in a run's files, which may be from other users, to one-sentence messages.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from worldsize.errors import WorldsizeError
from worldsize.files import open_regular
from worldsize.strict_json import parse_strict_json

Row = dict[str, Any]
_LONGEST = 16 << 20  # maximum bytes per line

_logger = logging.getLogger(__name__)


def parse_row(line: bytes) -> Row | None:
    """Parse a line; return None if it is not a JSON object."""
    try:
        row = parse_strict_json(line, at_most=_LONGEST)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def is_number(value: Any) -> bool:
    """Return whether a value is a JSON number or one of the strings "nan", "inf" and "-inf"."""
    return type(value) in (int, float) or value in ("nan", "inf", "-inf")


def complete_lines(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield each complete line from byte ``start`` on, and the byte offset of the next line.

    A missing file counts as empty. A last line without a newline is skipped, since it is still being written or its
    writer was killed. A line longer than 16 MiB is yielded as an empty, and thus invalid, line.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    try:
        file = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    with file:
        file.seek(start)
        end, is_long = start, False
        while piece := file.readline(_LONGEST):
            end += len(piece)
            if piece.endswith(b"\n"):
                yield b"" if is_long else piece, end
                is_long = False
            elif len(piece) == _LONGEST:
                is_long = True
            else:
                return


def drop_lines(path: Path, *, is_valid: Callable[[Row], bool], is_kept: Callable[[Row], bool]) -> None:
    """Rewrite the file with only the rows for which ``is_kept`` returns True.

    An incomplete last line is dropped. Damaged lines are dropped with a warning.
    """
    kept, end, damaged = 0, 0, 0  # kept: bytes before the first dropped line
    later: list[bytes] = []  # lines to keep after the first dropped line
    for line, following in complete_lines(path):
        row = parse_row(line)
        if row is None or not is_valid(row):
            damaged += 1
        elif is_kept(row):
            if kept == end:
                kept = following
            else:
                later.append(line)
        end = following
    if damaged:
        _logger.warning("skipped %d damaged lines in %s.", damaged, path)
    if path.exists() and kept < path.stat().st_size:
        rewritten = path.with_name(f".{path.name}")
        shutil.copyfile(path, rewritten)
        os.truncate(rewritten, kept)
        with rewritten.open("ab") as file:
            file.writelines(later)
        rewritten.replace(path)


def last_line(path: Path, *, within: int) -> bytes:
    """Return the last line, read from the last ``within`` bytes; empty if it is incomplete.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - within))
        end = file.read()
    return end[end.rfind(b"\n", 0, -1) + 1 :] if end.endswith(b"\n") else b""


@final
class JsonRows:
    """Iterable over the valid JSON objects in a file; other lines are skipped and counted.

    In a file with more than ``at_most`` lines, only one line in ``every``, the last line and lines that contain
    ``keep`` are parsed, so that time and memory stay bounded for long runs.

    Attributes:
        damaged: number of invalid lines so far
        every: interval between parsed lines, set when iteration begins
    """

    def __init__(
        self,
        path: Path,
        *,
        is_valid: Callable[[Row], bool] = lambda row: True,
        at_most: int | None = None,
        keep: bytes | None = None,
    ) -> None:
        self._path, self._is_valid, self._at_most, self._keep = path, is_valid, at_most, keep
        self.damaged, self.every = 0, 1

    def __iter__(self) -> Iterator[Row]:
        self.damaged, last = 0, -1
        if self._at_most:
            last = sum(1 for _ in complete_lines(self._path)) - 1
            self.every = math.ceil((last + 1) / self._at_most) or 1
        for number, (line, _) in enumerate(complete_lines(self._path)):
            if number % self.every and number != last and not (self._keep and self._keep in line):
                self.damaged += not (line.startswith(b"{") and line.endswith(b"}\n"))
            elif (row := parse_row(line)) is None or not self._is_valid(row):
                self.damaged += 1
            else:
                yield row


@contextmanager
def wrap_read_errors(run: Path) -> Iterator[None]:
    """Convert errors within the block to an error about the record of ``run``.

    Raises:
        WorldsizeError: a file cannot be read, or its content is invalid.
    """
    try:
        yield
    except OSError as error:
        raise WorldsizeError(f"{error.filename or run} cannot be read: {error.strerror or error}.") from error
    except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise WorldsizeError(f"the record of {run} is damaged ({kind}). Restore it from a copy of the run.") from error
