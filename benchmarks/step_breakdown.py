"""Measure the overhead of the step timer, and the effect of length-balanced batches on step phases.

uv run python benchmarks/step_breakdown.py cost           # steps with and without the timer
uv run python benchmarks/step_breakdown.py balanced       # plain and balanced batches of samples of different lengths
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from worldsize.collectives.step_timer import StepTimer
from worldsize.core import Event, Recipe, RunContext, StepDone, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.fit import LoopCallbacks, LoopConfig, TrainingProgress, fit
from worldsize.observe.stragglers import Stragglers
from worldsize.strategies.ddp import DDP
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

PART, BATCH, WIDTH = 50, 32, 64  # steps per part, samples per process
RECIPES = {"6 layers": (Chain(), 200), "22 layers": (Chain(20), 220)}  # recipe and number of parts


def order_of(world: World, *, balanced: bool = False) -> Order:
    mine = assign_logical_ranks(world.rank, world.size, world.size)
    return Order(0, BATCH * world.size, world.size, mine, balanced)


def parts(recipe: Recipe, number: int, world: World) -> list[float]:
    """Return seconds per step for each part of one run.

    Odd parts are timed, and the first rank searches for stragglers; even ones are not.
    """
    replica, timer, stragglers = (
        DDP().replica(recipe, RunContext(world)),
        StepTimer(world.device),
        Stragglers([range(world.size)]),
    )
    batches = micro_batches(recipe.data("train"), order_of(world), world.device)

    def emit(event: Event) -> None:
        if isinstance(event, StepDone) and world.size > 1 and event.splits and event.splits[0]:
            stragglers.find_stragglers(event.step, event.splits)

    seconds = []
    for part in range(number):
        measured = part % 2 == 1
        with timer.record_phases() if measured else nullcontext():
            begun = time.perf_counter()
            fit(
                replica,
                batches,
                world,
                config=LoopConfig((part + 1) * PART, batch_size=BATCH * world.size),
                callbacks=LoopCallbacks(lambda step: {}, emit),
                first=TrainingProgress(part * PART),
                timer=timer if measured else None,
            )
            seconds.append((time.perf_counter() - begun) / PART)
    return seconds


def cost() -> None:
    table = Table("", "off, ms a step", "on, ms a step", "on to off")
    for name, (recipe, number) in RECIPES.items():
        for size in (1, 2):
            print(f"{name}, {size}", file=sys.stderr)
            seconds = run_in_worlds(partial(parts, recipe, number), size, timeout=600)[0][20:]
            off, on = seconds[::2], seconds[1::2]
            ratios = [b / (a + c) * 2 for a, b, c in zip(off, on, off[1:], strict=False)]  # to neighboring parts
            times = (f"{statistics.median(each) * 1e3:.3f}" for each in (off, on))
            table.add_row(f"{name}, {size} process(es)", *times, f"{statistics.median(ratios):.3f} ×")
    Console(width=100).print(table)


class Texts:
    """4096 sequences of log-normal length: half are shorter than 40, 1% longer than 250."""

    def __init__(self) -> None:
        self.lengths = (
            torch.randn(4096, generator=torch.Generator().manual_seed(1)).mul(0.8).exp().mul(40).ceil().long()
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(int(self.lengths[index]), WIDTH)

    def load_batch(self, indices: Tensor) -> Tensor:
        return pad_sequence([self[int(index)] for index in indices], batch_first=True)


@dataclass(frozen=True)
class Reading(Recipe):
    """Train a small network on all tokens, including padding."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters())

    def data(self, split: str) -> Texts:
        return Texts()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


def splits(steps: int, world: World) -> list[Tensor]:
    """Return phase times (steps, 4) of plain and of balanced batches, which alternate."""
    replica, timers = DDP().replica(Reading(), RunContext(world)), [StepTimer(world.device), StepTimer(world.device)]
    sources = [micro_batches(Texts(), order_of(world, balanced=balanced), world.device) for balanced in (False, True)]
    for _ in range(steps):
        for timer, batches in zip(timers, sources, strict=True):
            begun = time.perf_counter()
            batch = next(batches)
            with timer.record_phases():
                timer.start_step(data=time.perf_counter() - begun)
                replica.step(batch)
                timer.end_step()
    return [timer.collect_step_times() for timer in timers]


def balanced(steps: int = 320, size: int = 2) -> None:
    ranks = run_in_worlds(partial(splits, steps), size, timeout=600)
    table = Table("batches", "step, ms", "compute, ms", "communication, ms", "max / mean of ranks' compute")
    for kind, name in enumerate(("plain", "balanced")):
        splits_psk = torch.stack([rank[kind] for rank in ranks])[:, 10:]
        compute_ps = splits_psk[:, :, 1]
        imbalance = float((compute_ps.max(0).values / compute_ps.mean(0)).mean())
        times = (splits_psk.sum(2).max(0).values.mean(), compute_ps.mean(), splits_psk[:, :, 2].mean())
        table.add_row(name, *(f"{float(each) * 1e3:.2f}" for each in times), f"{imbalance:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    {"cost": cost, "balanced": balanced}[sys.argv[1]](*map(int, sys.argv[2:]))
