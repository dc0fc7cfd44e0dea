"""Processes that shard a model continue in new groups and places, with nothing left of the previous groups."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.strategies.memberships import worlds_in
from tests.strategies.test_sharded_accumulation import batch
from worldsize.core import Cluster, Reduction, RunContext, World
from worldsize.healing.groups import Connections, _list_sockets
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

CLUSTER = Cluster("test", 1, 4, "cpu", "gloo", timeout=60.0)
MEMBERSHIPS = ((0, 1, 2, 3), (0, 2, 3), (0, 2, 3, 1), (3, 1, 2, 0))


def trained(world: World, strategy: FSDP) -> tuple[list[float], int]:
    """Take two steps with clipping; return the norms, and the number of shards of a copy."""
    recipe = Chain(depth=2)
    torch.manual_seed(3)
    replica = strategy.replica(recipe, RunContext(world, logical_ranks=8))
    assert isinstance(replica, SynchronousReplica)
    norms = []
    for _ in range(2):
        replica.optimizer.zero_grad()
        replica.reducer.run([batch(recipe, rank) for rank in range(world.rank, 8, world.size)], replica._backward)
        norms.append(float(replica.reducer.clip(list(replica.model.parameters()), 0.1)))
        replica.optimizer.step()
    weight = next(replica.model.parameters())
    assert isinstance(weight, DTensor)
    return norms, weight.device_mesh.size()


def open_sockets(most: int) -> int:
    """Wait until at most ``most`` sockets are open, since gloo closes sockets in threads; return their number."""
    deadline = time.monotonic() + 120
    while (count := len(_list_sockets())) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return count


@pytest.mark.parametrize(
    ("reduce", "shard", "shards"),
    [
        ("flat", "all", [4, 3, 4, 4]),
        ("flat", 2, [2, 3, 2, 2]),
        ("ordered", "node", [2, 3, 2, 2]),
    ],
)
def test_shards_train_alike_in_each_membership(
    tmp_path: Path, reduce: Reduction, shard: object, shards: list[int]
) -> None:
    """Two nodes of two processes each; one process is away in the second membership."""
    strategy = FSDP(reduce=reduce, shard=shard, on_failure="heal")  # type: ignore[arg-type]

    def body(world: World) -> tuple[list[tuple[list[float], int]], int, int]:
        results, first = [], 0
        for place in worlds_in(MEMBERSHIPS, world, CLUSTER, tmp_path):
            results.append(trained(place, strategy))
            gc.collect()
            first = first or len(_list_sockets())
        return results, first, open_sockets(first)

    by_rank = run_in_worlds(body, 4, local_size=2)
    first = by_rank[0][0][0][0]
    for rank, (results, before, after) in enumerate(by_rank):
        for norms, _ in results:
            assert norms == first if reduce == "ordered" else norms == pytest.approx(first, rel=1e-5)
        assert [size for _, size in results] == [size for size in shards if rank != 1 or size != 3]
        assert after <= before


def test_connections_that_are_made_later_are_cut_too() -> None:
    def body(world: World) -> str:
        connections = Connections()
        with connections:
            dist.new_group([0, 1])
        with connections:
            later = dist.new_group([0, 1])
        assert isinstance(later, dist.ProcessGroup)
        dist.barrier(group=world.group)  # both have connected
        if world.rank == 0:
            connections.cut_sockets()
            with pytest.raises(RuntimeError) as error:
                dist.all_reduce(torch.ones(4), group=later)
            return type(error.value).__name__
        return "RuntimeError"

    assert run_in_worlds(body, 2) == ["RuntimeError"] * 2
