"""Every background collective is registered at its start, since its group is freed after it ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FILES = [path for folder in ("framework/worldsize", "plugins") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
STARTS = ("isend", "irecv", "batch_isend_irecv")


def starts(source: str) -> Iterator[int]:
    """Yield the lines that start a torch collective without waiting for it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            is_async = any(each.arg == "async_op" and ast.unparse(each.value) == "True" for each in node.keywords)
            if is_async or (isinstance(node.func, ast.Attribute) and node.func.attr in STARTS):
                yield node.lineno


def test_every_collective_in_the_background_is_started_by_one_function() -> None:
    places = [f"{path.relative_to(REPOSITORY)}:{line}" for path in FILES for line in starts(path.read_text())]
    assert places == [], "write start(dist.…, …) of worldsize.collectives.group"


def test_a_collective_that_is_started_otherwise_is_found() -> None:
    known = ["work = start(dist.all_reduce, row_n)", "dist.all_reduce(row_n)"]
    lost = ["work = dist.all_reduce(row_n, async_op=True)", "work = dist.isend(row_n, 1)", "keep([f(async_op=True)])"]
    assert [[*starts(each)] for each in (*known, *lost)] == [[], [], [1], [1], [1]]
