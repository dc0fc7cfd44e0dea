"""Makes a sentence of whatever goes wrong where the files of a run are read, which others may have written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldsize.errors import WorldsizeError


@contextmanager
def reading(run: Path) -> Iterator[None]:
    """Blame the record of ``run`` for an error that what is in it has led to.

    Raises:
        WorldsizeError: a file cannot be read, or holds what no run writes.
    """
    try:
        yield
    except OSError as error:
        raise WorldsizeError(f"{error.filename or run} cannot be read: {error.strerror or error}.") from error
    except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise WorldsizeError(f"the record of {run} is damaged ({kind}). Take it from a copy of the run.") from error
