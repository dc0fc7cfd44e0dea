"""English that ships inside the Python distribution: the language reference and the standard library's docstrings."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy
from numpy.typing import NDArray

_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)  # to parse the modules would take many seconds
_SKIPPED = {"test", "tests", "idle_test", "lib2to3", "site-packages"}
_WORD = re.compile(r"[a-z]+")


def library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def sources() -> list[Path]:
    """The library's modules and those of its packages, sorted; tests and what Python's build made left out."""
    found = [*library().glob("*.py"), *library().glob("[a-z]*[a-z]/*.py")]
    return sorted(path for path in found if path.parent.name not in _SKIPPED and not path.name.startswith("_sysc"))


@lru_cache(maxsize=1)
def texts() -> tuple[str, ...]:
    """One text a topic of the language reference, then one a docstring."""
    from pydoc_data.topics import topics

    found = [topics[name] for name in sorted(topics)]
    for path in sources():
        found += _DOCSTRING.findall(path.read_text(encoding="utf-8", errors="replace"))
    return tuple(found)


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def vocabulary(pages: Sequence[Sequence[str]], min_count: int) -> dict[str, int]:
    """Words by how often they occur, most frequent first, and their counts."""
    counts = Counter(word for page in pages for word in page)
    kept = [(word, count) for word, count in counts.items() if count >= min_count]
    return dict(sorted(kept, key=lambda pair: (-pair[1], pair[0])))


def pairs(pages: Sequence[NDArray[numpy.int32]], window: int, seed: int) -> NDArray[numpy.int32]:
    """[n, 2]: each word with each one at most r words away in its text, r drawn from 1 to ``window`` for each word."""
    tokens = numpy.concatenate([numpy.concatenate([page, numpy.full(window, -1, numpy.int32)]) for page in pages])
    reach = numpy.random.RandomState(seed).randint(1, window + 1, len(tokens))
    found = []
    for offset in range(1, window + 1):
        for center, context, far in (
            (tokens[offset:], tokens[:-offset], reach[offset:]),
            (tokens[:-offset], tokens[offset:], reach[:-offset]),
        ):
            kept = (center >= 0) & (context >= 0) & (far >= offset)
            found.append(numpy.stack([center[kept], context[kept]], axis=1))
    return numpy.concatenate(found)
