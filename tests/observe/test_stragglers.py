"""Stragglers are found in noisy series, and in a run where faults slow down ranks."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worldsize.core import Straggling
from worldsize.observe.events import EventLog, describe_straggler
from worldsize.observe.stragglers import Figures, Straggler, Stragglers, median_of_others

RANKS, EVERY = 4, 10


def noisy(seed: int, steps: int, *, noise: float = 0.1, ranks: int = RANKS) -> Figures:
    """Return splits [ranks, steps, 4] of noisy steps of about 100 ms, where all ranks wait for the slowest.

    Times have heavy tails (Student's t, 3 degrees), some steps take ten times as long, and occasionally a disturbance
    slows down a rank by half for a while.
    """
    draw = np.random.default_rng(seed)
    busy_rs = 0.09 * (1 + noise * abs(draw.standard_t(3, (ranks, steps))))
    busy_rs[draw.random((ranks, steps)) < 0.01] *= 10
    for begin in range(0, steps, 100):
        at = begin + draw.integers(85)
        busy_rs[draw.integers(ranks), at : at + 15] *= 1.5
    return filled(busy_rs)


def filled(busy_rs: Figures) -> Figures:
    wait_rs = busy_rs.max(0) - busy_rs + 0.01
    return np.stack([0.05 * busy_rs, 0.85 * busy_rs, wait_rs, 0.1 * busy_rs], 2)


def reports(stragglers: Stragglers, splits: Figures, first: int = 0) -> list[tuple[int, Straggler]]:
    """Return each reported slow rank with the step of the report; every tenth step is logged."""
    named = []
    for begin in range(0, splits.shape[1], EVERY):
        step = first + begin + EVERY
        named += [(step, slow) for slow in stragglers.find_stragglers(step, splits[:, begin : begin + EVERY].tolist())]
    return named


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_becomes_slower_by_a_fifth_is_named_within_50_steps(seed: int) -> None:
    splits = noisy(seed, 300)
    splits[2, 200:, :] *= [1.2, 1.2, 0, 1.2]
    ((step, slow),) = reports(Stragglers([range(RANKS)]), splits)
    assert (slow.rank, slow.cause) == (2, "compute")
    assert 200 < step <= 250
    assert 1.1 < slow.slower < 1.4
    assert 190 < slow.since <= step


def test_without_a_slow_rank_nobody_is_named_whatever_the_noise() -> None:
    for seed in range(20):
        assert reports(Stragglers([range(RANKS)]), noisy(seed, 1000, noise=0.05 * (1 + seed % 8))) == []


def test_among_thousands_the_slow_rank_is_named_and_few_steps_are_remembered() -> None:
    ranks, steps = 2048, 600  # 300 windows of two measured steps
    splits = noisy(0, steps, ranks=8).repeat(ranks // 8, 0)
    splits[1500, 300:] *= [1.5, 1.5, 0, 1.5]
    stragglers = Stragglers([range(ranks)])
    tracemalloc.start()
    named = [
        (step, slow.rank)
        for step in range(0, steps, 2)
        for slow in stragglers.find_stragglers(step + 2, list(splits[:, step : step + 2]))
    ]
    remembered, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ((step, rank),) = named
    assert rank == 1500
    assert 300 < step <= 400
    assert remembered < 20e6, "the times of 600 steps are 39 MB"


def test_slow_data_are_distinguished_from_slow_computing() -> None:
    splits = noisy(0, 100)
    splits[1, :, 0] += 0.05
    ((_, slow),) = reports(Stragglers([range(RANKS)]), splits)
    assert (slow.rank, slow.cause) == (1, "data")


def test_a_rank_is_compared_with_those_that_have_equal_work() -> None:
    splits = noisy(0, 100)
    splits[[1, 3]] *= 2  # the second stage of a pipeline
    assert reports(Stragglers([[0, 2], [1, 3]]), splits) == []
    splits[3] *= 1.5
    assert [slow.rank for _, slow in reports(Stragglers([[0, 2], [1, 3]]), splits)] == [3]


def test_a_rank_that_recovers_and_becomes_slow_again_is_named_again() -> None:
    stragglers, slow, well = Stragglers([range(RANKS)], first=400), noisy(1, 100), noisy(2, 100)
    slow[0] *= 1.5
    parts = [reports(stragglers, splits, 400 + 100 * part) for part, splits in enumerate((slow, well, slow))]
    assert [[slow_rank.rank for _, slow_rank in named] for named in parts] == [[0], [], [0]]
    assert [named[0][1].since > first for named, first in ((parts[0], 400), (parts[2], 590))] == [True, True]


def test_steps_of_a_millisecond_are_judged_after_half_a_second() -> None:
    splits = noisy(0, 700) / 100
    splits[0] *= 1.5
    ((step, _),) = reports(Stragglers([range(RANKS)]), splits)
    assert 280 <= step <= 400  # 0.5 s at 1.8 ms a step


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_the_median_of_the_others_is_that_of_the_rest_of_the_row(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 5, (6, count)).astype(float)
    expected = [[np.median(np.delete(row, place)) for place in range(count)] for row in values]
    assert median_of_others(values).tolist() == expected


def test_an_event_is_a_line_with_the_rank_its_host_and_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    event = Straggling(250, rank=2, host="n3", device="cuda:1", cause="data", slower=1.234, since=210)
    EventLog(tmp_path / "events.jsonl")(event)
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert line.pop("time") > 1e9
    assert line == {"event": "straggling", **vars(event)}
    assert describe_straggler(event) in caplog.messages
    assert (
        "rank 2 on n3 (cuda:1) has been 23% slower than its peers since step 210: slow data loading"
        in describe_straggler(event)
    )


def test_a_run_names_the_rank_that_computes_slowly_and_the_one_whose_data_are_slow(train: Any) -> None:
    everyone = "{action: slow, rank: null, seconds: 0.03}"
    slow = "{action: slow, rank: 2, seconds: 0.1}, {action: slow, rank: 1, seconds: 0.1, point: 'step:data'}"
    options = ("recipe=digits", "recipe.width=4", "steps=80", "cluster.processes=4", "cluster.threads=1")
    run = train(*options, "checkpoint=none", f"faults=[{everyone}, {slow}]")
    assert run.code == 0, run.error
    rows = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    events = [row for row in rows if row["event"] == "straggling"]
    assert {(event["rank"], event["cause"]) for event in events} == {(1, "data"), (2, "compute")}
    assert min(event["step"] for event in events) >= 50
    assert {event["device"] for event in events} == {"cpu"}
    assert "rank 2 on" in run.output
