"""Measure the cost of a Python ``ProcessGroup`` that wraps gloo's, and which of torch's waits it intercepts.

uv run python benchmarks/group_wrapper.py
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import World
from worldsize.testing.worlds import run_in_worlds

CPU, WIDTH, LAYERS, STEPS = torch.device("cpu"), 64, 20, 40
SEEN = Counter[str]()
STARTS = (
    *("allreduce", "broadcast", "barrier", "allgather", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single", "send", "recv"),
)


class WrappedWork(Work):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        SEEN["waits"] += 1
        return self.work.wait()

    def get_future(self) -> Any:
        SEEN["futures"] += 1
        return self.work.get_future()


class Wrapper(ProcessGroup):
    group_name: Any = ""  # device meshes look up groups by this name

    def __init__(self, inner: ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def getBackendName(self) -> str:  # noqa: N802 - called by torch
        return "wrapped"

    def size(self) -> int:
        return self.inner.size()

    def rank(self) -> int:
        return self.inner.rank()


def _forward(name: str) -> Callable[..., Work]:
    def call(self: Wrapper, *args: Any, **options: Any) -> Work:
        SEEN["collectives"] += 1
        return WrappedWork(getattr(self.inner, name)(*args, **options))

    return call


for each in STARTS:
    setattr(Wrapper, each, _forward(each))


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    group = ProcessGroup(store, rank, size)
    group._register_backend(CPU, ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout))
    return Wrapper(group)


def chain(layers: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def ddp(group: ProcessGroup) -> nn.Module:
    return DistributedDataParallel(chain(), process_group=group)


def sharded(group: ProcessGroup) -> nn.Module:
    model, mesh = chain(), init_device_mesh("cpu", (group.size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return cast("nn.Module", fully_shard(model, mesh=mesh))


def divided(group: ProcessGroup) -> nn.Module:
    model, mesh = chain(2), init_device_mesh("cpu", (group.size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None)


def measured(model: Callable[[ProcessGroup], nn.Module], wraps: bool, world: World) -> tuple[float, int, str]:
    """Return a step's CPU milliseconds, its number of Python calls, and the calls seen by the wrapper, as text."""
    if wraps:
        dist.Backend.register_backend("wrapped", create, devices=["cpu"])
        store = dist.PrefixStore("wrapped", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group("wrapped", store=store, rank=world.rank, world_size=world.size)
    assert dist.group.WORLD is not None
    trained, batch = model(dist.group.WORLD), torch.randn(32, WIDTH)
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        trained(batch).sum().backward()
        optimizer.step()

    seconds = []
    for _ in range(STEPS):
        SEEN.clear()
        begun = time.process_time()
        step()
        seconds.append(time.process_time() - begun)
    seen = ", ".join(f"{number} {name}" for name, number in SEEN.items())
    with cProfile.Profile() as profile:
        step()
    calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return statistics.median(seconds[5:]) * 1e3, calls, seen


def main() -> None:
    table = Table("a step of", "processor ms: gloo", "wrapped", "Python calls: gloo", "wrapped", "the wrapper sees")
    for model in (ddp, sharded, divided):
        print(model.__name__, file=sys.stderr)
        plain, wrapped = (run_in_worlds(partial(measured, model, wraps), 2, timeout=600)[0] for wraps in (False, True))
        table.add_row(
            model.__name__, f"{plain[0]:.1f}", f"{wrapped[0]:.1f}", str(plain[1]), str(wrapped[1]), wrapped[2]
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
