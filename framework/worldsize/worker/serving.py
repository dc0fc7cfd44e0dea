"""What a run offers to its processes that serve: data of any part, the newest checkpoint, a folder to meet in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from worldsize.checkpoints.load import load, newest
from worldsize.config.settings import Settings
from worldsize.core import ConfigError, Duty, EvaluationBatch, MicroBatch, StateDict, World
from worldsize.data.loader import drawn, evaluation_batches, is_iterable
from worldsize.observe.timing import Timing, UnitTimes
from worldsize.records.run_directory import RunDirectory, private
from worldsize.world.environments import Placement
from worldsize.world.heartbeat import Heartbeat


def duty_of(
    settings: Settings, run: RunDirectory, world: World, placement: Placement, wants_stop: Callable[[], bool]
) -> Duty:
    alone = replace(world, rank=0, size=1, groups={})
    data = cache(settings.recipe.data)  # which only workers ask for
    log_every = settings.pace.log_every
    times = cache(lambda: UnitTimes(Timing(run.timing(world.rank), rank=world.rank), world.device, every=log_every))
    return Duty(
        folder=private(run.servers(placement.attempt)),
        workers=settings.roles["worker"].processes,
        steps=settings.pace.steps,
        logical_ranks=settings.logical_ranks,
        timeout=settings.cluster.timeout,
        restore=partial(_restored, settings, run, alone),
        micro_batch=_drawing(settings, partial(data, "train"), world, placement.heartbeat, times),
        evaluation=partial(_evaluation, settings, partial(data, "test"), world),
        wants_stop=wants_stop,
        begins=settings.faults.enter,
        passes=settings.faults.at,
        measured=lambda step: times().measured(step) if settings.anatomy else nullcontext(),
        address=placement.address,
    )


def _restored(
    settings: Settings, run: RunDirectory, world: World, state: Callable[[], StateDict]
) -> tuple[StateDict, int] | None:
    saves = settings.config["checkpoint"]
    checkpoint = newest(run.checkpoints, world, allow_older=saves["allow_older"])
    if checkpoint is None:
        return None
    settings.faults.at("load:begin")
    return load(checkpoint, state(), ignore=settings.ignored(checkpoint.step)), checkpoint.step


def _drawing(
    settings: Settings,
    dataset: Callable[[], Any],
    world: World,
    heartbeat: Path | None,
    times: Callable[[], UnitTimes],
) -> Callable[[int, int], MicroBatch]:
    """Draws in this process; passes the faults planned for a step, and tells the step, before its first data.

    A process that never draws, such as a server, is at no step.
    """
    order = settings.order(0, 1)
    beats: Heartbeat | None = None

    def draw(step: int, logical_rank: int) -> MicroBatch:
        nonlocal beats
        settings.faults.enter(step)
        if heartbeat:
            beats = beats or Heartbeat(heartbeat, 0)
            beats.step(step - 1)
        if is_iterable(dataset()):
            raise ConfigError("this strategy draws samples by their index; the recipe's training data are a stream.")
        with times().drawing() if settings.anatomy else nullcontext():
            return drawn(dataset(), order, world.device, step, logical_rank)

    return draw


def _evaluation(
    settings: Settings, dataset: Callable[[], Any], world: World, part: int, parts: int
) -> Iterable[EvaluationBatch]:
    settings.faults.at("evaluate:begin")
    share = replace(world, rank=part, size=parts, groups={})
    return evaluation_batches(dataset(), share, batch_size=settings.evaluate_batch_size)
