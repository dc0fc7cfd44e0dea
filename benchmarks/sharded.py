"""Measure sharded strategies on gloo processes of this machine: memory, and step time next to hand-written PyTorch.

uv run python benchmarks/sharded.py memory 4      # resident memory that each strategy adds, 4 processes
uv run python benchmarks/sharded.py step 2        # strategy=fsdp next to a loop with fully_shard, 2 processes
uv run python benchmarks/sharded.py begin 4       # peak memory of a process before the first step, 4 processes
uv run python benchmarks/sharded.py begin 4 600   # the same with a limit of 600 MB more per process
uv run python benchmarks/sharded.py train 4 7000  # train a 1.7 GB model on 4 processes with 7 GB in total (root)
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer

sys.path.append(str(Path(__file__).parents[1]))
from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.core import MicroBatch, RunContext, Strategy, World
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.zero import ZeRO
from worldsize.testing.worlds import run_in_worlds

REPOSITORY = Path(__file__).parents[1]
RECIPE = StdlibLM(512, 8, 8, 32, 0.0, 1000, partial(torch.optim.AdamW, lr=1e-3))
BATCH, STEPS = 4, 6
CONTENDERS: Mapping[str, Strategy] = {
    "ddp": DDP(),
    "zero": ZeRO(),
    "fsdp": FSDP(),
    "fsdp, reshard_after_forward=false": FSDP(reshard_after_forward=False),
}


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens_bt = torch.randint(0, 256, (BATCH, RECIPE.context + 1), generator=generator)
        yield tokens_bt[:, :-1], tokens_bt[:, 1:]


# ---------------------------------------------------------------- memory


def resident() -> int:
    """Return freed memory to the system; return the resident bytes of this process."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of parameters, gradients and optimizer state, each storage counted once."""
    storages = {}
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            if isinstance(tensor, Tensor):
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def added(strategy: Strategy, world: World) -> tuple[int, int]:
    """Train a few steps; return the bytes of training state, and the growth of this process's memory in bytes."""
    before, source = resident(), batches()
    replica = strategy.replica(RECIPE, RunContext(world))
    assert isinstance(replica, SynchronousReplica)
    for _ in range(STEPS):
        replica.step([MicroBatch(next(source), 1)])
    optimizer = replica.optimizer
    return held(replica.model, getattr(optimizer, "optim", optimizer)), resident() - before


def memory(processes: int) -> None:
    size = 4 * sum(parameter.numel() for parameter in RECIPE.model().parameters())
    title = f"{size / 1e6:.0f} MB of parameters, AdamW, {processes} processes"
    drawn = Table("", "parameters, gradients, optimizer", "to ddp", "process grew by", "to ddp", title=title)
    sizes = {
        name: max(run_in_worlds(partial(added, strategy), processes, timeout=300))
        for name, strategy in CONTENDERS.items()
    }
    for name, (kept, grown) in sizes.items():
        cells = [
            (f"{now / 1e6:,.0f} MB", f"{now / ddp:.2f} ×") for now, ddp in zip((kept, grown), sizes["ddp"], strict=True)
        ]
        drawn.add_row(name, *cells[0], *cells[1])
    Console().print(drawn)


# ---------------------------------------------------------------- time of a step


def by_hand(world: World) -> Callable[[], object]:
    model = RECIPE.model()
    assert world.group is not None
    mesh = DeviceMesh.from_group(world.group, "cpu")
    for block in RECIPE.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, source = torch.optim.AdamW(model.parameters(), lr=1e-3), batches()

    def step() -> None:
        inputs, targets = next(source)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def ours(world: World) -> Callable[[], object]:
    replica, source = FSDP().replica(RECIPE, RunContext(world)), batches()
    return lambda: replica.step([MicroBatch(next(source), 1)])


def timed(world: World, rounds: int = 12) -> list[float]:
    """Return the median seconds per step, hand-written and ours, in alternating rounds of four steps."""
    contenders = [by_hand(world), ours(world)]
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for contender, seconds in zip(contenders, times, strict=True):
            begun = time.perf_counter()
            for _ in range(4):
                contender()
            if number:  # skip the warm-up round
                seconds.append((time.perf_counter() - begun) / 4)
    return [statistics.median(seconds) for seconds in times]


def step(processes: int) -> None:
    hand, own = run_in_worlds(timed, processes, timeout=600)[0]
    drawn = Table("", "step, ms", "to hand-written", title=f"FSDP2 on {processes} processes")
    drawn.add_row("hand-written", f"{1e3 * hand:.1f}", "1.00 ×")
    drawn.add_row("strategy=fsdp", f"{1e3 * own:.1f}", f"{own / hand:.3f} ×")
    Console().print(drawn)


# ---------------------------------------------------------------- memory before the first step

LARGE = replace(RECIPE, width=1024, depth=16)


