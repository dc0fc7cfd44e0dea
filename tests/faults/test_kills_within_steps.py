"""A process is killed at each named point inside a step: the others repeat it, and the run ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.step_kills import POINTS, SAME, STRATEGIES, disturbed, lost, undisturbed

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_kill_at_each_point_of_a_step_costs_no_bit(train: Any, strategy: str) -> None:
    """One run loses a process at each point; the model has statistics, a counter, dropout, an average and metrics."""
    alone = train(*undisturbed(strategy), WORLDSIZE_PLUGINS=BENCHMARKS)
    assert alone.code == 0, alone.error
    run = train(*disturbed(strategy, POINTS), WORLDSIZE_PLUGINS=BENCHMARKS)
    assert run.code == 0, run.error
    assert lost(run.json("run_manifest.json")) == len(POINTS)
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert attempt["steps"] == [0, alone.json("result.json")["steps"]]
    actual, expected = run.json("result.json"), alone.json("result.json")
    assert {key: actual[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert 0 <= actual["goodput"]["fraction"] <= 1
