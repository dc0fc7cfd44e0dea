"""Every collective that is started is known from then on, since whoever frees its group waits for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FILES = [path for folder in ("framework/worldsize", "plugins") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
STARTS = ("isend", "irecv", "batch_isend_irecv")
KNOWN = ("started", "wait")  # of worldsize.collectives.step_timer


def starts(node: ast.AST) -> bool:
    """Return whether ``node`` is a call that starts a collective and does not wait for it."""
    if not isinstance(node, ast.Call):
        return False
    is_async = any(
        each.arg == "async_op" and isinstance(each.value, ast.Constant) and each.value.value is True
        for each in node.keywords
    )
    return is_async or (isinstance(node.func, ast.Attribute) and node.func.attr in STARTS)


def unknown(source: str) -> Iterator[int]:
    """Yield the lines at which a collective is started that is not handed to one of the functions directly."""
    nodes = list(ast.walk(ast.parse(source)))
    handed = {
        id(node.args[0])
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KNOWN and node.args
    }
    for node in nodes:
        if starts(node) and id(node) not in handed:
            yield getattr(node, "lineno", 0)


def test_every_collective_that_is_started_is_known_from_then_on() -> None:
    places = [f"{path.relative_to(REPOSITORY)}:{line}" for path in FILES for line in unknown(path.read_text())]
    assert places == [], "write started(dist.…(…, async_op=True))"


def test_a_collective_that_is_not_handed_on_at_once_is_found() -> None:
    known = ["work = started(dist.all_reduce(row_n, async_op=True))", "wait(dist.broadcast(row_n, async_op=True))"]
    lost = ["work = dist.all_reduce(row_n, async_op=True)", "work = dist.isend(row_n, 1)", "keep([f(async_op=True)])"]
    assert [[*unknown(each)] for each in (*known, *lost)] == [[], [], [1], [1], [1]]
