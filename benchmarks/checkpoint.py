"""Measure the cost of one checkpoint per 50 steps: 10 M parameters with AdamW (120 MB of state).

uv run python benchmarks/checkpoint.py         # 2 gloo processes, four rounds
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict_saver import async_save

from elastic import Wide
from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.save import Saver
from worldsize.core import Replica, RunContext, StateDict, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.strategies.ddp import DDP
from worldsize.testing.worlds import run_in_worlds

PROCESSES, BATCH, STEPS, AT = 2, 256, 50, 5
Save = Callable[[StateDict, int], None]  # (state, step)
End = Callable[[], Any]


def _nothing(world: World, folder: Path) -> tuple[Save, End]:
    return lambda state, step: None, lambda: None


def _worldsize(world: World, folder: Path) -> tuple[Save, End]:
    saver = Saver(folder, world, dist.new_group(backend="gloo"), keep=Retention(last=2))  # type: ignore[arg-type]

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


def measure(world: World, root: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return, by way of saving, (seconds of all steps, seconds blocked by the save) of each round.

    The ways alternate in one process, since two identical processes differ by more than the cost of a save.
    """
    warnings.simplefilter("ignore")
    recipe = Wide()
    replica = DDP().replica(recipe, RunContext(world))
    batches = micro_batches(recipe.data("train"), Order(0, BATCH, world.size, (world.rank,)), world.device)
    ways = {name: way(world, root / str(number)) for number, (name, way) in enumerate(WAYS.items())}
    rows_of: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (save, end) in ways.items():
            rows_of[name].append(_steps(replica, batches, lambda state, turn=turn, save=save: save(state, turn), end))
            if world.rank == 0:
                print(f"round {turn}/{rounds}: {name}", file=sys.stderr)
    return {name: rows[1:] for name, rows in rows_of.items()}  # the first save creates buffers and threads


def _steps(replica: Replica, batches: Iterator[Any], save: Callable[..., None], end: End) -> tuple[float, float]:
    dist.barrier()
    begun, held = time.perf_counter(), 0.0
    for step in range(STEPS):
        replica.step(next(batches))
        if step == AT:
            before = time.perf_counter()
            save(replica.state())
            held = time.perf_counter() - before
    end()
    dist.barrier()
    return time.perf_counter() - begun, held


def main(rounds: int = 4) -> None:
    with tempfile.TemporaryDirectory() as name:
        for number in range(len(WAYS)):
            (Path(name) / str(number)).mkdir()
        rows_of = run_in_worlds(lambda world: measure(world, Path(name), rounds), PROCESSES, timeout=580)[0]
    title = f"{PROCESSES} processes, a save in {STEPS} steps, medians of {rounds} rounds"
    table = Table("", "ms a step", "to no saves, same round", "held up by a save, ms", title=title)
    for way, rows in rows_of.items():
        seconds, held = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(own[0] / base[0] for own, base in zip(rows, rows_of["no saves"], strict=True))
        table.add_row(way, f"{seconds / STEPS * 1e3:.1f}", f"{ratio:.3f} ×", f"{held * 1e3:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
