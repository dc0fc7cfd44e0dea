"""All ranks run the collectives of a sharded model in one order, also if it changes between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import Batch, Cluster, ConfigError, MicroBatch, Reduction, RunContext, Update, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.healing.groups import Meetings, rebuild_groups
from worldsize.strategies import unit_collectives as unit_order_module
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.sharded_reducer import Units
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.unit_collectives import UnitOrder
from worldsize.strategies.unit_gradients import UnitGradients
from worldsize.testing.recipes import Chain
from worldsize.testing.update_loops import SharedLoss
from worldsize.testing.worlds import run_in_worlds

CLUSTER = Cluster("test", 1, 2, "cpu", "gloo", threads=1, timeout=60.0)
GATHER, SCATTER, OTHER_GATHER, OTHER_SCATTER = range(4)  # events of two units


def never() -> None: ...


def unit_order(world: World) -> UnitOrder:
    assert world.group is not None
    return UnitOrder(nn.Module(), world.group)


def run_step(order: UnitOrder, events: Sequence[int]) -> None:
    with Units(UnitGradients(nn.Module(), None), order).step():
        for event in events:
            order.check_event(event)


@pytest.mark.parametrize("place", ["folder", "server"])
def test_units_change_their_order_in_a_gang_that_heals(tmp_path: Path, place: str) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    url = f"file://{tmp_path}/met" if place == "folder" else f"tcp://127.0.0.1:{server.port}"

    def run_steps(world: World) -> bool:
        meetings = Meetings(url, never, timedelta(seconds=60))
        order = unit_order(rebuild_groups(world, range(world.size), CLUSTER, meetings.create_store(0)))
        run_step(order, [GATHER, OTHER_GATHER, OTHER_SCATTER, SCATTER])
        run_step(order, [OTHER_GATHER, OTHER_SCATTER])
        run_step(order, [OTHER_GATHER, OTHER_SCATTER])
        return True

    assert run_in_worlds(run_steps, 2) == [True, True]


@dataclass(frozen=True)
class OneMore(Chain):
    """Uses its last layer only for positive inputs; ranks average the buffers of its norm layer."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Linear(4, 1))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, nn.Sequential)
        out: Tensor = model[:3](batch)
        if batch.max() > 0:
            out = out + model[3](batch)
        return out.square().mean()


@pytest.mark.parametrize("late", [False, True], ids=["in its loss", "after its backward pass"])
def test_a_rank_that_computes_one_unit_more_is_refused_in_its_first_step(late: bool) -> None:
    def refusal(world: World) -> str:
        replica = FSDP(wrap="size", wrap_parameters=1).replica(OneMore(), RunContext(world))
        assert isinstance(replica, SynchronousReplica)
        has_more = world.rank == 0

        def backward(batch: MicroBatch, scale: float) -> LossRecord:
            record = replica._backward(batch, scale)
            if late and has_more:
                assert isinstance(replica.model, nn.Sequential)
                replica.model[3](batch.data)
            return record

        data = torch.arange(8.0).view(2, 4) - (0 if has_more and not late else 100)
        with pytest.raises(ConfigError) as error:
            replica.reducer.run([MicroBatch(data, world.rank, 1)], backward)
        return str(error.value)

    one, other = run_in_worlds(refusal, 2)
    assert "this process computes 3, but others do not" in one
    assert "this process has computed all units of the model, but other processes compute another one" in other


@dataclass(frozen=True)
class SecondMore(SharedLoss):
    """Computes one more part of the model on one rank, before the second update of a step."""

    more: bool = False

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1))

    def optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        assert isinstance(model, nn.Sequential)
        return {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in zip("ab", model, strict=False)}

    def schedules(self, optimizers: object) -> dict[str, LRScheduler]:
        return {}

    def updates(self, model: nn.Module, batch: Batch, step: int) -> Iterable[Update]:
        assert isinstance(model, nn.Sequential)
        yield "a", model[:2](batch[0]).square().mean()
        out = model[:2](batch[0])
        if self.more:
            out = out + model[2](batch[0])
        yield "b", out.square().mean()


@pytest.mark.parametrize("reduce", ["flat", "ordered"])
def test_a_rank_that_computes_one_unit_more_before_a_later_update_is_refused(reduce: Reduction) -> None:
    def refusal(world: World) -> tuple[str, bool]:
        recipe = SecondMore(more=world.rank == 0)
        replica = FSDP(reduce=reduce, wrap="size", wrap_parameters=1).replica(recipe, RunContext(world))
        batches = micro_batches(recipe.data("train"), Order(3, 24, 2, (world.rank,)), world.device)
        weights = [get_local_shard(each) for name, each in replica.trained_weights().items() if name.startswith("1.")]
        before = [each.clone() for each in weights]
        with pytest.raises(ConfigError) as error:
            replica.step(next(batches))
        return str(error.value), all(map(torch.equal, weights, before))

    (one, kept), (other, kept_too) = run_in_worlds(refusal, 2)
    assert "this process computes 2, but others do not" in one
    assert "this process has computed all units of the model, but other processes compute another one" in other
    assert kept
    assert kept_too


def test_collectives_after_a_step_that_failed_are_not_compared() -> None:
    def run_steps(world: World) -> bool:
        order = unit_order(world)
        with pytest.raises(ConnectionError), Units(UnitGradients(nn.Module(), None), order).step():
            raise ConnectionError("the gang has ended")
        order.check_event(GATHER if world.rank == 0 else OTHER_GATHER)
        return True

    assert run_in_worlds(run_steps, 2) == [True, True]


def test_orders_that_never_recur_are_forgotten_by_all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_order_module, "_MOST", 15)

    def run_steps(world: World) -> list[int]:
        order, remembered = unit_order(world), []
        for events in permutations([GATHER, OTHER_GATHER, OTHER_SCATTER, SCATTER]):
            run_step(order, events)
            remembered.append(len(order._next))
        return remembered

    one, other = run_in_worlds(run_steps, 2)
    assert one == other
    assert max(one) <= 20
