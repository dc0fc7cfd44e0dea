"""Runs a strategy's own steps on one rank whose peers are not there: what it computes, without communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, HashStore
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.futures import Future

from worldsize.config.settings import Settings
from worldsize.core import Cluster, RunContext, World
from worldsize.data.loader import collate_of, micro_batches
from worldsize.planning.concurrency import first_device, medians, run_concurrently
from worldsize.strategies.alone import alone

_BACKEND = "silent"
_SECONDS = 0.25  # of steps, at least


def slowdown(settings: Settings, kind: str, *, at_once: int = 1, threads: int = 1) -> float:
    """Measure how many times as long as one process by itself the first rank computes in a step.

    Both take the same micro-batches; hooks, encoding and copies are included, what others do is left out. It is
    the ratio of medians of eleven steps each or more, in turns, on this machine's first device of a ``kind`` ("cpu",
    "cuda"), where ``at_once`` processes of so many ``threads`` do the same: what many copy on few cores takes longer
    than as many times what one does.

    Raises:
        RuntimeError: the strategy communicates in a way that :class:`SilentGroup` does not know.
    """
    return run_concurrently(at_once, threads, _slowdown, settings, first_device(kind))


def _slowdown(settings: Settings, device: torch.device) -> float:
    recipe, strategy = settings.recipe, settings.strategy
    with silent_world(settings.cluster, device) as world:
        single = alone(recipe, recipe.model().to(device), RunContext(World.alone(device), settings.numerics))
        replica = strategy.replica(recipe, RunContext(world, settings.numerics))
        replicas, part = (single, replica), settings.data_part(world)
        order, collate = settings.order(part.rank, part.size), collate_of(recipe)
        batches = micro_batches(recipe.data("train"), order, device, collate=collate)
        turns = ([partial(replica.step, each) for replica in replicas] for each in batches)
        by_itself, under_it = medians(turns, device, _SECONDS)
    return under_it / by_itself


@contextmanager
def silent_world(cluster: Cluster, device: torch.device) -> Iterator[World]:
    """Open a world as the first rank of ``cluster`` sees it, with groups whose other members are absent."""
    size, per_node = cluster.processes, cluster.processes_per_node
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _group, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=HashStore(), rank=0, world_size=size)
    groups: dict[str, Any] = {"all": dist.group.WORLD, "worker": dist.group.WORLD}
    if per_node < size:
        groups["node"] = dist.new_group(list(range(per_node)))
        groups["across"] = dist.new_group(list(range(0, size, per_node)))
    yield World("worker", 0, size, 0, size, 0, 0, device, groups)
    dist.destroy_process_group()


def _group(store: object, rank: int, size: int, timeout: object) -> ProcessGroup:
    return SilentGroup(rank, size)


@final
class SilentGroup(ProcessGroup):
    """A process group whose collectives end at once, as if all ranks had the same tensors."""

    def getBackendName(self) -> str:  # noqa: N802
        """Name under which the backend is registered with torch.distributed."""
        return _BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]  # by which compiled operators find it
        return dist.distributed_c10d._world.pg_names[self]

    def barrier(self, *args: Any) -> Work:
        return _done([])

    def broadcast(self, tensors: list[Tensor], *args: Any) -> Work:  # type: ignore[override]
        return _done(tensors)

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: AllreduceOptions
    ) -> Work:
        return _done([self._reduced(tensor, opts) for tensor in tensors])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work:  # type: ignore[override]
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *args: Any) -> Work:  # type: ignore[override]
        for parts, part in zip(outputs, inputs, strict=True):
            for each in parts:
                each.copy_(part)
        return _done(outputs)

    def all_gather_single(self, whole: Tensor, part: Tensor, *args: Any) -> Work:
        whole.view(self.size(), -1).copy_(part.flatten().clone())  # it may be a part of the whole
        return _done([whole])

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any) -> Work:
        part.view(-1).copy_(whole.view(self.size(), -1)[self.rank()])
        return _done([self._reduced(part, opts)])

    def _reduced(self, tensor: Tensor, opts: Any) -> Tensor:
        return tensor.mul_(self.size()) if opts.reduceOp == ReduceOp.SUM else tensor

    def all_to_all_single(self, theirs: Tensor, mine: Tensor, *args: Any) -> Work:
        theirs.copy_(mine)
        return _done([theirs])


def _done(result: object) -> Work:
    future: Future[object] = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)
