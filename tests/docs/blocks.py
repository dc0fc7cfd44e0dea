"""Find the documentation's commands: fenced blocks of bash, and inline code that starts with uv run.

A comment before a fence selects how its commands are tested; by default they run as they are, only shorter.

    <!-- test: show -->       rendered with launch=show, because they need a cloud or GPUs
    <!-- test: slurm -->      run on the tests' own Slurm
    <!-- test: hosts -->      run on two hosts that are network namespaces
    <!-- test: live -->       run while a run with a parameter server trains
    <!-- test: project -->    run in a separate project, see tests/clusters/test_own_project.py
    <!-- test: exists -->     not run, since they take minutes or need earlier results: their scripts must exist
    <!-- test: exit=75 -->    run, and the block exits with this code

The output of the commands contains the ``text`` block right after them; ``...`` stands for anything. A block after
a path in backticks and a colon is that file of the reader's project, whole, as a reader pastes it.
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
_FILE = re.compile(r"`(?P<path>[\w./]+\.\w+)`:\n\n```\w+\n(?P<text>.*?)^```", re.M | re.S)
_ANY_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_INLINE = re.compile(r"`(uv run (?:train\.py|worldsize)[^`]*)`")


@dataclass(frozen=True)
class Block:
    """Commands of one block.

    Attributes:
        place: file and line.
        text: the commands for bash.
        how: how they are tested, one of ``HOWS``.
        code: exit code of the block.
        says: output that the page shows.
    """

    place: str
    text: str
    how: str = "run"
    code: int = 0
    says: str = ""


def pages() -> list[Path]:
    """Return every page that shows commands, the README first."""
    others = [*REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("recipes/*/README.md")]
    return [REPOSITORY / "README.md", *sorted([*others, *REPOSITORY.glob("plugins/*/README.md")])]


def blocks(page: Path) -> list[Block]:
    return [*_fenced(page), *_inline(page)]


def files(page: Path) -> dict[str, str]:
    """Return the files that the page instructs its reader to write, by path."""
    return {match["path"]: match["text"] for match in _FILE.finditer(page.read_text())}


def _fenced(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        words = (match["how"] or "run").split()
        code = sum(int(word.removeprefix("exit=")) for word in words if word.startswith("exit="))
        how = " ".join(word for word in words if not word.startswith("exit=")) or "run"
        place = f"{page.relative_to(REPOSITORY)}:{text[: match.start('text')].count(chr(10)) + 1}"
        assert how in HOWS, f"{place}: {how}"
        yield Block(place, match["text"], how, code, match["says"] or "")


def _inline(page: Path) -> Iterator[Block]:
    text = _ANY_FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    for match in _INLINE.finditer(text):
        if "..." not in match[1]:  # otherwise a pattern, not a command
            place = f"{page.relative_to(REPOSITORY)}:{text[: match.start()].count(chr(10)) + 1}"
            yield Block(place, " ".join(match[1].split()) + "\n")
