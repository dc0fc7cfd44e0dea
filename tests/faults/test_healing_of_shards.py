"""A gang of processes that hold shards continues without its dead: each shard has a copy in a peer's memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.test_healing import FOUR, OPTIONS, equal_parts, faults, kill, memberships

pytestmark = pytest.mark.heavy

ZERO = ("strategy=zero", "strategy.on_failure=heal")
NO_FILE = ("checkpoint.every=0", "checkpoint.at_end=false")  # no file to heal from
EQUAL = ("state_digest", "metrics_digest", "metrics", "steps", "samples")
SLOW = {"action": "sleep", "rank": None, "step": None, "seconds": 0.05, "attempt": None}


@pytest.fixture
def undisturbed(reference_run: Any) -> Callable[..., dict[str, Any]]:
    """``undisturbed(*options)`` is the result of one process that is never killed."""

    def run(*options: str) -> dict[str, Any]:
        alone = reference_run(*OPTIONS, *FOUR, "strategy=single", "cluster.processes=1", *NO_FILE, *options)
        result = alone.json("result.json")
        return {key: result[key] for key in EQUAL}

    return run


def result_of(run: Any) -> dict[str, Any]:
    assert run.code == 0, run.error
    assert not list(run.folder.glob("checkpoints/*"))
    result = run.json("result.json")
    return {key: result[key] for key in EQUAL}


def steps_of_changes(run: Any) -> list[int]:
    """Return the step where the gang continued after each of its changes."""
    rows = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["event"] == "membership"]  # a machine may raise alerts, too


@pytest.mark.parametrize("every", [1, 5])
def test_kills_at_random_steps_cost_at_most_the_steps_since_the_copies(
    train: Any, undisturbed: Any, every: int
) -> None:
    chance = random.Random(every)
    dead, first, second = chance.sample(range(4), 2), chance.randrange(2, 12), chance.randrange(13, 24)
    planted = faults(kill(dead[0], first), kill(dead[1], second))
    run = train(*OPTIONS, *FOUR, *ZERO, *NO_FILE, f"checkpoint.peers={every}", planted)
    assert result_of(run) == undisturbed()
    assert len(memberships(run.folder)[-1]) == 2
    for killed, step in zip((first, second), steps_of_changes(run), strict=True):
        assert killed - 1 - every <= step <= killed - 1


def test_two_that_are_no_peers_may_die_at_once(train: Any, undisturbed: Any) -> None:
    run = train(*OPTIONS, *FOUR, *ZERO, *NO_FILE, faults(kill(0, 9), kill(2, 9)))
    assert result_of(run) == undisturbed()


def test_a_rank_that_dies_with_its_peer_takes_the_gang_back_to_its_checkpoint(train: Any, undisturbed: Any) -> None:
    options = ("checkpoint.every=6", "launcher.max_restarts=2")
    run = train(*OPTIONS, *FOUR, *ZERO, *options, "cluster.min_processes=1", faults(kill(1, 9), kill(2, 9)))
    assert run.code == 0, run.error
    attempts = run.json("run_manifest.json")["attempts"]
    assert [attempt["exit_reason"] for attempt in attempts] == ["failed", "completed"]
    assert "of the state after step" in run.error
    expected = undisturbed()
    assert {key: equal_parts(run.folder)[key] for key in EQUAL} == expected


@pytest.mark.parametrize("step", [1, 13])
def test_a_kill_while_copies_are_on_the_way_costs_one_step_more(train: Any, undisturbed: Any, step: int) -> None:
    run = train(*OPTIONS, *FOUR, *ZERO, *NO_FILE, faults(kill(1, step, point="copies:sent")))
    assert result_of(run) == undisturbed()
    assert memberships(run.folder) == [[0, 1, 2, 3], [0, 2, 3]]


def test_spares_and_replacements_get_their_shards_from_their_peers(train: Any, undisturbed: Any) -> None:
    options = ("cluster.spares=1", "launcher.max_restarts=2", *NO_FILE)
    run = train(*OPTIONS, *FOUR, *ZERO, *options, faults(kill(2, 7), kill(0, 14), SLOW))
    assert result_of(run) == undisturbed()
    assert len(memberships(run.folder)[-1]) == 4


def test_the_process_that_logs_dies_during_an_evaluation_and_a_save(train: Any, undisturbed: Any) -> None:
    planted = faults(kill(0, 8, point="evaluate:begin"), kill(1, 18, point="checkpoint:in-shard"))
    run = train(*OPTIONS, *FOUR, *ZERO, planted)
    assert run.code == 0, run.error
    actual = equal_parts(run.folder)
    assert {key: actual[key] for key in EQUAL} == undisturbed()
    assert actual["step"] == 24


def test_without_copies_it_is_refused_before_the_start(train: Any) -> None:
    run = train(*OPTIONS[:1], *FOUR[:1], *ZERO, "checkpoint.peers=0")
    assert run.code == 2
    assert "checkpoint.peers=1" in run.error
    assert run.folder is None
