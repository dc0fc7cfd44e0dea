"""What is rehearsed without its peers is what real processes do with them: the same calls, and as much memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.planning.rehearsal.composed import isolated
from worldsize.config.settings import Settings
from worldsize.core import World
from worldsize.planning.rehearsal.calls import CallRecorder
from worldsize.planning.rehearsal.memory import MemoryRecorder
from worldsize.planning.rehearsal.rank import Part, Recorders, data_of, take_part
from worldsize.planning.rehearsal.ranks import rehearse
from worldsize.testing.worlds import run_in_worlds

Ranks = list[tuple[list[str], Mapping[str, int], int]]
RANKS, PART = 4, Part(steps=3)
MODEL = (
    "recipe=stdlib_lm",
    "recipe.width=64",
    "recipe.depth=2",
    "recipe.context=32",
    "batch_size=16",
    "evaluation.batches=4",
)


def both(settings: Settings) -> tuple[Ranks, Ranks]:
    """Return of each rank its calls in order, its memory by parts, and that of an evaluation: really, and rehearsed."""
    data = data_of(settings, PART)

    def body(world: World) -> tuple[list[str], Mapping[str, int], int]:
        calls, memory = CallRecorder(), MemoryRecorder()
        with memory.recording(), calls:
            take_part(settings, world, PART, data, Recorders(calls, memory))
        evaluation = memory.log.evaluation_peak()
        assert evaluation is not None
        return [call.described for call in calls.calls], memory.log.peak().parts, evaluation.nbytes

    real = run_in_worlds(body, RANKS, local_size=RANKS // settings.cluster.nodes)
    rehearsed = []
    for each in rehearse(settings, range(RANKS), PART):
        assert each.error is None
        assert each.evaluation is not None
        rehearsed.append(([call.described for call in each.calls], each.peak.parts, each.evaluation.nbytes))
    return real, rehearsed


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
    real, rehearsed = isolated(both, *MODEL, *options, f"cluster.processes={RANKS}")
    for (calls, parts, evaluation), (own_calls, own_parts, own_evaluation) in zip(real, rehearsed, strict=True):
        assert own_calls == calls
        assert own_parts == pytest.approx(parts, rel=0.05, abs=4096)
        assert own_evaluation == pytest.approx(evaluation, rel=0.05)
