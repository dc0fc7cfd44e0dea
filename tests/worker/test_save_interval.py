"""``checkpoint.every=auto`` is about as good as the best fixed interval, and does not change the run's bits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.observe.run_folders import attempt, write_run
from tests.support.outcome import outcome
from tests.support.own_recipe import write_recipe
from worldsize.checkpoint.format import complete, parse_step, read_checkpoint
from worldsize.core import Cluster, SaveIntervalChanged
from worldsize.plan.finish import compute_expected_seconds, interval_seconds, mtbf_seconds
from worldsize.record.run_directory import RunDirectory
from worldsize.worker.save_interval import SaveInterval, save_interval

pytestmark = pytest.mark.heavy

STEP, SAVE, RESTART, STEPS = 0.5, 4.0, 30.0, 200_000  # seconds, and steps of a simulated run


class FailedError(Exception):
    """The simulated run has failed."""


class Clock:
    """Counts the seconds of a simulated run, and fails at random."""

    def __init__(self, mtbf: float, seed: int) -> None:
        self.now, self._mtbf, self._random = 0.0, mtbf, random.Random(seed)
        self.fail_later()

    def __call__(self) -> float:
        return self.now

    def fail_later(self) -> None:
        self._failure = self.now + self._random.expovariate(1 / self._mtbf)

    def spend(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self._failure:
            self.now = self._failure
            self.fail_later()
            raise FailedError


class Fixed:
    """Saves every ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def is_due(self, step: int) -> bool:
        return step % self.steps == 0

    def is_overdue(self) -> bool:
        return False

    def begin_step(self, *, in_flight: bool) -> None:
        """Measure nothing."""

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        yield

    def agree(self, step: int) -> None:
        """Choose nothing."""

    def resume(self, step: int, facts: Mapping[str, Any]) -> None:
        """Remember nothing."""

    def facts(self) -> dict[str, Any]:
        return {}


def goodput(make: Callable[[Clock, int], SaveInterval | Fixed], mtbf: float, seed: int) -> float:
    """Return the share of a simulated run's time spent on steps that counted."""
    clock, failures, saved, facts = Clock(mtbf, seed), 0, 0, dict[str, Any]()
    while saved < STEPS:
        interval = make(clock, failures)
        interval.resume(saved, facts)
        try:
            if failures:
                clock.spend(RESTART)
            for step in range(saved + 1, STEPS + 1):
                interval.begin_step(in_flight=False)
                clock.spend(STEP)
                if interval.is_due(step) or interval.is_overdue() or step == STEPS:
                    with interval.saving(step):
                        interval.agree(step)
                        clock.spend(SAVE)
                    saved, facts = step, interval.facts()
        except FailedError:
            failures += 1
    return STEPS * STEP / clock.now


def automatic(clock: Clock, failures: int, *, declared: float | None) -> SaveInterval:
    rule = partial(_mtbf, declared)
    given: dict[str, Any] = {"failures": failures, "seconds": clock.now, "declared": declared is not None}
    return SaveInterval(None, rule, emit=lambda event: None, clock=clock, **given)


def _mtbf(declared: float | None, failures: int, seconds: float) -> float:
    return mtbf_seconds(declared, 1, failures=failures, seconds=seconds)


def saves_of(cost: float, seconds: float, *, growth: float = 1.0) -> list[float]:
    """Return the times of the saves of a run without declared or actual failures.

    Args:
        cost: Seconds of a save.
        seconds: Duration of the run.
        growth: Factor on the step time after each save.
    """
    clock, step_seconds, times = Clock(1e12, 0), 0.5, list[float]()
    interval = automatic(clock, 0, declared=None)
    interval.resume(0, {})
    step = 0
    while clock.now < seconds:
        step += 1
        interval.begin_step(in_flight=False)
        clock.spend(step_seconds)
        if interval.is_due(step) or interval.is_overdue():
            times.append(clock.now)
            step_seconds *= growth
            with interval.saving(step):
                interval.agree(step)
                clock.spend(cost)
    return times


