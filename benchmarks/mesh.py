"""Compare ``strategy=mesh`` with a hand-written loop on torch's own parallelism: step time, 3.2 M parameters.

uv run python benchmarks/mesh.py               # 2 and 4 gloo processes, 40 steps each
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1]))

from recipes.stdlib_lm.gpt import GPT, Logits, Sizes
from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.core import MicroBatch, RunContext, World
from worldsize.strategies.mesh.layout import AXES
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.testing.worlds import run_in_worlds

WIDTH, DEPTH, CONTEXT, BATCH = 256, 4, 128, 8
MESHES = (Mesh(data=2), Mesh(tensor=2), Mesh(data=1, pipeline=2), Mesh(tensor=2, pipeline=2), Mesh(data=2, pipeline=2))
Step = Callable[[Tensor, Tensor], object]
Figures = tuple[float, float]


def _recipe() -> StdlibLM:
    optimizer = partial(torch.optim.AdamW, lr=0.001)
    return StdlibLM(WIDTH, DEPTH, heads=4, context=CONTEXT, dropout=0.0, test_bytes=1000, make_optimizer=optimizer)


def _ours(strategy: Mesh, world: World) -> Step:
    torch.manual_seed(1)
    replica = strategy.replica(_recipe(), RunContext(world))
    count = strategy.default_micro_batches

    def step(inputs_bt: Tensor, targets_bt: Tensor) -> object:
        chunks = zip(inputs_bt.chunk(count), targets_bt.chunk(count), strict=True)
        return replica.step([MicroBatch(chunk, seed=0) for chunk in chunks])

    return step


def _loss(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


def _by_hand(strategy: Mesh, world: World) -> Step:
    torch.manual_seed(1)
    sizes = strategy.create_layout(world.size)
    mesh = init_device_mesh("cpu", tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    model = GPT(Sizes(WIDTH, DEPTH, 4, CONTEXT))
    part: nn.Module = model
    blocks = list(model.blocks)
    p = mesh.get_local_rank("pipeline")
    if sizes["pipeline"] == 2:
        blocks = blocks[: DEPTH // 2] if p == 0 else blocks[DEPTH // 2 :]
        part = nn.Sequential(model.embedding, *blocks) if p == 0 else nn.Sequential(*blocks, Logits(model))
    if sizes["tensor"] > 1:
        styles = {"query_key_value": ColwiseParallel, "attention_out": RowwiseParallel}
        styles |= {"mlp_in": ColwiseParallel, "mlp_out": RowwiseParallel}
        for block in blocks:
            parallelize_module(block, mesh["tensor"], {name: style() for name, style in styles.items()})
    if sizes["data"] > 1:
        for module in (*blocks, part):
            fully_shard(module, mesh=mesh["data"], reshard_after_forward=sizes["pipeline"] == 1)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.001)
    if sizes["pipeline"] == 1:
        return _whole(part, optimizer)
    return _piped(part, optimizer, p, model.embedding, mesh.get_group("pipeline"), strategy.default_micro_batches)


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs_bt: Tensor, targets_bt: Tensor) -> None:
        optimizer.zero_grad()
        _loss(model(inputs_bt), targets_bt).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _piped(
    part: nn.Module, optimizer: torch.optim.Optimizer, p: int, tied: nn.Embedding, group: ProcessGroup, count: int
) -> Step:
    stage = PipelineStage(part, p, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, count, loss_fn=_loss)

    def step(inputs_bt: Tensor, targets_bt: Tensor) -> None:
        optimizer.zero_grad()
        schedule.step(*([inputs_bt] if p == 0 else []), target=targets_bt if p == 1 else None, return_outputs=False)
        gradient: Any = tied.weight.grad
        dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)
        optimizer.step()

    return step


def measure(strategy: Mesh, world: World, rounds: int) -> list[tuple[Figures, Figures]]:
    """Time one hand-written step and one of ours per round, alternating in the same processes."""
    text = torch.randint(256, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    mine = text.chunk(strategy.create_layout(world.size)["data"])[strategy.data_rank(world)]
    ways = (_by_hand(strategy, world), _ours(strategy, world))
    figures = []
    for number in range(rounds + 2):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {way: _timed(ways[way], mine) for way in order}
        figures.append((taken[0], taken[1]))
    return figures[2:]  # the first steps allocate buffers that later ones reuse


def _timed(step: Step, rows: Tensor) -> Figures:
    """Return the seconds of one step, and the CPU seconds of all ranks together."""
    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    step(rows[:, :-1], rows[:, 1:])
    processor = torch.tensor(time.process_time() - used)
    dist.barrier()
    seconds = time.perf_counter() - begun
    dist.all_reduce(processor)
    return seconds, float(processor)


def main(rounds: int = 40) -> None:
    title = f"medians of {rounds} steps each, in turns"
    heads = ("data × tensor × pipeline", "by hand, ms", "mesh, ms", "by hand, processor ms", "mesh, processor ms")
    table = Table(*heads, title=title)
    for strategy in MESHES:
        sizes = (strategy.data or 1, strategy.tensor, strategy.pipeline)
        body = partial(measure, strategy, rounds=rounds)
        figures = run_in_worlds(cast("Any", body), math.prod(sizes), timeout=580)[0]
        columns = [zip(*way, strict=True) for way in zip(*figures, strict=True)]
        (hand, hand_used), (ours, ours_used) = ([statistics.median(each) * 1e3 for each in way] for way in columns)
        row = f"{hand:.0f}", f"{ours:.0f} ({ours / hand:.2f} ×)"
        table.add_row(
            " × ".join(map(str, sizes)), *row, f"{hand_used:.0f}", f"{ours_used:.0f} ({ours_used / hand_used:.2f} ×)"
        )
        print(f"{sizes}: {row[1]}", file=sys.stderr)
    Console(width=120).print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
