"""``strategy=mesh`` beside a loop written by hand with torch's own parallelisms: time a step, 3.3 M parameters.

uv run python benchmarks/mesh.py               # 2 and 4 gloo processes, ten rounds
"""

from __future__ import annotations

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
from worldsize.core import MicroBatch, World
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.testing.worlds import run_in_worlds

WIDTH, DEPTH, CONTEXT, BATCH = 256, 4, 128, 8
MESHES = (Mesh(data=2), Mesh(tensor=2), Mesh(data=1, pipeline=2), Mesh(tensor=2, pipeline=2), Mesh(data=2, pipeline=2))
Step = Callable[[Tensor, Tensor], object]


def _recipe() -> StdlibLM:
    optimizer = partial(torch.optim.AdamW, lr=0.001)
    return StdlibLM(WIDTH, DEPTH, heads=4, context=CONTEXT, dropout=0.0, test_bytes=1000, make_optimizer=optimizer)


def _ours(strategy: Mesh, world: World) -> Step:
    torch.manual_seed(1)
    replica = strategy.replica(_recipe(), world)
    count = strategy.default_micro_batches

    def step(inputs_bt: Tensor, targets_bt: Tensor) -> object:
        chunks = zip(inputs_bt.chunk(count), targets_bt.chunk(count), strict=True)
        return replica.step([MicroBatch(chunk, seed=0) for chunk in chunks])

    return step


def _loss(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


def _by_hand(strategy: Mesh, world: World) -> Step:
    torch.manual_seed(1)
    sizes = strategy.layout(world.size)
    mesh = init_device_mesh("cpu", sizes.sizes, mesh_dim_names=("pipeline", "data", "tensor"))
    model = GPT(Sizes(WIDTH, DEPTH, 4, CONTEXT))
    part: nn.Module = model
    blocks = list(model.blocks)
    p = mesh.get_local_rank("pipeline")
    if sizes.pipeline == 2:
        blocks = blocks[: DEPTH // 2] if p == 0 else blocks[DEPTH // 2 :]
        part = nn.Sequential(model.embedding, *blocks) if p == 0 else nn.Sequential(*blocks, Logits(model))
    if sizes.tensor > 1:
        styles = {"query_key_value": ColwiseParallel, "attention_out": RowwiseParallel}
        styles |= {"mlp_in": ColwiseParallel, "mlp_out": RowwiseParallel}
        for block in blocks:
            parallelize_module(block, mesh["tensor"], {name: style() for name, style in styles.items()})
    if sizes.data > 1:
        for module in (*blocks, part):
            fully_shard(module, mesh=mesh["data"], reshard_after_forward=sizes.pipeline == 1)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.001)
    if sizes.pipeline == 1:
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


def measure(strategy: Mesh, world: World, rounds: int, steps: int) -> list[tuple[float, float]]:
    """Seconds a step, ours and by hand, of each round: in turns, in the same processes."""
    text = torch.randint(256, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    mine = text.chunk(strategy.layout(world.size).data)[strategy.data_rank(world)]
    ways = (_ours(strategy, world), _by_hand(strategy, world))
    found = []
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {way: _seconds(ways[way], mine, steps) for way in order}
        found.append((seconds[0], seconds[1]))
    return found[1:]


def _seconds(step: Step, rows: Tensor, steps: int) -> float:
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step(rows[:, :-1], rows[:, 1:])
    dist.barrier()
    return (time.perf_counter() - begun) / steps


def main(rounds: int = 10, steps: int = 5) -> None:
    title = f"{rounds} rounds of {steps} steps in turns"
    table = Table("data × tensor × pipeline", "by hand, ms", "mesh, ms", "ratio of the same round", title=title)
    for strategy in MESHES:
        sizes = (strategy.data or 1, strategy.tensor, strategy.pipeline)
        body = partial(measure, strategy, rounds=rounds, steps=steps)
        rows = run_in_worlds(cast("Any", body), sizes[0] * sizes[1] * sizes[2], timeout=580)[0]
        ours, by_hand = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
        ratio = statistics.median(own / base for own, base in rows)
        table.add_row(" × ".join(map(str, sizes)), f"{by_hand:.0f}", f"{ours:.0f}", f"{ratio:.3f} ×")
        print(f"{sizes}: {ratio:.3f}", file=sys.stderr)
    Console(width=100).print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
