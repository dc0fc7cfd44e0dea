"""Turns errors of reading a run's files, which other users may have written, into one-sentence messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldsize.errors import WorldsizeError


@contextmanager
def reading(run: Path) -> Iterator[None]:
    """Convert errors inside the context to an error about the record of ``run``.

    Raises:
        WorldsizeError: a file cannot be read, or has contents that no run writes.
    """
    try:
        yield
    except OSError as error:
        raise WorldsizeError(f"{error.filename or run} cannot be read: {error.strerror or error}.") from error
    except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise WorldsizeError(f"the record of {run} is damaged ({kind}). Take it from a copy of the run.") from error
