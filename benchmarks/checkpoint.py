"""What one save in every 50 steps costs: 10 M parameters with AdamW (120 MB of state), beside not saving.

uv run python benchmarks/checkpoint.py         # 2 gloo processes, three rounds
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict_saver import async_save

from elastic import Wide
from worldsize.checkpoints.retention import Retention
from worldsize.checkpoints.save import Saver
from worldsize.core import StateDict, World
from worldsize.engine.data import Order, micro_batches
from worldsize.strategies.ddp import DDP
from worldsize.testing.worlds import run_in_worlds

PROCESSES, BATCH, STEPS, AT = 2, 128, 50, 5
Save = Callable[[StateDict, int], None]
End = Callable[[], Any]


def _nothing(world: World, folder: Path) -> tuple[Save, End]:
    return lambda state, step: None, lambda: None


def _worldsize(world: World, folder: Path) -> tuple[Save, End]:
    saver = Saver(folder, world, dist.new_group(backend="gloo"), keep=Retention(last=2), facts={})  # type: ignore[arg-type]

    def save(state: StateDict, step: int) -> None:
        saver.save(state, step=step, facts={"metrics": {}})

    return save, saver.finish


def _torch_save(world: World, folder: Path) -> tuple[Save, End]:
    def save(state: StateDict, step: int) -> None:
        if world.rank == 0:
            torch.save(state, folder / f"step_{step}.pt")
        dist.barrier()

    return save, lambda: None


def _dcp(world: World, folder: Path) -> tuple[Save, End]:
    group, futures = dist.new_group(backend="gloo"), list[Any]()

    def save(state: StateDict, step: int) -> None:
        _end()
        futures.append(async_save(state, checkpoint_id=folder / f"step_{step}", process_group=group))  # type: ignore[arg-type]

    def _end() -> None:
        while futures:
            futures.pop().result()

    return save, _end


WAYS = {"no saves": _nothing, "worldsize": _worldsize, "torch.save on rank 0": _torch_save, "dcp.async_save": _dcp}


def measure(world: World, way: str, folder: Path) -> tuple[float, float]:
    """Seconds for all steps with the save that one of them begins, and seconds for which that step was held up."""
    warnings.simplefilter("ignore")
    recipe = Wide()
    replica = DDP().replica(recipe, world)
    batches = micro_batches(recipe.data("train"), Order(0, BATCH, world.size, (world.rank,)), world.device)
    save, end = WAYS[way](world, folder)
    for step in range(2):  # the first save makes buffers and threads
        replica.step(next(batches))
        save(replica.state(), step)
    end()
    dist.barrier()
    begun, held = time.perf_counter(), 0.0
    for step in range(STEPS):
        replica.step(next(batches))
        if step == AT:
            before = time.perf_counter()
            save(replica.state(), 100)
            held = time.perf_counter() - before
    end()
    dist.barrier()
    return time.perf_counter() - begun, held


def main(rounds: int = 3) -> None:
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS:
            print(f"round {number + 1}/{rounds}: {way}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as name:
                body = lambda world, way=way, name=name: measure(world, way, Path(name))  # noqa: E731
                found[way].append(run_in_worlds(body, PROCESSES, timeout=300)[0])
    table = Table("", "ms a step", "held up by a save, ms", title=f"{PROCESSES} processes, a save in {STEPS} steps")
    base = statistics.median(seconds for seconds, _ in found["no saves"])
    for way, rows in found.items():
        seconds, held = (statistics.median(column) for column in zip(*rows, strict=True))
        table.add_row(way, f"{seconds / STEPS * 1e3:.1f} ({seconds / base:.3f} ×)", f"{held * 1e3:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
