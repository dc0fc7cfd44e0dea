"""Schedules of pipelines: their order, their idle time, and any number of micro-batches."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

from worldsize.collectives.cost import bubble_share
from worldsize.core import ConfigError
from worldsize.strategies.mesh.schedule import Kind, PipelineSchedule, create_schedule, plan_passes, split_rounds

SIZES = [(ranks, stages) for ranks in (2, 3, 4) for stages in (1, 2, 3)]
SCHEDULES: list[tuple[Kind, int]] = [
    *(("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2), ("zero_bubble", 3)),
    *(("zbv", 2), ("dualpipev", 2)),
]
THIRDS = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}


def stages_of(ranks: int, stages: int) -> list[Any]:
    every = [SimpleNamespace(num_stages=ranks * stages, group_size=ranks, group_rank=0, submod=None)]
    return every * stages


def is_simulated(action: _Action) -> bool:
    """Return whether torch's simulation covers the action; it skips actions on sharded parameters."""
    return not re.search("SHARD|REDUCE", str(action.computation_type))


@pytest.mark.parametrize(("ranks", "stages"), SIZES)
@pytest.mark.parametrize("splits", [False, True])
def test_the_passes_are_those_of_torch(ranks: int, stages: int, splits: bool) -> None:
    for count in (ranks - 1, ranks, 2 * ranks, 2 * (ranks + 1)):
        kind: Any = ScheduleInterleavedZeroBubble if splits else ScheduleInterleaved1F1B
        for rank, order in kind(stages_of(ranks, stages), count).pipeline_order.items():
            own = plan_passes(rank, ranks, stages=stages, micro_batches=count, splits=splits)
            assert own == [action for action in order if action is not None]


@pytest.mark.parametrize(("kind", "stages"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_micro_batches_passes_without_a_deadlock(kind: Kind, stages: int, ranks: int) -> None:
    """Torch looks for a deadlock when it adds the messages, and again when it simulates all ranks."""
    rank_of_stage = PipelineSchedule(ranks, kind, stages, None).rank_of_stage
    for count in range(1, 4 * ranks):
        schedule: Any = create_schedule(kind, stages_of(ranks, stages), count)
        assert [schedule.stage_index_to_group_rank[stage] for stage in range(ranks * stages)] == rank_of_stage
        actions = {
            rank: [each for action in own for each in action.sub_actions or (action,) if is_simulated(each)]
            for rank, own in schedule.pipeline_order_with_comms.items()
        }
        _simulate_comms_compute(actions, lambda stage: rank_of_stage[stage], ranks * stages)


@pytest.mark.parametrize(("kind", "stages"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_idle_time_of_a_schedule_is_that_of_its_cost(kind: Kind, stages: int, ranks: int) -> None:
    """All passes take a third of a micro-batch's time in a stage: forward, and backward of inputs and of weights."""
    splits = PipelineSchedule(ranks, kind, stages, None).splits_backward
    count = {"zbv": 2 * ranks - 1, "dualpipev": 2 * ranks}.get(kind, ranks)  # the formula's lower bound
    schedule: Any = create_schedule(kind, stages_of(ranks, stages), count)
    left = {
        rank: [each for action in own if action for each in action.sub_actions or (action,)]
        for rank, own in schedule.pipeline_order.items()
    }
    clocks, ended = dict.fromkeys(left, 0), dict[tuple[bool, int, int], int]()
    while any(left.values()):
        for rank, own in left.items():
            while own and (begin := earliest(own[0], ended, last=ranks * stages - 1)) is not None:
                action = own.pop(0)
                clocks[rank] = max(clocks[rank], begin) + THIRDS[action.computation_type.name]
                if action.computation_type.name != "BACKWARD_WEIGHT":
                    ended[action.computation_type.name == "FORWARD", action.stage_index, number(action)] = clocks[rank]
    idle = 1 - 3 * count * stages / max(clocks.values())
    assert idle == pytest.approx(bubble_share(ranks, count, stages, splits_backward=splits))


def number(action: _Action) -> int:
    assert action.microbatch_index is not None
    return action.microbatch_index


def earliest(action: _Action, ended: dict[tuple[bool, int, int], int], *, last: int) -> int | None:
    """Return when the inputs of a pass are there, or None if they are not known to be."""
    stage, kind = action.stage_index, action.computation_type.name
    if kind == "BACKWARD_WEIGHT":
        return 0  # after the pass for its inputs, on the same rank
    needed = [(True, stage - 1)] if kind == "FORWARD" else [(True, stage), (False, stage + 1)]
    times = [ended.get((*each, number(action))) for each in needed if 0 <= each[1] <= last]
    return None if None in times else max((time for time in times if time is not None), default=0)


def test_rounds_differ_by_one_micro_batch_at_most() -> None:
    assert split_rounds(8, 4) == [4, 4]
    assert split_rounds(11, 4) == [6, 5]
    assert split_rounds(15, 4) == [5, 5, 5]
    assert split_rounds(3, 4) == [3]


@pytest.mark.parametrize(("kind", "stages"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_the_activations_that_the_cost_counts_and_not_those_of_the_whole_step(
    kind: Kind, stages: int, ranks: int
) -> None:
    plan = PipelineSchedule(ranks, kind, stages, None)
    for count in (2 * ranks, 8 * ranks):
        schedule: Any = create_schedule(kind, stages_of(ranks, stages), count)
        kept = max(most_kept(own) for own in schedule.pipeline_order.values())
        assert kept / stages == plan.count_kept(count)


def most_kept(order: list[_Action | None]) -> int:
    """Return the largest number of forward passes that still await their last backward pass."""
    most = now = 0
    for each in (part for action in order if action for part in action.sub_actions or (action,)):
        kind = each.computation_type.name
        now += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
        most = max(most, now)
    return most


def test_dual_pipes_need_a_micro_batch_for_each_stage() -> None:
    schedule = PipelineSchedule(4, "dualpipev", None, None)
    schedule.check_micro_batches(8)
    with pytest.raises(ConfigError, match="at least 8 micro-batches .* got 7.*strategy.schedule=zbv"):
        schedule.check_micro_batches(7)
