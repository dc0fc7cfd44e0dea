"""The roster decides which processes train together, in whatever order they die, answer, join and leave."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from worldsize.core import Block
from worldsize.healing.membership import NEWCOMER, Membership
from worldsize.healing.roster import Roster


class Processes:
    """Records the messages to each process, and sends the answers of one."""

    def __init__(
        self,
        *ranks: int,
        patience: float = 60.0,
        blocks: Sequence[Block] = (Block(),),
        parts: int = 64,
        nodes: Mapping[int, int] | None = None,
    ) -> None:
        self.told: dict[int, list[Any]] = {}

        def tell(rank: int, message: Any) -> None:
            self.told.setdefault(rank, []).append(message)

        self.roster = Roster(ranks, tell, patience, blocks, parts, lambda rank: (nodes or {}).get(rank, 0))

    def stop(self, rank: int, step: int = NEWCOMER) -> None:
        self.roster.apply_message(rank, {"stopped": self.roster.number, "step": step})

    def settle(self) -> None:
        for rank in self.membership.members:
            self.roster.apply_message(rank, {"trained": self.roster.number})

    def seconds_left(self) -> float | None:
        return self.roster.seconds_left

    def is_told_to_stop(self, rank: int) -> bool:
        return bool(self.told.get(rank, [{}])[-1] == {"stop": self.roster.number})

    @property
    def membership(self) -> Membership:
        """The newest membership sent to any process."""
        forms = [message for messages in self.told.values() for message in messages if "form" in message]
        return Membership.from_message(max(forms, key=lambda message: int(message["form"])))


@pytest.fixture
def four() -> Processes:
    processes = Processes(0, 1, 2, 3)
    for rank in range(4):
        processes.stop(rank)
    return processes


def test_training_begins_when_all_processes_are_ready(four: Processes) -> None:
    assert four.membership == Membership(1, (0, 1, 2, 3), (NEWCOMER,) * 4)
    assert four.membership.source is None
    early = Processes(0, 1)
    early.stop(1)
    assert not early.told


def test_the_others_go_on_from_the_newest_step_that_one_of_them_has_done(four: Processes) -> None:
    four.roster.lose_rank(2, "killed by SIGKILL")
    assert [rank for rank in range(4) if four.is_told_to_stop(rank)] == [0, 1, 3]
    four.stop(0, 6)
    four.stop(3, 7)
    assert four.membership.number == 1
    four.stop(1, 7)
    assert four.membership == Membership(2, (0, 1, 3), (6, 7, 7), {2: "killed by SIGKILL"})
    assert (four.membership.source, four.membership.behind) == (1, [0])


def test_the_record_says_from_which_step_they_really_go_on(four: Processes) -> None:
    """If a part of the newest state is lost, they return to the newest complete state."""
    four.roster.lose_rank(2, "killed by SIGKILL")
    for rank in (0, 1, 3):
        four.stop(rank, 7)
    assert four.roster.records[-1]["first"] == 7
    assert four.roster.records[-1]["began"] is None
    for rank in (0, 1, 3):
        four.roster.apply_message(rank, {"began": 2, "first": 5})
    assert four.roster.records[-1]["first"] == 5
    assert four.roster.records[-1]["began"] is not None


def test_a_process_that_dies_while_the_others_stop_is_left_out_too(four: Processes) -> None:
    four.roster.lose_rank(0, "first")
    four.stop(1, 4)
    four.stop(2, 4)
    four.roster.lose_rank(3, "second")
    assert four.membership == Membership(2, (1, 2), (4, 4), {0: "first", 3: "second"})


def test_processes_that_lose_each_other_alone_meet_again(four: Processes) -> None:
    four.roster.apply_message(1, {"lost": 1})
    assert all(four.is_told_to_stop(rank) for rank in range(4))
    for rank in range(4):
        four.stop(rank, 9)
    four.roster.apply_message(1, {"lost": 1})  # late, about an earlier membership
    assert four.membership.number == 2
    assert four.membership.members == (0, 1, 2, 3)


def test_a_spare_waits_and_takes_the_place_of_the_next_that_dies(four: Processes) -> None:
    four.stop(4)
    four.stop(5)
    four.settle()
    assert not four.is_told_to_stop(0)
    four.roster.lose_rank(5, "a spare dies, too")
    assert not four.is_told_to_stop(0)
    four.roster.lose_rank(1, "gone")
    for rank in (0, 2, 3):
        four.stop(rank, 7)
    assert four.membership == Membership(2, (0, 2, 3, 4), (7, 7, 7, NEWCOMER), {1: "gone"})


def test_of_several_spares_neighbours_come_first(four: Processes) -> None:
    for rank in (6, 4, 7, 5):
        four.stop(rank)
    four.settle()
    four.roster.lose_rank(2, "its host is lost")
    four.roster.lose_rank(3, "its host is lost")
    for rank in (0, 1):
        four.stop(rank, 7)
    assert four.membership.members == (0, 1, 4, 5)


def test_a_newcomer_waits_until_all_have_settled_and_comes_last(four: Processes) -> None:
    four.roster.target = 5
    four.stop(4)
    assert not four.is_told_to_stop(0)
    four.settle()
    for rank in range(4):
        four.stop(rank, 5)
    assert four.membership.members == (0, 1, 2, 3, 4)
    assert four.membership.behind == [4]


def test_a_newcomer_joins_at_once_if_the_membership_ends_anyway(four: Processes) -> None:
    four.stop(4)
    four.roster.lose_rank(1, "gone")
    for rank in (0, 2, 3):
        four.stop(rank, 2)
    assert four.membership.members == (0, 2, 3, 4)


def test_one_that_leaves_learns_it_from_the_list(four: Processes) -> None:
    four.settle()
    four.roster.remove_rank(3)
    for rank in range(4):
        four.stop(rank, 5)
    assert four.membership.members == (0, 1, 2)
    assert four.told[3][-1]["members"] == [0, 1, 2]
    four.roster.has_ended(3)
    assert [record["left"] for record in four.roster.records] == [[], [3]]
    four.roster.apply_message(0, {"lost": 2})
    assert all(four.is_told_to_stop(rank) for rank in range(3))  # it did not end by finishing training


def test_one_that_dies_instead_of_leaving_is_not_waited_for(four: Processes) -> None:
    four.settle()
    four.roster.remove_rank(3)
    for rank in range(3):
        four.stop(rank, 5)
    four.roster.has_ended(3)
    assert four.membership.members == (0, 1, 2)


def test_a_newcomer_that_is_asked_to_leave_never_joins(four: Processes) -> None:
    """The request may come before it is ready or while it waits; its exit is not the end of training."""
    four.roster.target = 6
    four.roster.remove_rank(4)
    four.stop(4)
    four.stop(5)
    four.roster.remove_rank(5)
    four.settle()
    assert [four.told[rank][-1]["members"] for rank in (4, 5)] == [[], []]
    for rank in (4, 5):
        four.roster.has_ended(rank)
    four.roster.apply_message(0, {"lost": 1})
    for rank in range(4):
        four.stop(rank, 3)
    assert four.membership == Membership(2, (0, 1, 2, 3), (3, 3, 3, 3))


def test_a_newcomer_that_dies_before_it_joins_disturbs_nobody(four: Processes) -> None:
    four.roster.target = 5
    four.stop(4)
    four.roster.lose_rank(4, "killed")
    four.settle()
    assert not any(four.is_told_to_stop(rank) for rank in range(4))


def test_reports_of_lost_peers_end_no_more_memberships_if_nobody_is_lost_and_nothing_done(four: Processes) -> None:
    """A program error that looks like a lost connection would repeat at the same step for ever."""
    for number in range(1, 9):
        four.roster.apply_message(2, {"lost": number})
        for rank in filter(four.is_told_to_stop, range(4)):
            four.stop(rank, 6)
    assert four.membership.number == 4
    four.settle()
    four.roster.apply_message(2, {"lost": 4})
    assert four.is_told_to_stop(0)


def test_when_one_has_trained_to_the_end_all_others_are_told_so(four: Processes) -> None:
    four.stop(4)
    four.roster.has_ended(0)
    assert four.told[4][-1]["members"] == []
    four.roster.lose_rank(1, "killed at the very end")
    four.stop(2, 9)
    four.stop(3, 9)
    assert four.told[2][-1]["members"] == four.told[3][-1]["members"] == []
    assert len(four.roster.records) == 1


@pytest.fixture
def pairs() -> Processes:
    """Six processes that train in pairs; one has died, so its partner waits."""
    processes = Processes(*range(6), blocks=[Block(2)])
    for rank in range(6):
        processes.stop(rank)
    processes.roster.lose_rank(1, "gone")
    for rank in (0, 2, 3, 4, 5):
        processes.stop(rank, 7)
    return processes


@pytest.fixture
def hosts() -> Processes:
    """Two hosts of four processes, where pairs share layers; later processes are dealt in pairs, too."""
    nodes = {rank: rank // 4 for rank in range(8)} | {8: 0, 9: 0, 10: 1, 11: 1}
    processes = Processes(*range(8), blocks=[Block(2, together=2)], nodes=nodes)
    for rank in range(8):
        processes.stop(rank)
    return processes


def test_those_that_share_layers_are_on_one_host(hosts: Processes) -> None:
    assert hosts.membership.members == (0, 1, 2, 3, 4, 5, 6, 7)
    hosts.roster.lose_rank(0, "gone")
    hosts.roster.lose_rank(5, "gone, too")
    for rank in (1, 2, 3, 4, 6, 7):
        hosts.stop(rank, 7)
    assert hosts.membership == Membership(2, (1, 2, 4, 6), (7,) * 4, {0: "gone", 5: "gone, too"}, waiting=(3, 7))
    for rank in (3, 7):
        hosts.stop(rank, 7)
    hosts.settle()
    assert not any(hosts.is_told_to_stop(rank) for rank in range(8))


def test_one_that_joins_the_other_host_leaves_one_that_waits_alone(hosts: Processes) -> None:
    """Each host has one waiting process; only a process of the same host completes its pair."""
    hosts.roster.lose_rank(0, "gone")
    for rank in range(1, 8):
        hosts.stop(rank, 7)
    assert (hosts.membership.members, hosts.membership.waiting) == ((1, 2, 4, 5, 6, 7), (3,))
    hosts.stop(3, 7)
    hosts.settle()
    hosts.stop(10)
    assert not any(hosts.is_told_to_stop(rank) for rank in hosts.membership.members)
    hosts.stop(8)
    for rank in hosts.membership.members:
        hosts.stop(rank, 9)
    assert hosts.membership.members == (1, 2, 4, 5, 6, 7, 3, 8)


def test_a_member_goes_on_before_newcomers_whose_pair_is_complete_earlier() -> None:
    processes = Processes(0, 1, 2, 3, blocks=[Block(2, together=2)], nodes={0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0, 6: 1})
    for rank in range(4):
        processes.stop(rank)
    for rank in (4, 5, 6):
        processes.stop(rank)
    processes.roster.lose_rank(2, "gone")
    for rank in (0, 1, 3):
        processes.stop(rank, 5)
    assert processes.membership.members == (0, 1, 3, 6)


def test_a_block_of_several_pairs_may_span_hosts() -> None:
    processes = Processes(*range(8), blocks=[Block(4, together=2)], nodes={rank: rank // 4 for rank in range(8)})
    for rank in range(8):
        processes.stop(rank)
    processes.roster.lose_rank(1, "gone")
    processes.roster.lose_rank(2, "gone, too")
    processes.roster.lose_rank(4, "gone, too")
    for rank in (0, 3, 5, 6, 7):
        processes.stop(rank, 7)
    assert (processes.membership.members, processes.membership.waiting) == ((0, 3, 5, 6), (7,))


@pytest.mark.parametrize(
    ("dead", "blocks", "parts", "trains"),
    [
        (1, [Block(4), Block(2)], 64, 6),  # 3 blocks of 2 instead of one of 4
        (0, [Block(4), Block(2)], 64, 8),
        (4, [Block(4), Block(2)], 64, 4),  # as many in both
        (1, [Block(4), Block(1)], 64, 7),
        (1, [Block(4), Block(1)], 3, 4),  # at most 3 blocks
        (1, [Block(4, together=2), Block(2)], 64, 6),
        (5, [Block(4), Block(2)], 64, 2),
        (3, [Block(3), Block(2)], 64, 4),
    ],
)
def test_the_blocks_that_leave_the_fewest_waiting_are_formed(
    dead: int, blocks: Sequence[Block], parts: int, trains: int
) -> None:
    processes = Processes(*range(8), blocks=blocks, parts=parts)
    for rank in range(8):
        processes.stop(rank)
    for rank in range(dead):
        processes.roster.lose_rank(rank, "gone")
    for rank in range(dead, 8):
        processes.stop(rank, 7)
    assert len(processes.membership.members) == trains


def test_blocks_are_of_the_kind_that_their_number_of_processes_tells() -> None:
    """Two hosts with 3 and 5 processes: 8 of them would be two blocks of 4, whose pairs must share a host."""
    nodes = {rank: int(rank > 2) for rank in range(8)}
    processes = Processes(*range(8), blocks=[Block(4, together=2), Block(2)], nodes=nodes)
    for rank in range(8):
        processes.stop(rank)
    assert processes.membership.members == (0, 1, 2, 3, 4, 5)


def test_how_often_the_roster_looks_for_hosts_does_not_grow_with_the_square_of_the_world() -> None:
    asked: list[int] = []

    def node_of(rank: int) -> int:
        asked.append(rank)
        return rank // 8

    roster = Roster(tuple(range(64)), lambda *_: None, 60.0, node_of=node_of)
    for rank in range(64):
        roster.apply_message(rank, {"stopped": 0, "step": NEWCOMER})
    for rank in range(64):
        roster.apply_message(rank, {"trained": 1})
    roster.lose_rank(5, "gone")
    for rank in {*range(64)} - {5}:
        roster.apply_message(rank, {"stopped": 1, "step": 7})
    assert roster.number == 2
    assert len(asked) < 64 * 10


def test_those_that_are_too_many_for_whole_blocks_hand_over_what_they_keep_and_wait(pairs: Processes) -> None:
    assert pairs.membership == Membership(2, (0, 2, 3, 4), (7,) * 4, {1: "gone"}, waiting=(5,))
    pairs.stop(5, 7)  # it waits now
    pairs.settle()
    assert not any(pairs.is_told_to_stop(rank) for rank in range(6))
    pairs.roster.lose_rank(2, "gone, too")
    assert not pairs.is_told_to_stop(5)
    for rank in (0, 3, 4):
        pairs.stop(rank, 9)
    assert pairs.membership == Membership(3, (0, 3, 4, 5), (9, 9, 9, 7), {2: "gone, too"})


def test_one_that_dies_while_it_hands_over_ends_the_membership_and_later_it_does_not(pairs: Processes) -> None:
    pairs.roster.lose_rank(5, "gone")
    assert all(pairs.is_told_to_stop(rank) for rank in (0, 2, 3, 4))
    for rank in (0, 2, 3):
        pairs.stop(rank, 7)
    assert pairs.membership.number == 2
    pairs.roster.lose_rank(4, "gone")  # before it answers: of three, one waits
    assert pairs.membership == Membership(3, (0, 2), (7, 7), {4: "gone"}, waiting=(3,))
    pairs.stop(3, 7)
    pairs.roster.lose_rank(3, "while it waits")
    assert not pairs.is_told_to_stop(0)


def test_one_that_waits_for_a_block_trains_again_when_another_joins_or_leaves_if_it_is_asked(pairs: Processes) -> None:
    pairs.stop(5, 7)
    pairs.settle()
    pairs.stop(6)
    assert all(pairs.is_told_to_stop(rank) for rank in (0, 2, 3, 4))
    for rank in (0, 2, 3, 4):
        pairs.stop(rank, 8)
    assert pairs.membership == Membership(3, (0, 2, 3, 4, 5, 6), (8, 8, 8, 8, 7, NEWCOMER))
    pairs.roster.lose_rank(6, "gone")
    for rank in (0, 2, 3, 4, 5):
        pairs.stop(rank, 9)
    pairs.roster.remove_rank(5)
    pairs.stop(5, 9)
    assert pairs.told[5][-1]["members"] == []
    pairs.roster.has_ended(5)
    assert pairs.membership.members == (0, 2, 3, 4)


def test_when_all_is_done_one_that_waits_for_a_block_is_told_so(pairs: Processes) -> None:
    pairs.stop(5, 7)
    pairs.roster.has_ended(0)
    assert pairs.told[5][-1]["members"] == []


def test_one_that_is_ready_only_when_all_is_done_is_told_so(pairs: Processes) -> None:
    """It has nobody left to form a membership with, and would wait for ever."""
    pairs.stop(5, 7)
    for rank in (0, 2, 3, 4):
        pairs.roster.has_ended(rank)
    pairs.stop(6)
    assert pairs.told[6][-1]["members"] == []


def test_one_that_hands_over_when_all_is_done_is_told_so(pairs: Processes) -> None:
    for rank in (0, 2, 3, 4):
        pairs.roster.has_ended(rank)
    pairs.stop(5, 7)
    assert pairs.told[5][-1]["members"] == []


def test_members_that_do_not_stop_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    processes = Processes(0, 1, 2, patience=5.0)
    now[0] = 100.0
    assert processes.roster.find_late_members() == []  # starting takes time
    for rank in range(3):
        processes.stop(rank)
    assert processes.seconds_left() is None
    processes.roster.apply_message(0, {"lost": 1})
    processes.stop(0, 3)
    assert processes.seconds_left() == 5.0
    now[0] = 105.0
    assert processes.roster.find_late_members() == [1, 2]


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_end_in_a_membership_of_all_that_live(seed: int) -> None:
    """For any order of events: when every live process has answered, all of them train together."""
    chance, processes = random.Random(seed), Processes(0, 1, 2, 3)
    alive, steps, waiting, newest = {0, 1, 2, 3}, dict[int, int](), {0, 1, 2, 3}, 4

    def answer(rank: int) -> None:
        waiting.discard(rank)
        processes.stop(rank, steps.get(rank, NEWCOMER))

    def die() -> None:
        if len(alive) > 1:
            rank = chance.choice(sorted(alive))
            alive.discard(rank)
            waiting.discard(rank)
            processes.roster.lose_rank(rank, "killed")

    def join() -> None:
        nonlocal newest
        processes.roster.target += 1
        alive.add(newest)
        waiting.add(newest)
        newest += 1

    def report() -> None:
        processes.roster.apply_message(chance.choice(sorted(alive)), {"lost": processes.roster.number})

    events: list[Callable[[], None]] = [die, join, report]
    for _ in range(30):
        heard = {rank for rank in alive if processes.is_told_to_stop(rank)}
        waiting |= heard
        if waiting and chance.random() < 0.7:
            answer(chance.choice(sorted(waiting)))
        else:
            chance.choice(events)()
    for _ in range(4 * newest):
        waiting |= {rank for rank in alive if processes.is_told_to_stop(rank)}
        for rank in sorted(waiting):
            answer(rank)
        if processes.told and processes.membership.number == processes.roster.number:
            processes.settle()
    assert set(processes.membership.members) == alive
    assert len(set(processes.membership.members)) == len(processes.membership.members)
