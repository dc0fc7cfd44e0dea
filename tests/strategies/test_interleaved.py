"""The interleaved schedule equals torch's for supported numbers of micro-batches, and extends it to others."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _simulate_comms_compute

from worldsize.strategies.mesh.schedule import create_interleaved_schedule, plan_passes, split_rounds

SIZES = [(ranks, stages) for ranks in (2, 3, 4) for stages in (1, 2, 3)]


def stages_of(ranks: int, stages: int) -> list[Any]:
    return [SimpleNamespace(num_stages=ranks * stages, group_size=ranks, group_rank=0) for _ in range(stages)]


def is_simulated(action: _Action) -> bool:
    """Return whether torch's simulation covers the action; it skips actions on sharded parameters."""
    return not re.search("SHARD|REDUCE", str(action.computation_type))


@pytest.mark.parametrize(("ranks", "stages"), SIZES)
def test_the_passes_are_those_of_torch(ranks: int, stages: int) -> None:
    for count in (ranks - 1, ranks, 2 * ranks, 2 * (ranks + 1)):
        torchs = ScheduleInterleaved1F1B(stages_of(ranks, stages), count)
        for rank, order in torchs.pipeline_order.items():
            own = plan_passes(rank, ranks, stages=stages, micro_batches=count)
            assert own == [action for action in order if action is not None]


@pytest.mark.parametrize(("ranks", "stages"), SIZES)
def test_any_number_of_micro_batches_passes_without_a_deadlock(ranks: int, stages: int) -> None:
    """Torch looks for a deadlock when it adds the messages, and again when it simulates all ranks."""
    for count in range(1, 4 * ranks):
        schedule = create_interleaved_schedule(stages_of(ranks, stages), count)
        actions = {rank: [*filter(is_simulated, own)] for rank, own in schedule.pipeline_order_with_comms.items()}
        _simulate_comms_compute(actions, lambda stage: stage % ranks, ranks * stages)


def test_rounds_differ_by_one_micro_batch_at_most() -> None:
    assert split_rounds(8, 4) == [4, 4]
    assert split_rounds(11, 4) == [6, 5]
    assert split_rounds(15, 4) == [5, 5, 5]
    assert split_rounds(3, 4) == [3]


def test_a_rank_keeps_the_activations_of_one_round_and_not_of_the_whole_step() -> None:
    def kept(count: int) -> int:
        """Return the largest number of forward passes on the first of 2 ranks that still await their backward pass."""
        most = now = 0
        for action in plan_passes(0, 2, stages=2, micro_batches=count):
            now += 1 if action.computation_type == _ComputationType.FORWARD else -1
            most = max(most, now)
        return most

    assert kept(31) == kept(5) == 6
