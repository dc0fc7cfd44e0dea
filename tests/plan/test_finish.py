"""Predicted finish times match runs simulated failure by failure, and Daly's formula."""

from __future__ import annotations

import random

import numpy
import pytest

from worldsize.errors import ConfigError
from worldsize.plan.finish import compute_expected_seconds, simulate_runs

CASES = [(10_000.0, 5.0, 600.0, 60.0), (1000.0, 1.0, 1e9, 60.0), (500.0, 2.0, 50.0, 20.0)]


def event_by_event(work: float, interval: float, save: float, mtbf: float, restart: float, seed: int) -> float:
    """Return the seconds of one run, simulated from failure to failure."""
    generator = random.Random(seed)
    now, done = 0.0, 0
    failure = generator.expovariate(1 / mtbf)
    while done < round(work / interval):
        if failure < now + interval + save:
            now = failure
            failure = now + generator.expovariate(1 / mtbf)
            while failure < now + restart:
                now = failure
                failure = now + generator.expovariate(1 / mtbf)
            now += restart
        else:
            now, done = now + interval + save, done + 1
    return now


@pytest.mark.parametrize("case", CASES)
def test_quantiles_are_those_of_runs_simulated_event_by_event(case: tuple[float, float, float, float]) -> None:
    work, save, mtbf, restart = case
    end = simulate_runs(work, save, mtbf, restart)
    runs = [event_by_event(work, end.interval, save, mtbf, restart, seed) for seed in range(1500)]
    expected = numpy.quantile(runs, (0.1, 0.5, 0.9))
    assert end.seconds == pytest.approx(expected.tolist(), rel=0.04)
    assert numpy.mean(runs) == pytest.approx(
        compute_expected_seconds(work, end.interval, save, mtbf, restart), rel=0.02
    )


def test_a_run_that_never_fails_takes_its_training_and_one_save() -> None:
    end = simulate_runs(100.0, 1.0, 1e15, 60.0)
    assert end.seconds == pytest.approx([101.0] * 3)
    assert end.failures == 0.0


def test_a_run_that_would_hardly_ever_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="would make almost no progress"):
        simulate_runs(1e5, 1.0, 10.0, 3600.0)
