"""Schedules of pipelines: their order, their idle time, and any number of micro-batches."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.collectives.cost import bubble_share
from worldsize.core import ConfigError
from worldsize.strategies.mesh.pass_table import PassTable
from worldsize.strategies.mesh.schedule import Kind, PipelineSchedule, create_schedule, plan_passes, split_rounds
from worldsize.strategies.mesh.strategy import Mesh

SIZES = [(ranks, stages) for ranks in (2, 3, 4) for stages in (1, 2, 3)]
SCHEDULES: list[tuple[Kind, int]] = [
    *(("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2), ("zero_bubble", 3)),
    *(("zbv", 2), ("dualpipev", 2)),
]


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
    """All passes take a third of a micro-batch's time in a stage: forward, and backward of inputs and of weights.

    The schedule is written as a table, and read again.
    """
    splits = PipelineSchedule(ranks, kind, stages, None).splits_backward
    count = {"zbv": 2 * ranks - 1, "dualpipev": 2 * ranks}.get(kind, ranks)  # the formula's lower bound
    schedule: Any = create_schedule(kind, stages_of(ranks, stages), count)
    table = PassTable.from_csv(write_csv(schedule), ranks)
    assert table.idle_share == pytest.approx(bubble_share(ranks, count, stages, splits_backward=splits))
    assert (table.micro_batches, table.splits_backward) == (count, splits)
    plan = PipelineSchedule(ranks, kind, stages, None)
    assert (table.rank_of_stage, table.count_kept()) == (plan.rank_of_stage, plan.count_kept(count))


def write_csv(schedule: Any) -> str:
    rows = schedule.pipeline_order.values()
    passes = [[each for action in row if action for each in action.sub_actions or (action,)] for row in rows]
    return "\n".join(",".join(map(str, row)) for row in passes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "my.csv",
            r"=my.csv: expected the table itself, not a path, because the run records its text. Pass .*cat my.csv",
        ),
        ("0F0,0B0", "has 1 rows, but strategy.pipeline=2 requires one for each rank. Change the rows"),
        (
            "0F0,0B0\n1F0,1X0",
            "row 2, column 2: '1X0' is not a pass. Write a stage, F, B, I or W, and a micro-batch, such",
        ),
        ("0F0,0B0\n0F1,0B1", "has stage 0 in several rows. Assign it to one rank."),
        ("0F0,0B0\n2F0,2B0", "has the stages 0, 2. Number them from 0 without gaps."),
        ("0F0,0F1,0B0,0B1\n1F0,1B0", "the forward passes of stage 1 miss micro-batch 1. List each of the 2 micro-b"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B0,1B1", "the backward passes of stage 1 repeat micro-batch 0"),
        ("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0", "the backward passes of stage [01] are not in the order of micro-batches"),
        ("0F0,0B0\n1F0,1I0", "stage 1 needs a W pass for each I pass, in the same order. Use B for a backward pass in"),
        (
            "0F0,0B0\n1W0,1F0,1I0",
            "stage 1 has the passes W, F, I for micro-batch 0; expected F, B or F, I, W, in that order",
        ),
        (
            "0F0,0F1,0B0,0B1\n1F0,1F1,1I0,1B1,1W0",
            "last backward passes of stage 1 are not in the order of micro-batches",
        ),
        ("", "has 0 rows, but strategy.pipeline=2 requires one for each rank. Change the rows"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "passes wait for each other: 0B0 on rank 0, 1F1 on rank 1. Change their"),
    ],
)
def test_a_table_of_passes_that_cannot_run_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="^strategy.schedule_csv.*" + said):
        Mesh(pipeline=2, schedule_csv=text)


def test_a_table_of_passes_fixes_the_micro_batches_and_the_stages() -> None:
    text = " 0F0, 0F1,, 0B0,0B1\n1F0,1B0,1F1,1B1\n\n"
    strategy = Mesh(pipeline=2, schedule_csv=text)
    assert strategy.default_micro_batches == 2
    with pytest.raises(
        ConfigError, match="has 2 micro-batches per data-parallel rank, but the run has 4. Set logical_"
    ):
        strategy.check_micro_batches(4)
    with pytest.raises(ConfigError, match="requires a pipeline. Set strategy.pipeline to its number of rows, or"):
        Mesh(schedule_csv="0F0,1F0,1B0,0B0")
    shared = StdlibLM(32, 2, 2, 8, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    tied, model = Mesh(pipeline=2, schedule_csv=text, reduce="ordered"), shared.model()
    with pytest.raises(ConfigError, match="a weight shared by several pipeline ranks, such as a tied embedding"):
        tied.check_built(shared, model, shared.optimizer(model))
    with pytest.raises(ConfigError, match="determines the stages of each rank. Set strategy.stages_per_rank=null"):
        Mesh(pipeline=2, schedule_csv=text, stages_per_rank=1)
    with pytest.raises(ConfigError, match="not supported with strategy.on_failure=heal, since its number of micro-ba"):
        Mesh(pipeline=2, schedule_csv=text, on_failure="heal")


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
