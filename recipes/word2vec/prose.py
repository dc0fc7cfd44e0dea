"""English prose shipped with Python: the language reference and library docstrings."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy
from numpy.typing import NDArray

_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)  # parsing the modules would take many seconds
_SKIPPED = {"test", "tests", "idle_test", "lib2to3", "site-packages"}
_WORD = re.compile(r"[a-z]+")


def find_library() -> Path:
    """Return the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def list_modules() -> list[Path]:
    """Return the standard library's modules, sorted, without tests and generated files."""
    modules = [*find_library().glob("*.py"), *find_library().glob("[a-z]*[a-z]/*.py")]
    return sorted(path for path in modules if path.parent.name not in _SKIPPED and not path.name.startswith("_sysc"))


@lru_cache(maxsize=1)
def read_texts() -> tuple[str, ...]:
    """Return one text per topic of the language reference, then one per docstring."""
    from pydoc_data.topics import topics

    prose = [topics[name] for name in sorted(topics)]
    for path in list_modules():
        prose += _DOCSTRING.findall(path.read_text(encoding="utf-8", errors="replace"))
    return tuple(prose)


def split_words(text: str) -> list[str]:
    """Split a text into words, converted to lower case."""
    return _WORD.findall(text.lower())


def vocabulary(pages: Sequence[Sequence[str]], min_count: int) -> dict[str, int]:
    """Return word counts, most frequent first, of words that occur at least ``min_count`` times."""
    counts = Counter(word for page in pages for word in page)
    kept = [(word, count) for word, count in counts.items() if count >= min_count]
    return dict(sorted(kept, key=lambda pair: (-pair[1], pair[0])))


def pair_words(pages: Sequence[NDArray[numpy.int32]], window: int, seed: int) -> NDArray[numpy.int32]:
    """Pair each word with its neighbors; return ids int32 (n, 2).

    Neighbors are at most r words apart in the same text, with r sampled from 1 to ``window`` for each word.
    """
    tokens = numpy.concatenate([numpy.concatenate([page, numpy.full(window, -1, numpy.int32)]) for page in pages])
    reach = numpy.random.RandomState(seed).randint(1, window + 1, len(tokens))
    blocks = []
    for offset in range(1, window + 1):
        for center, context, far in (
            (tokens[offset:], tokens[:-offset], reach[offset:]),
            (tokens[:-offset], tokens[offset:], reach[:-offset]),
        ):
            kept = (center >= 0) & (context >= 0) & (far >= offset)
            blocks.append(numpy.stack([center[kept], context[kept]], axis=1))
    return numpy.concatenate(blocks)
