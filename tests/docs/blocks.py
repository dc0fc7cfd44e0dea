"""The commands that the documentation shows: fenced blocks of bash, and code inside a line that starts with uv run.

A comment before a fence says how its commands are tried; without one they are run as they stand, only shorter.

    <!-- test: show -->       rendered, with launch=show: they need a cloud, or GPUs
    <!-- test: slurm -->      on the tests' own Slurm
    <!-- test: hosts -->      on two hosts that are network namespaces
    <!-- test: live -->       while a run with a parameter server is being trained
    <!-- test: project -->    in a project of one's own, see tests/clusters/test_own_project.py
    <!-- test: exists -->     not run, as it takes minutes, or what was made before: its scripts are there
    <!-- test: exit=75 -->    the block ends with this code

What a ``text`` block right after them shows is in their output; ``...`` stands for anything. A block of Python or YAML
whose first line is a comment with a path is that file of the reader's project.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
HOWS = ("run", "show", "slurm", "hosts", "live", "project", "exists")
_FENCE = re.compile(
    r"(?:^<!-- test: (?P<how>[^\n]*) -->\n)?^```bash[^\n]*\n(?P<text>.*?)^```\n(?:\n```text\n(?P<says>.*?)^```)?",
    re.M | re.S,
)
_FILE = re.compile(r"^```(?:python|yaml)\n# (?P<path>[\w./]+\.(?:py|yaml))\n(?P<text>.*?)^```", re.M | re.S)
_ANY_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_INLINE = re.compile(r"`(uv run (?:train\.py|worldsize)[^`]*)`")


@dataclass(frozen=True)
class Block:
    """``text`` is given to bash, which says ``says``; ``place``: file and line."""

    place: str
    text: str
    how: str = "run"
    code: int = 0
    says: str = ""


def pages() -> list[Path]:
    """Every page that shows commands, the one that most people read first."""
    found = [*REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("recipes/*/README.md")]
    return [REPOSITORY / "README.md", *sorted([*found, *REPOSITORY.glob("plugins/*/README.md")])]


def blocks(page: Path) -> list[Block]:
    return [*_fenced(page), *_inline(page)]


def files(page: Path) -> dict[str, str]:
    """What the page tells its reader to write, by path."""
    return {found["path"]: found["text"] for found in _FILE.finditer(page.read_text())}


def _fenced(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        words = (found["how"] or "run").split()
        code = sum(int(word.removeprefix("exit=")) for word in words if word.startswith("exit="))
        how = " ".join(word for word in words if not word.startswith("exit=")) or "run"
        place = f"{page.relative_to(REPOSITORY)}:{text[: found.start('text')].count(chr(10)) + 1}"
        assert how in HOWS, f"{place}: {how}"
        yield Block(place, found["text"], how, code, found["says"] or "")


def _inline(page: Path) -> Iterator[Block]:
    text = _ANY_FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())
    for found in _INLINE.finditer(text):
        if "..." not in found[1]:  # a pattern, not a command
            place = f"{page.relative_to(REPOSITORY)}:{text[: found.start()].count(chr(10)) + 1}"
            yield Block(place, " ".join(found[1].split()) + "\n")
