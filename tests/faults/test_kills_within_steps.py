"""A process is killed at each named point inside a step: the others repeat the step, with the same final bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.step_kills import OPTIONS, POINTS, SAME, STRATEGIES, disturbed, lost, undisturbed

pytestmark = pytest.mark.heavy

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def alone(reference_run: Any) -> Callable[[str], dict[str, Any]]:
    """``alone(strategy)`` is the result of a run without kills."""
    return lambda strategy: reference_run(*undisturbed(strategy), WORLDSIZE_PLUGINS=BENCHMARKS).json("result.json")


def strategies(*in_the_gate: str) -> pytest.MarkDecorator:
    """Parametrize a test by all strategies; those that share code with others are marked slow."""
    marks = {name: [] if name in in_the_gate else [pytest.mark.slow] for name in STRATEGIES}
    return pytest.mark.parametrize("strategy", [pytest.param(name, marks=own) for name, own in marks.items()])


@strategies("ddp", "fsdp", "mesh")
def test_a_kill_at_each_point_of_a_step_costs_no_bit(train: Any, alone: Any, strategy: str) -> None:
    """One run loses a process at each point; the model has statistics, a counter, dropout, an average and metrics."""
    run = train(*disturbed(strategy, POINTS), WORLDSIZE_PLUGINS=BENCHMARKS)
    assert run.code == 0, run.error
    assert lost(run.json("run_manifest.json")) == len(POINTS)
    (attempt,) = run.json("run_manifest.json")["attempts"]
    actual, expected = run.json("result.json"), alone(strategy)
    assert attempt["steps"] == [0, expected["steps"]]
    assert {key: actual[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert 0 <= actual["goodput"]["fraction"] <= 1


@strategies("ddp", "hsdp")
def test_a_restart_after_a_step_half_done_costs_no_bit(train: Any, alone: Any, strategy: str) -> None:
    """One process ends before its update, its peer after it, while a checkpoint is being written."""
    points = ("step:update", "step:updated")
    kills = [f'{{action: kill, rank: {rank}, step: 5, point: "{point}"}}' for rank, point in enumerate(points)]
    size = f"cluster.processes={4 if strategy == 'hsdp' else 2}"
    saves = ("checkpoint.every=2", "launcher.max_restarts=1", f"faults=[{', '.join(kills)}]")
    options = [each for each in OPTIONS if not each.startswith("checkpoint.")]
    run = train(*options, *STRATEGIES[strategy], size, *saves, WORLDSIZE_PLUGINS=BENCHMARKS)
    assert run.code == 0, run.error
    first, second = run.json("run_manifest.json")["attempts"]
    assert first["exit_reason"] == "failed"
    assert second["steps"][0] in (2, 4)
    actual, expected = run.json("result.json"), alone(strategy)
    assert {key: actual[key] for key in SAME} == {key: expected[key] for key in SAME}
