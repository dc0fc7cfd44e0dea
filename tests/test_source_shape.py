"""The sources keep their shape: the figures in ``tests/source_shape.toml`` only fall."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source_shape import (
    FILE,
    Sources,
    bounds,
    classes_named_twice,
    figures,
    private_names,
    reached_by_entry_points,
    sources,
)

ONE = """
import x
def begin():
    _help()
    far()

def _help():
    ends()

class A: ...
"""
TWO = """
from x import _own
def far():
    self._kept = rank._kept

def ends(): ...
class A: ...
"""
SMALL = Sources({Path("a/one.py"): ONE, Path("b/two.py"): TWO})


@pytest.mark.parametrize("name", figures(SMALL))
def test_no_figure_rises(name: str, now: dict[str, float]) -> None:
    assert now[name] <= bounds()[name], f"shorten or merge; a count may rise with a reason in {FILE.name}"


@pytest.fixture(scope="module")
def now() -> dict[str, float]:
    return figures(sources())


def test_calls_are_followed_by_name_and_private_ones_within_their_file() -> None:
    assert list(reached_by_entry_points(SMALL.trees)) == [(3, 2)]


def test_private_names_of_others_and_classes_named_twice_are_counted() -> None:
    assert [name for _, _, name in private_names(SMALL.nodes)] == ["_own", "_kept"]
    assert classes_named_twice(SMALL.nodes) == ["A"]
