"""Diverging and deadlocked ranks are found in handwritten lists of calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from worldsize.messages import abbreviate_ranks
from worldsize.plan.rehearsal.calls import Call
from worldsize.plan.rehearsal.memory import Peak
from worldsize.plan.rehearsal.operators import Group
from worldsize.plan.rehearsal.rank import Rehearsed
from worldsize.plan.rehearsal.waiting import deadlock, differences

ALL, FIRST, SECOND = Group((0, 1, 2), 0), Group((0, 1), 0), Group((0, 1), 1)


def call(operation: str, group: Group = ALL, form: str = "float32[2], sum", peer: int | None = None) -> Call:
    return Call(operation, group, form, peer, 8, f"program.py:{len(operation)} (step)", 1)


def ranks(*calls: Sequence[Call], errors: Sequence[str | None] = ()) -> list[Rehearsed]:
    ended = list(errors) or [None] * len(calls)
    return [Rehearsed(rank, own, Peak(0, {}), None, {}, ended[rank]) for rank, own in enumerate(calls)]


def test_the_fewest_are_named_first_with_their_line() -> None:
    same, other = [call("all_reduce"), call("barrier", form="")], [call("all_reduce"), call("broadcast")]
    (difference,) = differences(ranks(same, other, same))
    assert str(difference) == (
        "calls differ at call 2 of the group of ranks 0-2 (step 1). rank 1: broadcast(float32[2], sum) at "
        "program.py:9 (step); ranks 0, 2: barrier() at program.py:7 (step)."
    )


def test_the_order_in_which_ranks_are_given_changes_nothing() -> None:
    given = ranks(*[[call(operation)] for operation in ("all_reduce", "broadcast", "barrier")])
    assert differences(given) == differences(given[::-1])


def test_a_rank_that_makes_no_further_call_is_named_unless_an_error_has_ended_it() -> None:
    short, long = [call("all_reduce")], [call("all_reduce"), call("all_reduce")]
    (difference,) = differences(ranks(long, long, short))
    assert str(difference).startswith("calls differ at call 2 of")
    assert ". rank 2: no further call; ranks 0-1: " in str(difference)
    assert differences(ranks(long, long, short, errors=[None, None, "in step 1: ValueError"])) == []


def test_the_earliest_of_several_groups_comes_first() -> None:
    mine = [call("all_reduce", FIRST), call("all_reduce", SECOND), call("all_reduce", FIRST)]
    other = [call("all_reduce", FIRST), call("broadcast", SECOND), call("barrier", FIRST)]
    assert [each.group for each in differences(ranks(mine, other))] == [SECOND, FIRST]


def test_groups_of_the_same_members_that_two_ranks_take_in_turns_wait_for_ever() -> None:
    mine = [call("all_reduce", FIRST), call("all_reduce", SECOND)]
    turned = [call("all_reduce", SECOND), call("all_reduce", FIRST)]
    both = ranks(mine, turned)
    assert differences(both) == []
    assert str(deadlock(both)) == (
        "deadlock: rank 0 in all_reduce(float32[2], sum) with the group of ranks 0-1 at "
        "program.py:10 (step); rank 1 in all_reduce(float32[2], sum) with the group of ranks 0-1 "
        "(number 2 with these ranks) at program.py:10 (step)."
    )


def test_messages_that_meet_end_and_one_that_nobody_sends_is_waited_for() -> None:
    sends, receives = call("send", peer=1), call("recv", peer=0)
    assert deadlock(ranks([sends, call("barrier", FIRST)], [receives, call("barrier", FIRST)])) is None
    stuck = deadlock(ranks([call("barrier", FIRST)], [receives, call("barrier", FIRST)]))
    assert stuck is not None
    assert set(stuck.waiting) == {0, 1}


def test_absent_ranks_do_what_the_present_ones_do() -> None:
    present = [Rehearsed(rank, [call("all_reduce")], Peak(0, {}), None, {}) for rank in (0, 2)]
    assert differences(present) == []
    assert deadlock(present) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [([5], "5"), ([0, 1, 2, 3], "0-3"), ([0, 1, 4], "0-1, 4"), ([0, 8, 16, 24], "0, 8 .. 24"), ([3, 1], "1, 3")],
)
def test_ranks_are_written_in_short(given: list[int], text: str) -> None:
    assert abbreviate_ranks(given) == text
