"""A mesh continues without its dead, in whole blocks of the ranks that train one part of the data together."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.faults.test_healing import faults, kill, memberships
from tests.faults.test_healing_of_shards import EQUAL, NO_FILE, SLOW, result_of

pytestmark = pytest.mark.heavy

SIZES = ("recipe.width=16", "recipe.depth=2", "recipe.heads=2", "recipe.context=32", "recipe.test_bytes=2000")
PACE = ("steps=12", "batch_size=16", "log_every=3", "evaluate_every=6", "cluster.threads=1")
NUMERICS = ("reproducibility=elastic", "logical_tensor=2", "logical_context=2")
ELASTIC = ("recipe=stdlib_lm", *SIZES, *PACE, "recipe.dropout=0.1", *NUMERICS)
MESH = (*ELASTIC, "strategy=mesh", "strategy.on_failure=heal")
HEAL = (*MESH, *NO_FILE)
TENSOR, CONTEXT, PIPELINE = "strategy.tensor=2", "strategy.context=2", "strategy.pipeline=2"


@pytest.fixture
def undisturbed(reference_run: Any) -> Callable[..., dict[str, Any]]:
    """``undisturbed(*options)`` is the result of one process that is never killed."""

    def run(*options: str) -> dict[str, Any]:
        result = reference_run(*ELASTIC, *NO_FILE, "strategy=single", "cluster.processes=1", *options).json(
            "result.json"
        )
        return {key: result[key] for key in EQUAL}

    return run


@pytest.mark.parametrize("axis", [TENSOR, CONTEXT])
def test_one_of_the_survivors_waits_until_another_joins(train: Any, undisturbed: Any, axis: str) -> None:
    """2 × 2, then 1 × 2 with one rank waiting, then 2 × 2 with it again; then the logging process dies, too."""
    planted = faults(kill(1, 5), kill(0, 18, attempt=None), SLOW)
    options = ("steps=26", "launcher.max_restarts=1", "cluster.processes=4", "recipe.depth=1")
    run = train(*HEAL, axis, *options, planted)
    assert result_of(run) == undisturbed("steps=26", "recipe.depth=1")
    sizes = [len(members) for members in memberships(run.folder)]
    assert memberships(run.folder)[0] == [0, 1, 2, 3]
    assert sizes[:3] == [4, 2, 4]
    assert set(sizes) == {2, 4}


def test_a_stage_that_waits_for_a_dead_one_or_for_one_that_hangs_goes_on(train: Any, undisturbed: Any) -> None:
    """3 replicas of 2 stages each, then 2 with 5 and 4 logical ranks; after the second loss, waiting ranks join."""
    hang = {"action": "stop", "rank": 0, "step": 9}
    ranks = ("logical_ranks=9", "batch_size=18")
    options = (*ranks, "cluster.processes=6", "cluster.timeout=6")
    run = train(*HEAL, PIPELINE, *options, faults(kill(4, 5), hang))
    assert result_of(run) == undisturbed(*ranks)
    assert [len(members) for members in memberships(run.folder)] == [6, 4, 4]
    assert run.error.count("worker 0 is not responding; continuing without it") == 1


def test_ranks_with_several_stages_go_on_in_another_number_of_parts_than_they_began_with(
    train: Any, undisturbed: Any
) -> None:
    """2 parts with 5 and 4 logical ranks: neither is a whole number of rounds, and the second has an idle pass."""
    looped = (PIPELINE, "strategy.schedule=zero_bubble")
    ranks = ("logical_ranks=9", "batch_size=18", "steps=8")
    run = train(*HEAL, *looped, *ranks, "strategy.data=3", "cluster.processes=6", faults(kill(3, 5)))
    assert result_of(run) == undisturbed(*ranks)
    assert [len(members) for members in memberships(run.folder)] == [6, 4]
    assert "Full Schedule" not in run.error + run.output


def test_the_survivors_take_another_shape_if_fewer_of_them_wait(train: Any, undisturbed: Any) -> None:
    """2 × 2 × 2, then 3 × 1 × 2 and a spare that replaces the next one, then 1 × 2 × 2 and a spare."""
    planted = faults(kill(1, 1), kill(2, 8), kill(4, 12), SLOW)
    options = ("cluster.processes=8", "steps=16", "strategy.heal_shapes=[{tensor:1}]")
    run = train(*HEAL, TENSOR, PIPELINE, *options, planted)
    assert result_of(run) == undisturbed("steps=16")
    assert [len(members) for members in memberships(run.folder)] == [8, 6, 6, 4]
    assert "training continues with 6 workers (pipeline 2 × data 3 × tensor 1)" in run.output + run.error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_each_kill_changes_the_shape_and_not_the_result(train: Any, undisturbed: Any, seed: int) -> None:
    draw = Random(seed)
    first = draw.choice(
        [{"tensor": 2, "context": 2}, {"tensor": 2, "pipeline": 2}, {"context": 2, "pipeline": 2}, {"pipeline": 4}]
    )
    pair = {draw.choice(("tensor", "context", "pipeline")): 2}
    shapes = [dict.fromkeys(("tensor", "context", "pipeline"), 1) | shape for shape in (pair, {})]
    given = ", ".join("{" + ", ".join(f"{axis}: {size}" for axis, size in shape.items()) + "}" for shape in shapes)
    axes = [f"strategy.{axis}={size}" for axis, size in first.items()]
    kills = [kill(rank, step) for rank, step in zip(draw.sample(range(8), 2), (draw.randint(1, 4), 8), strict=True)]
    run = train(*HEAL, *axes, f"strategy.heal_shapes=[{given}]", "cluster.processes=8", faults(*kills, SLOW))
    assert result_of(run) == undisturbed()
    assert [len(members) for members in memberships(run.folder)] == [8, 7, 6]


@pytest.mark.slow
def test_all_that_train_one_part_of_the_data_may_die_at_once(train: Any, undisturbed: Any) -> None:
    """2 data-parallel parts of 2 × 2 ranks: each keeps its copies in the other's memory."""
    options = ("cluster.processes=8", "steps=8")
    run = train(*HEAL, TENSOR, PIPELINE, *options, faults(*(kill(rank, 5) for rank in (0, 1, 4, 5))))
    assert result_of(run) == undisturbed("steps=8")
    assert sorted(memberships(run.folder)[-1]) == [2, 3, 6, 7]


@pytest.mark.slow
def test_less_than_a_block_starts_again_from_the_checkpoint(train: Any, undisturbed: Any) -> None:
    options = ("checkpoint.every=4", "launcher.max_restarts=1", "cluster.processes=2")
    run = train(*MESH, TENSOR, *options, faults(kill(1, 7)))
    assert run.code == 0, run.error
    attempts = run.json("run_manifest.json")["attempts"]
    assert [attempt["exit_reason"] for attempt in attempts] == ["failed", "completed"]
    result = run.json("result.json")
    assert {key: result[key] for key in EQUAL} == undisturbed()