def test_a_run_that_declares_nothing_saves_every_ten_minutes() -> None:
    for growth in (1.0, 1.2, 0.8):  # also if steps become slower or faster
        times = saves_of(0.1, 10_000.0, growth=growth)
        assert max(later - earlier for earlier, later in pairwise([0.0, *times])) <= 600.0
    assert len(saves_of(0.1, 10_000.0)) < 20, "and no more often"


def test_saves_that_take_long_take_one_percent_of_the_time() -> None:
    times = saves_of(20.0, 50_000.0)
    assert times[0] <= 600.0, "nothing is known of them yet"
    assert min(later - earlier for earlier, later in pairwise(times)) >= 2000.0
    assert len(times) > 20


def test_a_run_of_seconds_saves_only_at_its_end() -> None:
    assert saves_of(0.001, 500.0) == []


def test_a_run_that_has_failed_saves_early() -> None:
    interval = automatic(Clock(1e12, 0), 1, declared=None)
    interval.resume(0, {})
    assert [interval.is_due(step) for step in (9, 10)] == [False, True]


@pytest.mark.parametrize(
    ("reason", "steps", "saves_early"),
    [("failed", None, False), ("failed", [0, 5], True), ("killed", None, True), ("preempted", [0, 5], False)],
)
def test_an_attempt_that_failed_before_its_first_step_changes_no_interval(
    reason: str, steps: list[int] | None, saves_early: bool, tmp_path: Path
) -> None:
    run = RunDirectory(write_run(tmp_path / "run", steps=1, attempts=[attempt(1, steps=steps, reason=reason)]))
    interval = save_interval(Cluster("test", 1, 2, "cpu", "gloo"), run, None, emit=lambda event: None)
    interval.resume(0, {})
    assert interval.is_due(10) is saves_early


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, 20_000.0])
def test_goodput_is_within_two_percent_of_the_best_fixed_interval(mtbf: float) -> None:
    best = max(goodput(lambda *_, steps=steps: Fixed(steps), mtbf, seed=3) for steps in (60, 120, 240, 480, 960, 1920))
    chosen = goodput(partial(automatic, declared=mtbf / 3600), mtbf, seed=3)
    assert chosen >= 0.98 * best


def test_a_rate_that_was_declared_ten_times_too_low_is_corrected_by_the_failures_seen() -> None:
    best = max(goodput(lambda *_, steps=steps: Fixed(steps), 600.0, seed=5) for steps in (60, 120, 240, 480))
    chosen = goodput(partial(automatic, declared=10 * 600 / 3600), 600.0, seed=5)
    assert chosen >= 0.97 * best


@pytest.mark.parametrize("seed", range(5))
def test_failures_of_which_nothing_was_declared_shorten_the_interval_at_once(seed: int) -> None:
    best = max(goodput(lambda *_, steps=steps: Fixed(steps), 600.0, seed) for steps in (60, 120, 240, 480))
    assert goodput(partial(automatic, declared=None), 600.0, seed) >= 0.95 * best


def test_the_interval_has_the_least_expected_time_of_all() -> None:
    for save, mtbf in ((0.1, 10.0), (2.0, 600.0), (30.0, 3600.0), (10.0, 1e6)):
        chosen = interval_seconds(save, mtbf)
        least = min(compute_expected_seconds(1e5, chosen * k / 100, save, mtbf, 5.0) for k in range(20, 500))
        assert compute_expected_seconds(1e5, chosen, save, mtbf, 5.0) <= 1.001 * least
    assert interval_seconds(50.0, 10.0) == 10.0  # a save that takes longer than a run's typical lifetime


def test_the_time_between_failures_is_what_was_declared_and_then_what_was_seen() -> None:
    assert mtbf_seconds(10.0, 4) == 9000.0
    assert mtbf_seconds(10.0, 4, failures=99, seconds=991_000.0) == 10_000.0
    assert mtbf_seconds(None, 1, failures=4, seconds=100.0) == 25.0
    assert 6000 < mtbf_seconds(None, 1) / 3600 < 6500


