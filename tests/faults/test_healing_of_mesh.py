"""A mesh goes on without its dead, in whole blocks of the ranks that train one part of the data together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.test_healing import faults, kill, memberships
from tests.faults.test_healing_of_shards import EQUAL, NO_FILE, SLOW, result_of

SIZES = ("recipe.width=16", "recipe.depth=2", "recipe.heads=2", "recipe.context=32", "recipe.test_bytes=2000")
PACE = ("steps=16", "batch_size=16", "log_every=3", "evaluate_every=8", "cluster.threads=1")
ELASTIC = ("recipe=stdlib_lm", *SIZES, *PACE, "reproducibility=elastic", "strategy=mesh")
HEAL = ("strategy.on_failure=heal", *NO_FILE)
TENSOR = "strategy.tensor=2"


@pytest.fixture
def undisturbed(reference_run: Any) -> Callable[..., dict[str, Any]]:
    """``undisturbed(*options)`` is the result of one block of processes that nobody kills."""

    def run(*options: str) -> dict[str, Any]:
        result = reference_run(*ELASTIC, *NO_FILE, "cluster.processes=2", *options).json("result.json")
        return {key: result[key] for key in EQUAL}

    return run


def test_one_of_the_survivors_waits_until_another_joins(train: Any, undisturbed: Any) -> None:
    """2 × 2, then 1 × 2 and one that waits, then 2 × 2 with it again, then 1 × 2."""
    planted = faults(kill(1, 5), kill(0, 24, attempt=None), SLOW)
    options = ("steps=36", "launcher.max_restarts=1", "cluster.processes=4")
    run = train(*ELASTIC, TENSOR, *HEAL, *options, planted)
    assert result_of(run) == undisturbed(TENSOR, "steps=36")
    assert memberships(run.folder)[0] == [0, 1, 2, 3]
