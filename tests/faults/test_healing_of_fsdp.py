"""A gang whose processes shard the model continues without its dead, with one copy of the model or several."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.test_healing import FOUR, OPTIONS, equal_parts, faults, kill, memberships
from tests.faults.test_healing_of_shards import EQUAL, NO_FILE, SLOW, result_of, steps_of_changes, undisturbed

pytestmark = pytest.mark.heavy

__all__ = ["undisturbed"]  # a fixture

FSDP = ("strategy=fsdp", "strategy.on_failure=heal", "clip_norm=0.5")
HYBRID = (*FSDP, "strategy.shard=2")


@pytest.mark.parametrize("options", [FSDP, HYBRID], ids=["one copy", "two copies"])
def test_kills_cost_at_most_the_steps_since_the_copies_and_no_bit(
    train: Any, undisturbed: Any, options: tuple[str, ...]
) -> None:
    """The logging process dies, then a second one; there is no file to read."""
    run = train(*OPTIONS, *FOUR, *options, *NO_FILE, "checkpoint.peers=3", faults(kill(0, 8), kill(2, 18)))
    assert result_of(run) == undisturbed("clip_norm=0.5")
    assert memberships(run.folder) == [[0, 1, 2, 3], [1, 2, 3], [1, 3]]
    for killed, step in zip((8, 18), steps_of_changes(run), strict=True):
        assert killed - 1 - 3 <= step <= killed - 1


@pytest.mark.parametrize(
    ("options", "dead"), [(FSDP, (0, 2)), (HYBRID, (0, 1))], ids=["no peers", "a whole copy of the model"]
)
def test_two_may_die_at_once_and_the_last_one_has_everything(
    train: Any, undisturbed: Any, options: tuple[str, ...], dead: tuple[int, int]
) -> None:
    planted = faults(kill(dead[0], 6), kill(dead[1], 6), kill(3, 15))
    run = train(*OPTIONS, *FOUR, *options, *NO_FILE, planted)
    assert result_of(run) == undisturbed("clip_norm=0.5")
    assert len(memberships(run.folder)[-1]) == 1


@pytest.mark.parametrize("options", [FSDP, HYBRID], ids=["one copy", "two copies"])
def test_a_kill_during_an_evaluation_and_another_in_a_save_cost_neither(
    train: Any, undisturbed: Any, options: tuple[str, ...]
) -> None:
    planted = faults(kill(0, 8, point="evaluate:begin"), kill(1, 18, point="checkpoint:in-shard"))
    run = train(*OPTIONS, *FOUR, *options, planted)
    assert run.code == 0, run.error
    actual = equal_parts(run.folder)
    assert {key: actual[key] for key in EQUAL} == undisturbed("clip_norm=0.5")
    assert actual["step"] == 24


def test_those_that_join_get_their_shards_from_their_peers(train: Any, undisturbed: Any) -> None:
    """Four processes again, some in different places than before; they save their new shards."""
    options = ("cluster.spares=1", "launcher.max_restarts=2", "checkpoint.every=4", "steps=36")
    run = train(*OPTIONS, *FOUR, *FSDP, *options, faults(kill(1, 8), kill(0, 24), SLOW))
    assert run.code == 0, run.error
    actual = equal_parts(run.folder)
    assert {key: actual[key] for key in EQUAL} == undisturbed("clip_norm=0.5", "steps=36")
    assert actual["step"] == 36
    assert len(memberships(run.folder)[-1]) == 4


@pytest.mark.parametrize("shard", ["all", "2"])
def test_a_seeded_run_of_uneven_parts_trains_alike_and_promises_no_bits(
    train: Any, reference_run: Any, shard: str
) -> None:
    seeded = ("cluster.processes=4", "logical_ranks=8", "reproducibility=deterministic", *NO_FILE)
    run = train(*OPTIONS, *seeded, *FSDP, f"strategy.shard={shard}", faults(kill(1, 10)))
    assert run.code == 0, run.error
    alone = reference_run(*OPTIONS, *seeded, "strategy=single", "cluster.processes=1", "clip_norm=0.5")
    expected = alone.json("result.json")
    assert run.json("result.json")["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-3)
    promise = run.json("run_manifest.json")["reproducibility"]
    assert promise["level"] == "tolerance"
    assert f"3 processes trained from step {steps_of_changes(run)[0] + 1}" in promise["why"]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [("checkpoint.peers=0", "checkpoint.peers=1"), ("strategy.accumulate=sharded", "strategy.accumulate=whole")],
)
def test_what_would_lose_shards_or_bits_is_refused_before_the_start(train: Any, options: str, remedy: str) -> None:
    run = train(*OPTIONS[:1], *FOUR[:2], *FSDP, options)
    assert run.code == 2
    assert remedy in run.error
    assert run.folder is None