def test_slower_steps_while_a_save_is_written_are_part_of_its_cost() -> None:
    clock, events = Clock(1e12, 0), list[SaveIntervalChanged]()
    interval = SaveInterval(None, lambda failures, seconds: 1e4, emit=events.append, clock=clock)
    for _ in range(10):
        interval.begin_step(in_flight=False)
        clock.spend(1.0)
    with interval.saving(10):
        clock.spend(0.5)
    interval.begin_step(in_flight=True)
    for step in range(1, 6):
        clock.spend(1.5)
        interval.begin_step(in_flight=step < 5)
    with interval.exclude_step_time():
        clock.spend(100.0)  # an evaluation
    clock.spend(1.0)
    interval.begin_step(in_flight=False)
    interval.agree(17)
    assert interval.facts() == {"steps": 40, "save_seconds": pytest.approx(3.0), "step_seconds": pytest.approx(1.0)}


def test_a_run_saves_by_itself_and_ends_with_the_same_bits(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    words = ("recipe=digits", "steps=400", "cluster.processes=2", "cluster.threads=1", "checkpoint.keep.last=99")
    killed = "faults=[{action: kill, rank: 1, step: 200}]"
    run = train(*words, "checkpoint.every=auto", "cluster.mtbf_hours=0.001", killed)
    assert run.code == 1, run.error
    done = command("resume", str(run.folder), cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    recorded = [read_checkpoint(path).facts["save_interval"] for path in complete(run.folder / "checkpoints")]
    assert recorded[-1].keys() == {"steps", "save_seconds", "step_seconds"}
    assert any(row["event"] == "save_interval" and row["save_seconds"] > 0 for row in rows)
    assert "a save takes" in run.output + run.error
    assert outcome(run.folder) == outcome(train(*words).folder)


HASTY = """\
from recipes.digits.recipe import Digits
from worldsize.plan import finish

finish.LONGEST = 0.2  # instead of ten minutes


class Hasty(Digits): ...
"""


def test_by_default_a_run_saves_on_the_way_and_ends_with_the_same_bits(train: Any, tmp_path: Path) -> None:
    target = "defaults: [digits, _self_]\nrecipe: {_target_: recipes.hasty.recipe.Hasty}\n"
    write_recipe(tmp_path, "hasty", HASTY, hasty=f"# @package _global_\n{target}")
    slow = "faults=[{action: sleep, rank: 1, step: null, seconds: 0.05}]"
    words = ("steps=30", "cluster.processes=2", "cluster.threads=1", "checkpoint.keep.last=99")
    run = train("recipe=hasty", *words, slow)
    assert run.code == 0, run.error
    assert len(complete(run.folder / "checkpoints")) > 1  # after the first, 1 % of the time decides
    usual = train("recipe=digits", *words)
    assert [parse_step(path) for path in complete(usual.folder / "checkpoints")] == [30]
    assert outcome(run.folder)["state_digest"] == outcome(usual.folder)["state_digest"]


def test_what_one_gang_hands_on_is_what_the_next_goes_on_with() -> None:
    clock = Clock(600.0, seed=1)
    one = SaveInterval(None, lambda *_: 600.0, emit=lambda _: None, clock=clock)
    with one.saving(10):
        pass
    one.complete(10)
    other = SaveInterval(None, lambda *_: 600.0, emit=lambda _: None, clock=clock)
    other.resume(14, one.export_facts())
    assert [other.is_due(step) for step in (19, 20)] == [False, True]
    assert other.export_facts() == one.export_facts()


def test_a_save_that_was_in_flight_when_the_gang_changed_is_due_again() -> None:
    clock = Clock(600.0, seed=1)
    one = SaveInterval(None, lambda *_: 600.0, emit=lambda _: None, clock=clock)
    with one.saving(10):
        one.agree(10)
    assert not one.is_due(12)
    other = SaveInterval(None, lambda *_: 600.0, emit=lambda _: None, clock=clock)
    other.resume(12, one.export_facts())
    assert other.is_due(12)
