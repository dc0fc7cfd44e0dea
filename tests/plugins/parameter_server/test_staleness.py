"""Units are dealt within the staleness bound, while workers join, leave and die at random."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from plugins.parameter_server.task_pool import StalenessScheduler, Unit
from plugins.parameter_server.task_scheduler import TaskScheduler


class Crew:
    """Workers that take, finish and lose units in an order drawn from ``seed``."""

    def __init__(self, clock: StalenessScheduler, seed: int, *, churn: float) -> None:
        self.clock, self.churn = clock, churn
        self.random = random.Random(seed)
        self.born = 0
        self.hands: dict[str, Unit] = {}
        self.trained = Counter[tuple[int, int]]()
        for _ in range(3):
            self._join()

    def _join(self) -> None:
        self.clock.add_member(f"worker-{self.born}", 0.0)
        self.born += 1

    def act(self) -> None:
        """Run one random event."""
        if self.random.random() < self.churn:
            self._change()
        idle = [name for name in self.clock.members if name not in self.hands]
        if idle and (unit := self.clock.assign_unit(name := self.random.choice(idle), 0.0)):
            self.hands[name] = unit
        elif self.hands:
            name = self.random.choice(sorted(self.hands))
            unit = self.hands.pop(name)
            assert self.clock.finish_unit(name, unit)
            self.trained.update((unit.step, rank) for rank in unit.logical_ranks)

    def _change(self) -> None:
        if len(self.clock.members) < 2 or self.random.random() < 0.5:
            self._join()
        else:
            gone = self.random.choice(sorted(self.clock.members))
            assert self.clock.remove_member(gone) == self.hands.pop(gone, None) or gone not in self.hands


@pytest.mark.parametrize("staleness", [0, 1, 4, math.inf])
@pytest.mark.parametrize("churn", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(8))
def test_clocks_stay_within_the_bound_and_every_part_is_trained_once(staleness: float, churn: float, seed: int) -> None:
    clock = StalenessScheduler(staleness, logical_ranks=4, lease=9.0, first=5)
    clock.allow_steps(5 + 40)
    crew = Crew(clock, seed, churn=churn)
    for _ in range(100_000):
        crew.act()
        clocks = [member.clock for member in clock.members.values()]
        assert max(clocks, default=0) - min(clocks, default=0) <= staleness + 1
        if clock.complete == 45:
            break
    assert crew.trained == {(step, rank): 1 for step in range(6, 46) for rank in range(4)}


@pytest.mark.parametrize("seed", range(5))
def test_no_part_of_a_synchronous_step_begins_before_the_step_before_is_complete(seed: int) -> None:
    clock = StalenessScheduler(0, logical_ranks=6, lease=9.0)
    clock.allow_steps(30)
    crew = Crew(clock, seed, churn=0.2)
    while clock.complete < 30:
        before = dict(crew.hands)
        crew.act()
        begun = [unit.step for name, unit in crew.hands.items() if before.get(name) != unit]
        assert all(sum(crew.trained[step - 1, rank] for rank in range(6)) == 6 for step in begun if step > 1)


def test_a_worker_whose_lease_expires_is_retired_and_its_unit_is_dealt_again() -> None:
    clock = StalenessScheduler(0, logical_ranks=2, lease=5.0)
    clock.allow_steps(1)
    clock.add_member("a", 0.0)
    clock.add_member("b", 0.0)
    first, second = clock.assign_unit("a", 0.0), clock.assign_unit("b", 0.0)
    assert first
    assert second
    assert clock.renew_lease("b", 4.0)
    assert clock.find_expired_members(6.0) == ["a"]
    assert clock.remove_member("a") == first
    assert clock.finish_unit("b", second)
    assert clock.assign_unit("b", 6.0) == first
    assert not clock.finish_unit("a", first)
    assert not clock.renew_lease("a", 6.0)
    assert clock.finish_unit("b", first)
    assert clock.complete == 1


def test_a_later_leader_admits_workers_in_later_epochs() -> None:
    leader = TaskScheduler(StalenessScheduler(0, logical_ranks=1, lease=5.0), timeout=60.0)
    before = leader.admit_worker("worker-0")
    successor = TaskScheduler(StalenessScheduler(0, logical_ranks=1, lease=5.0), timeout=60.0)
    assert successor.admit_worker("worker-0") > before


def test_no_unit_is_dealt_beyond_the_steps_that_are_open() -> None:
    clock = StalenessScheduler(math.inf, logical_ranks=1, lease=5.0)
    clock.add_member("a", 0.0)
    assert clock.assign_unit("a", 0.0) is None
    clock.allow_steps(1)
    assert clock.assign_unit("a", 0.0) == Unit(1, (0,))


def test_a_worker_that_never_begins_its_part_of_a_step_is_retired_too() -> None:
    clock = StalenessScheduler(0, logical_ranks=2, lease=5.0)
    clock.allow_steps(1)
    clock.add_member("a", 0.0)
    clock.add_member("b", 0.0)
    assert clock.find_expired_members(6.0) == [], "no step has been dealt, so that nobody waits"
    first = clock.assign_unit("a", 0.0)
    assert first
    assert clock.renew_lease("a", 4.0)
    assert clock.find_expired_members(6.0) == ["b"]
    clock.remove_member("b")
    assert clock.finish_unit("a", first)
    assert clock.assign_unit("a", 6.0) == Unit(1, (1,))
    assert clock.find_expired_members(100.0) == ["a"]
