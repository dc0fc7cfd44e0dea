"""Ranges of sizes are parsed, and a payload limit is found, as computed by hand."""

from __future__ import annotations

import math

import pytest

from worldsize.core import ConfigError
from worldsize.plan.curve import payload_limit, sizes_in


@pytest.mark.parametrize(
    ("text", "sizes"), [("1..64", [1, 2, 4, 8, 16, 32, 64]), ("3..20", [3, 6, 12, 20]), ("5..5", [5]), ("1..2", [1, 2])]
)
def test_a_range_is_its_first_size_the_doubles_and_the_last(text: str, sizes: list[int]) -> None:
    words, sized = sizes_in(["recipe=digits", f"cluster.nodes={text}", "lr=1"])
    assert words == ["recipe=digits", f"cluster.nodes={sizes[0]}", "lr=1"]
    assert sized == [f"cluster.nodes={size}" for size in sizes]


def test_without_a_range_words_stay() -> None:
    assert sizes_in(["cluster.nodes=4", "run.name=a..b"]) == (["cluster.nodes=4", "run.name=a..b"], None)


@pytest.mark.parametrize(
    "words", [["cluster.nodes=4..1"], ["cluster.nodes=..4"], ["cluster.nodes=1..2", "cluster.processes=1..2"]]
)
def test_what_is_no_range_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"expected one range of sizes, e.g. cluster.nodes=1..64, got "):
        sizes_in(words)


def test_the_limit_is_where_the_efficiency_is_the_wanted_one() -> None:
    """A step of 1 s of compute that sends b bytes at 1 GB/s has the efficiency 1 / (1 + b / 1e9)."""
    assert payload_limit(lambda payload: 1 / (1 + payload / 1e9), 0.5) == pytest.approx(1e9, rel=1e-3)
    assert payload_limit(lambda payload: 1 / (1 + payload / 1e9), 0.8) == pytest.approx(0.25e9, rel=1e-3)
    assert payload_limit(lambda payload: 0.4, 0.5) == 0
    assert payload_limit(lambda payload: 0.6, 0.5) == math.inf
