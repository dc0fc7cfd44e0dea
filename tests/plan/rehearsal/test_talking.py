"""Valid communication is accepted, however unusual; invalid communication is reported by rank."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.plan.rehearsal.composed import isolated
from tests.plan.rehearsal.talking import RIGHT, Talking
from worldsize.config.settings import Settings
from worldsize.plan.rehearsal.rank import Rehearsed, RehearsedPart
from worldsize.plan.rehearsal.ranks import rehearse
from worldsize.plan.rehearsal.waiting import deadlock, differences, mismatches

pytestmark = pytest.mark.heavy

PROCESSES = 4
OPTIONS = ("recipe=digits", "strategy=ddp", f"cluster.processes={PROCESSES}", "batch_size=32")


def rehearsed(settings: Settings, manner: str, part: RehearsedPart) -> list[Rehearsed]:
    return rehearse(replace(settings, recipe=Talking(manner)), range(PROCESSES), part)


def said(manner: str, *, steps: int = 2) -> list[str]:
    """Return all complaints about ranks that communicate in this ``manner``."""
    ranks = isolated(rehearsed, *OPTIONS, given=(manner, RehearsedPart(steps, evaluates=False)))
    assert all(each.is_settled for each in ranks)
    found = [*map(str, differences(ranks)), *mismatches(ranks), *(each.error for each in ranks if each.error)]
    return found or [str(stuck) for stuck in [deadlock(ranks)] if stuck is not None]


@pytest.mark.parametrize("manner", RIGHT)
def test_ranks_that_talk_in_a_right_way_are_not_accused(manner: str) -> None:
    assert said(manner) == []


@pytest.mark.parametrize(
    ("manner", "first", "second"),
    [
        ("decide_by_the_largest", "rank 3: all_reduce(float32[1], sum) at tests/", "ranks 0-2: all_gather"),
        ("make_a_group_alone", "rank 0: new_group(ranks 0-1) at tests/", "ranks 1-3: "),
        ("exchange_parts_that_do_not_meet", "rank 1: 5 numbers to rank 2 in all_to_all(", "rank 2: 1 numbers from"),
        ("send_what_is_not_expected", "rank 0 sends float32[2] at tests/", ", but rank 1 receives int64[7] at tests/"),
        (
            "send_what_nobody_receives",
            "rank 0 sends float32[2] at tests/",
            "to rank 1, but the message is never received.",
        ),
        ("wait_after_each", "deadlock: ranks 0, 2 in all_reduce(", "ranks 1, 3 in all_reduce("),
    ],
)
def test_ranks_that_do_not_are_named_with_what_they_do(manner: str, first: str, second: str) -> None:
    sentence, *_ = said(manner)
    assert re.sub(r"^calls differ at call \d+ of the group of .* \(.*?\)\. (?=rank)", "", sentence).startswith(first)
    assert second in sentence


def test_the_pace_of_this_machine_decides_nothing() -> None:
    """A run of 40 steps or more polls for a stop less often, depending on the speed of its steps."""
    assert said("gather", steps=60) == []


def bounded(settings: Settings) -> list[str | None]:
    talking = replace(settings, recipe=Talking("sleep_on_one"))
    return [each.error for each in rehearse(talking, range(2), RehearsedPart(1, evaluates=False), longest=20.0)]


def test_a_rank_that_does_not_end_is_ended_and_named() -> None:
    first, second = isolated(bounded, *OPTIONS)
    assert first is None
    assert second == "with a timeout after 20 s. Rehearse fewer steps, or check for an endless loop"
