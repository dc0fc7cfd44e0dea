"""A rehearsal without peers matches real processes: the same calls, and as much memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.plan.rehearsal.composed import Real, isolated, really
from worldsize.config.settings import Settings
from worldsize.plan.dry_run import world_seen_by
from worldsize.plan.predictor import Given, Predictor
from worldsize.plan.rehearsal.calls import CallRecorder
from worldsize.plan.rehearsal.memory import MemoryRecorder
from worldsize.plan.rehearsal.rank import Recorders, Rehearsed, RehearsedPart, load_splits, take_part
from worldsize.plan.rehearsal.ranks import rehearse

pytestmark = pytest.mark.heavy

RANKS, PART = 4, RehearsedPart(steps=3)
MODEL = (
    "recipe=stdlib_lm",
    "recipe.width=64",
    "recipe.depth=1",
    "recipe.context=32",
    "batch_size=16",
    "evaluation.batches=4",
    "cluster.links.network={bandwidth: 1e9, latency: 1e-5}",
)


def both(settings: Settings) -> tuple[Sequence[Real], Sequence[Rehearsed], float]:
    """Return each rank's real and rehearsed results, and the planned memory."""
    rehearsed = rehearse(settings, range(RANKS), PART)
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
        ("strategy=fsdp", "activation_checkpointing=full", "logical_ranks=8"),
        pytest.param(("strategy=hsdp", "cluster.nodes=2"), marks=pytest.mark.slow),  # fsdp with two axes, like mesh
        ("strategy=mesh", "strategy.tensor=2", "strategy.sequence_parallel=true"),
        ("strategy=diloco", "strategy.inner_steps=2"),
    ],
    ids=" ".join,
)
def test_calls_and_memory_are_those_of_real_processes(options: tuple[str, ...]) -> None:
    real, rehearsed, planned = isolated(both, *MODEL, *options, f"cluster.processes={RANKS}")
    for there, own in zip(real, rehearsed, strict=True):
        assert own.error is None
        assert [call.described for call in own.calls] == there.calls
        assert own.peak.parts == pytest.approx(there.peak.parts, rel=0.05, abs=4096)
        assert own.building.nbytes == pytest.approx(there.building.nbytes, rel=0.05)
        assert own.evaluation.nbytes == pytest.approx(there.evaluation.nbytes, rel=0.05)
    most = max(each.most for each in real)
    assert 0.95 * most <= planned
    assert planned <= 1.05 * most or "diloco" in options[0]  # a DiLoCo round may need more than these steps


def counted(settings: Settings) -> tuple[int, int]:
    """Return the peak bytes of one rank, as counted by a rehearsal and by torch's allocator."""
    part = RehearsedPart(evaluates=False)
    (rehearsed,) = rehearse(settings, [1], part)
    data, now, most = load_splits(settings, part), 0, 0
    profiling = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiling as profiler, world_seen_by(1, settings, torch.device("cpu")) as world:
        take_part(settings, world, part, data, Recorders(CallRecorder(), MemoryRecorder()))
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return rehearsed.most, most


@pytest.mark.parametrize("options", [("ddp",), ("zero",), ("fsdp", "activation_checkpointing=full")])
def test_memory_is_what_torchs_own_allocator_hands_out(options: tuple[str, ...]) -> None:
    name, *others = options
    wide = ("recipe.width=128", "recipe.context=64", "batch_size=32")
    own, allocated = isolated(counted, *MODEL, *wide, f"strategy={name}", *others, f"cluster.processes={RANKS}")
    assert own == pytest.approx(allocated, rel=0.05)
