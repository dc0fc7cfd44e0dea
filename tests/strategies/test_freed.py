"""A replica without references is freed, since a healing gang makes a new one in each membership."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from worldsize.core import RunContext, Strategy, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.zero import ZeRO
from worldsize.testing.training import BATCH, CHAIN, SEED
from worldsize.testing.worlds import run_in_worlds

STRATEGIES: list[Strategy] = [
    kind(reduce=reduce, on_failure="heal") for kind in (DDP, ZeRO, FSDP) for reduce in ("flat", "ordered")
]


@pytest.mark.parametrize(
    "strategy",
    [*STRATEGIES, Mesh(tensor=2, on_failure="heal")],
    ids=lambda each: f"{type(each).__name__} {each.reduce}",
)
def test_a_replica_is_freed_with_its_model_its_optimizer_and_its_reducer(strategy: Strategy) -> None:
    def kept(world: World) -> list[bool]:
        replica = strategy.replica(CHAIN, RunContext(world, logical_ranks=2))
        assert isinstance(replica, SynchronousReplica)
        order = Order(SEED, BATCH, 2, (0, 1) if isinstance(strategy, Mesh) else (world.rank,))
        replica.step(next(micro_batches(CHAIN.data("train"), order, world.device)))
        parts = [ref(each) for each in (replica.model, replica.train_state.optimizers[0], replica.reducer)]
        del replica
        gc.collect()
        return [part() is not None for part in parts]

    assert run_in_worlds(kept, 2) == [[False] * 3] * 2