def figure(name: str) -> int:
    """Return field ``name`` of ``/proc/self/status``, such as "VmRSS", in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def made_whole(world: World) -> object:
    """Build the whole model on every process, then shard it, as most programs do."""
    assert world.group is not None
    model, mesh = LARGE.model(), DeviceMesh.from_group(world.group, "cpu")
    for block in LARGE.blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def begun(make: Callable[[World], object], limit_mb: int, world: World) -> tuple[int, float, int]:
    """Build a model with ``make``; return the memory growth (peak), seconds and shards in bytes.

    Returns (-1, 0, -1) if ``limit_mb`` was exceeded.
    """
    fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (world.size,)))  # warm up imports
    if limit_mb:
        resource.setrlimit(resource.RLIMIT_DATA, (figure("VmData") + limit_mb * 10**6,) * 2)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, begins = figure("VmRSS"), time.perf_counter()
    try:
        model = make(world)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return -1, 0.0, -1
    seconds = time.perf_counter() - begins
    module = model if isinstance(model, nn.Module) else cast("SynchronousReplica", model).model
    shards = sum(cast("DTensor", each).to_local().nbytes for each in module.parameters())
    return figure("VmHWM") - before, seconds, shards


def begin(processes: int, limit_mb: int = 0) -> None:
    size = sum(parameter.nbytes for parameter in LARGE.model().parameters())
    title = f"{size / 1e6:.0f} MB of parameters, {processes} processes"
    drawn = Table("", "shards", "process grew by at most", "seconds", title=title)
    makers = {
        "whole, then fully_shard": made_whole,
        "strategy=fsdp": lambda world: FSDP().replica(LARGE, RunContext(world)),
    }
    for name, make in makers.items():
        grown, seconds, shards = max(run_in_worlds(partial(begun, make, limit_mb), processes, timeout=600))
        cells = (f"{shards / 1e6:,.0f} MB", f"{grown / 1e6:,.0f} MB", f"{seconds:.1f}")
        drawn.add_row(name, *(cells if grown >= 0 else ("", f"more than {limit_mb} MB: no memory", "")))
    Console().print(drawn)


# ---------------------------------------------------------------- a whole run

SGD = ("optimizer=sgd", "optimizer.momentum=0")
MODEL = ("recipe.width=1536", "recipe.depth=15", "recipe.context=16", "recipe.test_bytes=2000")


@contextmanager
def memory_group(limit_mb: int) -> Iterator[Path]:
    """Create a control group whose processes may use ``limit_mb`` MB of memory in total. Requires root."""
    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.exists() else v1.parent) / f"worldsize_{os.getpid()}"
    folder.mkdir()
    (folder / ("memory.limit_in_bytes" if v1.exists() else "memory.max")).write_text(str(limit_mb * 10**6))
    try:
        yield folder
    finally:
        folder.rmdir()


def trained(recipe: str, processes: int, limit_mb: int) -> tuple[str, str, str]:
    """Train two steps; return the state digest or failure, the peak memory of all processes, and the seconds."""
    job = ("steps=2", "checkpoint.at_end=false", "logger=none")
    words = [f"recipe={recipe}", f"batch_size={processes}", *MODEL, *SGD, *job]
    command = [sys.executable, str(REPOSITORY / "train.py"), *words, "strategy=fsdp", f"cluster.processes={processes}"]
    with memory_group(limit_mb) as group, TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = subprocess.run(
            ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command],
            cwd=folder,
            env={
                **os.environ,
                "WORLDSIZE_PLUGINS": str(REPOSITORY / "benchmarks"),
                "MALLOC_MMAP_THRESHOLD_": "4000000",  # glibc returns larger blocks to the system at once
            },
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - begun
        peaks = (group / name for name in ("memory.max_usage_in_bytes", "memory.peak"))
        peak = next(int(path.read_text()) for path in peaks if path.exists())
        results = [json.loads(path.read_text()) for path in Path(folder).rglob("result.json")]
    digests = [result["state_digest"] for result in results if "state_digest" in result]
    failure = next((line for line in done.stderr.splitlines() if "SIGKILL" in line), f"exit code {done.returncode}")
    return digests[0][:16] if digests else failure, f"{peak / 1e6:,.0f} MB", f"{seconds:.0f}"


def train(processes: int, limit_mb: int) -> None:
    drawn = Table("", "ended with", "most memory", "seconds", title=f"{processes} processes, {limit_mb} MB together")
    for name, recipe in {"made whole": "whole_lm", "made in parts": "stdlib_lm"}.items():
        drawn.add_row(name, *trained(recipe, processes, limit_mb))
    Console().print(drawn)


if __name__ == "__main__":
    measures: Mapping[str, Callable[..., None]] = {"memory": memory, "step": step, "begin": begin, "train": train}
    measures[sys.argv[1]](*map(int, sys.argv[2:]))
