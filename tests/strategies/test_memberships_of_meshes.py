"""A mesh has the same bits for any number of data-parallel parts, and its processes go on in places of another."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.strategies.test_sharded_accumulation import batch
from worldsize.collectives.gather_full import gather_full
from worldsize.core import Cluster, Numerics, Replica, RunContext, Strategy, World
from worldsize.reproducibility.digest import state_digest, tensor_digests
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds
from worldsize.world.world import regrouped

LOGICAL_RANKS = 7
CLUSTER = Cluster("test", 1, 6, "cpu", "gloo", timeout=60.0)


def built(strategy: Strategy, world: World) -> Replica:
    torch.manual_seed(3)
    context = RunContext(world, Numerics(clip_norm=0.1), logical_ranks=LOGICAL_RANKS)
    return strategy.replica(Chain(), context)


def trained(strategy: Strategy, world: World) -> tuple[str, list[float]]:
    """Take two steps whose gradients are clipped; return the digest of the weights on the first rank, and the norms."""
    replica, recipe = built(strategy, world), Chain()
    part, parts = strategy.data_rank(world), strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    norms: list[Any] = []
    for _ in range(2):
        result = replica.step([batch(recipe, rank) for rank in range(part, LOGICAL_RANKS, parts)])
        norms.append(float(result.grad_norm))  # type: ignore[arg-type]
    return state_digest(tensor_digests(gather_full(replica.state()["model"], world))), norms


@pytest.mark.parametrize(
    ("strategy", "memberships"),
    [
        (Mesh(reduce="ordered", tensor=2, on_failure="heal"), ((0, 1, 2, 3), (0, 2), (0, 2, 4, 1, 3, 5))),
        (Mesh(reduce="ordered", pipeline=2, on_failure="heal"), ((0, 1, 2, 3), (0, 2), (0, 2, 4, 1, 3, 5))),
        (Mesh(reduce="ordered", tensor=2, pipeline=2, on_failure="heal"), ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7))),
    ],
    ids=["tensor", "pipeline", "both"],
)
def test_meshes_train_alike_in_each_membership(
    tmp_path: Path, strategy: Mesh, memberships: tuple[tuple[int, ...], ...]
) -> None:
    def body(world: World) -> list[tuple[str, list[float]]]:
        results = []
        for number, members in enumerate(memberships):
            if world.global_rank not in members:
                if dist.is_initialized():
                    dist.destroy_process_group()
                continue
            store = FileStore(str(tmp_path / str(number)), len(members))
            store.set_timeout(timedelta(seconds=60))
            world = regrouped(world, members, CLUSTER, store)
            results.append(trained(strategy, world))
            gc.collect()
        return results

    by_rank = run_in_worlds(body, 1 + max(map(max, memberships)))
    digests = [digest for digest, _ in by_rank[0]]
    assert digests == digests[:1] * len(memberships)
    first = by_rank[0][0][1]
    assert all(norms == first for results in by_rank for _, norms in results)
    if strategy.tensor == 1:
        ((alone, norms),) = run_in_worlds(lambda world: trained(Single(reduce="ordered"), world), 1)
        assert (digests[0], first) == (alone, norms)
