"""What is rehearsed without its peers is what real processes do with them: the same calls, and as much memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.planning.rehearsal.composed import isolated, really
from worldsize.config.settings import Settings
from worldsize.planning.predictor import Given, Predictor
from worldsize.planning.rehearsal.rank import Part
from worldsize.planning.rehearsal.ranks import rehearse

RANKS, PART = 4, Part(steps=3)
MODEL = (
    "recipe=stdlib_lm",
    "recipe.width=64",
    "recipe.depth=2",
    "recipe.context=32",
    "batch_size=16",
    "evaluation.batches=4",
    "cluster.links.network={bandwidth: 1e9, latency: 1e-5}",
)


def both(settings: Settings) -> tuple[Sequence[Any], Sequence[Any], float]:
    """Return calls, memory and memory of an evaluation of each rank: really, and rehearsed; and the memory planned."""
    rehearsed = []
    for each in rehearse(settings, range(RANKS), PART):
        assert each.error is None
        rehearsed.append(([call.described for call in each.calls], each.peak, each.evaluation))
    planned = Predictor(Given(compute_seconds=1.0)).forecast(settings).cost.memory_bytes
    return really(settings, PART, RANKS), rehearsed, planned


@pytest.mark.parametrize(
    "options",
    [
        ("strategy=ddp",),
        ("strategy=ddp", "cluster.nodes=2", "strategy.reduce=hierarchical"),
        ("strategy=ddp", "reproducibility=elastic", "logical_ranks=8"),
        ("strategy=zero",),
        ("strategy=fsdp",),
        ("strategy=fsdp", "strategy.activation_checkpointing=true", "logical_ranks=8"),
        ("strategy=hsdp", "cluster.nodes=2"),
        ("strategy=mesh", "strategy.tensor=2"),
        ("strategy=diloco", "strategy.inner_steps=2"),
    ],
    ids=" ".join,
)
def test_calls_and_memory_are_those_of_real_processes(options: tuple[str, ...]) -> None:
    real, rehearsed, planned = isolated(both, *MODEL, *options, f"cluster.processes={RANKS}")
    for (calls, peak, evaluation), (own_calls, own_peak, own_evaluation) in zip(real, rehearsed, strict=True):
        assert own_calls == calls
        assert own_peak.parts == pytest.approx(peak.parts, rel=0.05, abs=4096)
        assert own_evaluation.nbytes == pytest.approx(evaluation.nbytes, rel=0.05)
    most = max(peak.nbytes for _, peak, _ in real)
    assert 0.95 * most <= planned
    assert planned <= 1.05 * most or "diloco" in options[0]  # of which a round may need more than these steps do
