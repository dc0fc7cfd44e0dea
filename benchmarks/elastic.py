"""Compare ``reproducibility=elastic`` with plain DDP: step time and bytes on the wire, 10 M parameters.

uv run python benchmarks/elastic.py            # 4 gloo processes, 8 logical ranks
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import Recipe, RunContext, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.strategies.ddp import DDP
from worldsize.testing.worlds import run_in_worlds

PROCESSES, LOGICAL_RANKS, WIDTH, BATCH = 4, 8, 1580, 256
Figures = tuple[float, int]


@dataclass(frozen=True)
class Wide(Recipe):
    """Train four square layers: 4 × 1580² = 10.0 M parameters."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters())

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(torch.randn(1024, WIDTH))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


def measure(world: World, reduce: Literal["flat", "ordered"], steps: int) -> Figures:
    """Return seconds per step, and bytes per step that all ranks together send over the loopback interface."""
    recipe = Wide()
    replica = DDP(reduce=reduce).replica(recipe, RunContext(world))
    mine = assign_logical_ranks(world.rank, world.size, LOGICAL_RANKS)
    batches = micro_batches(recipe.data("train"), Order(0, BATCH, LOGICAL_RANKS, mine), world.device)
    for _ in range(3):
        replica.step(next(batches))
    torch.distributed.barrier()
    begun, sent = time.perf_counter(), _loopback_bytes()
    for _ in range(steps):
        replica.step(next(batches))
    torch.distributed.barrier()
    return (time.perf_counter() - begun) / steps, (_loopback_bytes() - sent) // steps


def _loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def main(rounds: int = 5, steps: int = 10) -> None:
    figures_of: dict[str, list[Figures]] = {"flat": [], "ordered": []}
    for number in range(rounds):
        for reduce in ("flat", "ordered"):
            print(f"round {number + 1}/{rounds}: {reduce}", file=sys.stderr)
            body = lambda world, reduce=reduce: measure(world, reduce, steps)  # noqa: E731
            figures_of[reduce].append(run_in_worlds(body, PROCESSES, timeout=300)[0])
    table = Table(
        "", "ms a step", "MB on the wire a step", title=f"{PROCESSES} processes, {LOGICAL_RANKS} logical ranks"
    )
    base = [statistics.median(column) for column in zip(*figures_of["flat"], strict=True)]
    for name, rows in figures_of.items():
        seconds, sent = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = f"{seconds / base[0]:.2f} ×", f"{sent / base[1]:.2f} ×"
        table.add_row(name, f"{seconds * 1e3:.0f} ({ratios[0]})", f"{sent / 1e6:.1f} ({ratios[1]})")
    Console(width=100).print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
