"""Runs a strategy's own steps on one rank whose peers are not there: what it computes, without communication."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from worldsize.config.settings import Settings
from worldsize.core import RunContext, World
from worldsize.data.fetch import collate_of
from worldsize.data.loader import micro_batches
from worldsize.plan.absent_peers import check_alone, world_seen_by
from worldsize.plan.concurrency import first_device, medians, run_concurrently
from worldsize.strategies.alone import alone

_SECONDS = 0.25  # of steps, at least


def slowdown(settings: Settings, kind: str, *, at_once: int = 1, threads: int = 1) -> float:
    """Measure how many times as long as one process by itself the first rank computes in a step.

    Both take the same micro-batches; hooks, encoding and copies are included, what others do is left out. It is
    the ratio of medians of eleven steps each or more, in turns, on this machine's first device of a ``kind`` ("cpu",
    "cuda"), where ``at_once`` processes of so many ``threads`` do the same: what many copy on few cores takes longer
    than as many times what one does.

    Raises:
        ConfigError: what a rank computes is decided by its peers.
        RuntimeError: memory does not hold two replicas a process.
    """
    check_alone(settings)
    return run_concurrently(at_once, threads, _slowdown, settings, first_device(kind))


def _slowdown(settings: Settings, device: torch.device) -> float:
    recipe, strategy = settings.recipe, settings.strategy
    numerics = replace(settings.numerics, compile=False)  # hooks and copies are the same
    with world_seen_by(0, settings, device) as world:
        single = alone(recipe, recipe.model().to(device), RunContext(World.alone(device), numerics))
        replica = strategy.replica(recipe, RunContext(world, numerics))
        replicas, part = (single, replica), settings.data_part(world)
        order, collate = settings.order(part.rank, part.size, replica.dealing), collate_of(recipe)
        batches = micro_batches(recipe.data("train"), order, device, collate=collate)
        turns = ([partial(replica.step, each) for replica in replicas] for each in batches)
        by_itself, under_it = medians(turns, device, _SECONDS)
    return under_it / by_itself
