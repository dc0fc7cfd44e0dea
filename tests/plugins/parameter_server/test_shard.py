"""A shard's updates depend neither on the order of gradients nor on the server that makes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.parameter_server.gradients import Gradient, StepGradients, UnitLog
from plugins.parameter_server.row_store import create_row_update
from plugins.parameter_server.row_tables import RowGradients, RowRule, Rows, Table
from plugins.parameter_server.shard import Rule, Shard
from plugins.parameter_server.shard_parameters import ShardParameters
from plugins.parameter_server.sharding import plan_shards
from worldsize.checkpoint.manifest_tree import join_tensors, split_tensors
from worldsize.core import RowValues
from worldsize.net.frames import RefusedError
from worldsize.strategies.schedules import Schedule
from worldsize.strategies.train_state import OptimizerPart

RANKS, DIM = 4, 3
TABLE = Table("words.weight", 20, DIM, None, RowValues())
RULES = {
    "synchronous": Rule(RANKS),
    "committed": Rule(RANKS, requires_commit=True),
    "by unit": Rule(RANKS, synchronous=False),
}
Push = dict[str, Any]


def made(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def halving(optimizer: torch.optim.Optimizer) -> Schedule:
    return Schedule(torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))


def plateau(optimizer: torch.optim.Optimizer) -> Schedule:
    return Schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0))


def shard(rule: Rule, schedule: Callable[[torch.optim.Optimizer], Schedule] = halving) -> Shard:
    """Make a shard of one bucket and one table, with state in its optimizer and a schedule."""
    torch.manual_seed(1)
    model = nn.Linear(3, 5)
    optimizer = made(model)
    (buckets,) = plan_shards(dict(model.named_parameters()), 1, bucket_bytes=1 << 20, cut=True)
    rows = Rows(TABLE, RowRule(seed=3), 0, create_row_update(optimizer, optimizer.param_groups[0], TABLE.name))
    part = OptimizerPart(model, optimizer, schedule(optimizer))
    return Shard(ShardParameters(part, buckets, [rows], make=made), rule)


def pushes(steps: int) -> list[Push]:
    """Draw each logical rank's gradient of the bucket and of some rows, in step order."""
    generator = torch.Generator().manual_seed(2)

    def bucket() -> Tensor:
        return torch.randn(20, generator=generator)

    def rows() -> RowGradients:
        ids_n = torch.randperm(20, generator=generator)[:5].sort().values
        return ids_n, torch.randn(5, DIM, generator=generator)

    gradients: list[tuple[int, Callable[[], Gradient]]] = [(0, bucket), (1, rows)]
    return [
        {"index": index, "gradient": draw(), "step": step, "width": RANKS, "node": rank}
        for step in range(1, steps + 1)
        for rank in range(RANKS)
        for index, draw in gradients
    ]


def trained(on: Shard, push: Push) -> None:
    """Push a copy of a gradient, and commit the step once it waits for that."""
    gradient = push["gradient"]
    copied = gradient.clone() if isinstance(gradient, Tensor) else tuple(part.clone() for part in gradient)
    on.parameters.tables[0].pull(torch.arange(20))  # rows exist only after they have been read
    assert on.add_gradient(**{**push, "gradient": copied})
    on.commit_step(on.step + 1, 0.5)


def tensors(on: Shard) -> dict[str, Tensor]:
    return split_tensors(on.state())[0]


def copy_image(master: Shard, standby: Shard) -> None:
    image, values = split_tensors(master.export_image())
    standby.restore(join_tensors(values, {name: tensor.clone() for name, tensor in image.items()}))


def assert_same(one: Shard, other: Shard) -> None:
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("rule", RULES)
def test_a_standby_that_comes_within_a_step_ends_with_the_bits_of_the_master(rule: str) -> None:
    master, standby = shard(RULES[rule]), shard(RULES[rule])
    before, after = pushes(3)[:13], pushes(3)[13:]  # 13: within the second step, and within a logical rank
    for push in before:
        trained(master, push)
    copy_image(master, standby)
    assert not standby.add_gradient(**before[-1])
    for push in after:
        trained(master, push)
        trained(standby, push)
    assert (standby.step, standby.updates, standby.closed) == (master.step, master.updates, master.closed)
    assert master.step == 3
    assert_same(standby, master)


def test_a_standby_that_comes_after_an_evaluation_has_the_schedule_that_it_advanced() -> None:
    master, standby = (shard(RULES["committed"], plateau) for _ in range(2))
    gradients = iter(pushes(3))
    for step, value in enumerate((1.0, 2.0), 1):  # the second does not improve on the first
        for push in islice(gradients, 2 * RANKS):
            trained(master, push)
        master.parameters.advance_schedule_by(value, step=step)
    copy_image(master, standby)
    assert standby.parameters.lr == 0.05
    standby.parameters.advance_schedule_by(2.0, step=2)  # again, by a leader that did not receive an answer
    for push in gradients:
        trained(master, push)
        trained(standby, push)
    for each in (master, standby):
        each.parameters.advance_schedule_by(1.5, step=3)
        assert each.parameters.lr == 0.025
    assert_same(standby, master)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_parts_of_a_step_come_changes_no_bit(seed: int) -> None:
    expected, shuffled, order = shard(RULES["committed"]), shard(RULES["committed"]), pushes(1)
    for push in order:
        trained(expected, push)
    random.Random(seed).shuffle(order)
    for push in order:
        trained(shuffled, push)
    mine, theirs = tensors(shuffled), tensors(expected)
    assert expected.step == 1
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_part_that_overlaps_with_what_has_come_is_refused() -> None:
    gradients = StepGradients(1, logical_ranks=4, buckets=1, tables=0)
    assert gradients.add_contribution(0, torch.ones(2), step=1, width=4, node=2)
    with pytest.raises(RefusedError, match="part 0 of 2 of step 1 overlaps"):
        gradients.add_contribution(0, torch.ones(2), step=1, width=2, node=0)
    assert not gradients.add_contribution(0, torch.ones(2), step=1, width=4, node=2)
    assert not gradients.all_wait


def test_a_step_is_closed_when_nothing_up_to_it_is_missing() -> None:
    log = UnitLog(5, logical_ranks=2, gradients=1)
    for unit, closed in (((7, 0), 5), ((7, 1), 5), ((6, 1), 5), ((6, 0), 7)):
        assert log.record_gradient(unit, 0)
        assert log.is_complete(unit)
        log.close_steps()
        assert log.closed == closed
    assert not log.record_gradient((6, 0), 0)
