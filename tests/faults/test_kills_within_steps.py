"""A process is killed at each named point inside a step: the others repeat it, and the run ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.step_kills import OPTIONS, POINTS, SAME, STRATEGIES, disturbed, lost, undisturbed

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


def test_a_restart_after_a_step_half_done_costs_no_bit(train: Any) -> None:
    """The attempts end before, in and after an update whose step is in no checkpoint."""
    points = ("step:reduced", "step:update", "step:updated")
    rows = [
        f'{{action: kill, rank: {place % 2}, step: {4 + place}, point: "{point}", attempt: {place + 1}}}'
        for place, point in enumerate(points)
    ]
    saves = ("checkpoint.every=2", f"launcher.max_restarts={len(points)}", f"faults=[{', '.join(rows)}]")
    options = [each for each in OPTIONS if not each.startswith("checkpoint.")]
    run = train(*options, *STRATEGIES["ddp"], "cluster.processes=2", "steps=12", *saves, WORLDSIZE_PLUGINS=BENCHMARKS)
    assert run.code == 0, run.error
    assert len(run.json("run_manifest.json")["attempts"]) == len(points) + 1
    alone = train(*undisturbed("ddp"), "steps=12", WORLDSIZE_PLUGINS=BENCHMARKS)
    assert alone.code == 0, alone.error
    actual, expected = run.json("result.json"), alone.json("result.json")
    assert {key: actual[key] for key in SAME} == {key: expected[key] for key in SAME}
