"""Files with a JSON object a line, read while they grow and whatever has become of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from worldsize.strict_json import parse

Row = dict[str, Any]
_LONGEST = 16 << 20  # bytes of a line


def row_of(line: bytes) -> Row | None:
    """Parse a line; None if it is no JSON object."""
    try:
        row = parse(line, at_most=_LONGEST)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def is_number(value: Any) -> bool:
    """Return whether a value is a number as we write it: infinities and NaN are words."""
    return type(value) in (int, float) or value in ("nan", "inf", "-inf")


def complete_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines from byte ``start`` on that have an end, one at a time; none if there is no such file.

    A last line without an end is being written, or was when its writer was killed.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        while (line := file.readline(_LONGEST)).endswith(b"\n"):
            yield line


@final
class Rows:
    """The objects in a file, in order; lines that are none, or none that ``is_valid``, are left out and counted.

    A file of more than ``at_most`` lines is thinned: every k-th line is parsed, besides the last one and those that
    contain ``keep``, so that neither time nor memory grows with a long run.

    Attributes:
        damaged: lines left out so far
        every: k, known once the reading has begun
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
        for number, line in enumerate(complete_lines(self._path)):
            if number % self.every and number != last and not (self._keep and self._keep in line):
                self.damaged += not (line.startswith(b"{") and line.endswith(b"}\n"))
            elif (row := row_of(line)) is None or not self._is_valid(row):
                self.damaged += 1
            else:
                yield row
