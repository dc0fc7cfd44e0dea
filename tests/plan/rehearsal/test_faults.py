"""A rank that communicates differently from its peers is reported, with both lines, before the launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.rehearsal.composed import isolated
from tests.plan.rehearsal.faulty import FAULTS, Faulty, line
from tests.plan.rehearsal.talking import Talking
from worldsize.config.settings import Settings
from worldsize.core import Recipe
from worldsize.plan.rehearsal.rank import RehearsedPart
from worldsize.plan.rehearsal.ranks import rehearse
from worldsize.plan.rehearsal.waiting import deadlock, differences

pytestmark = pytest.mark.heavy

PROCESSES, RANK = 4, 2
STRATEGIES = ("ddp", "zero", "fsdp", "mesh")
PEERS = {"skip": "pair", "shape": "pair", "order": "pair", "dtype": "pair", "group": "pair", "branch": "one"}


def found(settings: Settings, fault: str) -> tuple[list[str], list[str | None]]:
    """Return the reports about diverging or deadlocked ranks, and each rank's error."""
    faulty = replace(settings, recipe=Faulty(fault, RANK))
    rehearsed = rehearse(faulty, range(PROCESSES), RehearsedPart())
    parted, stuck = differences(rehearsed), deadlock(rehearsed)
    sentences = [*map(str, parted), *([str(stuck)] if stuck and not parted else [])]
    return sentences, [each.error for each in rehearsed]


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [  # zero communicates like ddp, and fsdp like one axis of a mesh
        (strategy, fault)
        for strategy in STRATEGIES
        for fault in (FAULTS if strategy in ("ddp", "mesh") else ("shape", "branch"))
    ],
)
def test_the_rank_that_differs_is_named_with_its_line_and_that_of_its_peers(strategy: str, fault: str) -> None:
    options = ("recipe=digits", f"strategy={strategy}", f"cluster.processes={PROCESSES}", "batch_size=32")
    sentences, _ = isolated(found, *options, given=(fault,))
    mine, _, peers = sentences[0].partition("). ")[2].partition("; rank")
    if fault == "branch":  # the order of the data determines the rank
        assert mine.startswith("rank ")
    else:
        assert mine.startswith(f"rank {RANK}: ")
    own = {"skip": "one"}.get(fault, fault)
    assert f"at {line(own)} (_talk)" in (mine if fault != "group" else "\n".join(sentences))
    assert f"at {line(PEERS[fault])} (_talk)" in peers


def times(settings: Settings, recipe: Recipe | None) -> int:
    """Return the number of rehearsals of each rank."""
    counts: list[int] = []
    talking = settings if recipe is None else replace(settings, recipe=recipe)
    rehearse(talking, range(PROCESSES), RehearsedPart(evaluates=False), note=counts.append)
    return counts.count(PROCESSES)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [(None, 1), (Faulty("none", RANK), 2), (Faulty("shape", RANK), 2), (Talking("decide_by_the_largest"), 4)],
    ids=["nothing small", "small gradients", "a fault", "a decision"],
)
def test_ranks_are_rehearsed_again_where_they_say_different_things_until_hearing_others_changes_nothing(
    recipe: Recipe | None, expected: int
) -> None:
    options = ("recipe=digits", "recipe.width=256", "strategy=ddp", f"cluster.processes={PROCESSES}", "batch_size=32")
    assert isolated(times, *options, given=(recipe,)) == expected


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp", "diloco", "local_sgd"])
def test_ranks_that_do_the_same_are_not_accused(strategy: str) -> None:
    options = ("recipe=digits", f"strategy={strategy}", f"cluster.processes={PROCESSES}", "batch_size=32")
    assert isolated(found, *options, "cluster.nodes=2", given=("none",)) == ([], [None] * PROCESSES)
