"""The surroundings of a process in training: its context, its listeners, its limits of waits for data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

from worldsize.checkpoint.format import Checkpoint, read
from worldsize.checkpoint.load import load, newest
from worldsize.config.settings import Settings
from worldsize.core import (
    CheckpointSource,
    ConfigError,
    DataSource,
    EvaluationBatch,
    Listener,
    MicroBatch,
    Rendezvous,
    RunContext,
    StateDict,
    StepTiming,
    StopFlag,
    World,
)
from worldsize.data.batches import collate_of, is_iterable
from worldsize.data.data_wait import Patience
from worldsize.data.loader import drawn
from worldsize.observe.events import EventLog
from worldsize.observe.health.files import AlertNews
from worldsize.observe.subprocess_listeners import SubprocessListeners
from worldsize.observe.timing import Timing, UnitTimes
from worldsize.record.metrics import MetricsFile
from worldsize.record.run_directory import RunDirectory, private
from worldsize.record.run_record import view
from worldsize.worker.evaluation import EvaluationData
from worldsize.world.environments import Placement
from worldsize.world.meetings import StopVote
from worldsize.world.processes import Heartbeat, Preemption
from worldsize.world.roles import role_of
from worldsize.world.scratch import socket_folder
from worldsize.world.world import gang_of


def context_of(settings: Settings, run: RunDirectory, world: World, placement: Placement, stop: StopFlag) -> RunContext:
    """Return the context of the process that ``world`` describes."""
    times = _UnitTiming(settings, run, world)
    serves = any(role.serves for role in settings.roles.values())
    return RunContext(
        world,
        settings.numerics,
        seed=settings.training.seed,
        steps=settings.training.steps,
        workers=settings.roles["worker"].processes,
        logical_ranks=settings.logical_ranks,
        rendezvous=_rendezvous(settings, run, placement) if serves else None,
        data=_RunData(settings, world, placement.heartbeat, times),
        checkpoints=_RunCheckpoints(settings, run, replace(world, rank=0, size=1, groups={})),
        faults=settings.faults,
        stop=stop,
        timing=times,
    )


def _rendezvous(settings: Settings, run: RunDirectory, placement: Placement) -> Rendezvous:
    sockets = placement.heartbeat.parent if placement.heartbeat else socket_folder()
    return Rendezvous(private(run.servers(placement.attempt)), placement.address, settings.cluster.timeout, sockets)


@final
class _RunCheckpoints(CheckpointSource):
    """Reads a checkpoint in this process alone, without its peers."""

    def __init__(self, settings: Settings, run: RunDirectory, alone: World) -> None:
        self._settings, self._run, self._alone = settings, run, alone

    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        checkpoint = self._checkpoint()
        if checkpoint is None:
            initial = self._settings.initial
            return (initial.loaded(self._settings.recipe, state()), 0) if initial else None
        self._settings.faults.at("load:begin")
        return load(checkpoint, state(), ignore=self._settings.checkpoint.ignored(checkpoint.step)), checkpoint.step

    def _checkpoint(self) -> Checkpoint | None:
        if (path := self._settings.run.evaluates) is not None:
            return read(path)
        return newest(self._run.checkpoints, self._alone, allow_older=self._settings.checkpoint.allow_older)


@final
class _UnitTiming(StepTiming):
    """Opens its file only at the first time, so that processes without data or steps write none."""

    def __init__(self, settings: Settings, run: RunDirectory, world: World) -> None:
        self._settings, self._run, self._world = settings, run, world

    @cached_property
    def _times(self) -> UnitTimes:
        rank = self._world.rank
        return UnitTimes(Timing(self._run, rank=rank), self._world.device, every=self._settings.training.log_every)

    def drawing(self) -> AbstractContextManager[None]:
        """Time the wait for data inside the context."""
        return self._times.drawing() if self._settings.observe.step_breakdown else nullcontext()

    def measured(self, step: int) -> AbstractContextManager[None]:
        return self._times.measured(step) if self._settings.observe.step_breakdown else nullcontext()


@final
class _RunData(DataSource):
    """Draws data in this process; before the first data of a step, injects its faults and records its number.

    A process that never draws, such as a server, has no current step.
    """

    def __init__(self, settings: Settings, world: World, heartbeat: Path | None, times: _UnitTiming) -> None:
        self._settings, self._world, self._heartbeat, self._times = settings, world, heartbeat, times
        self._order, self._collate = settings.order(0, 1), collate_of(settings.recipe)
        self._evaluation = EvaluationData(settings)

    @cached_property
    def _train(self) -> Any:
        return self._settings.recipe.data("train")

    @cached_property
    def _beats(self) -> Heartbeat | None:
        return Heartbeat(self._heartbeat, 0) if self._heartbeat else None

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        self._settings.faults.enter(step)
        if self._beats:
            self._beats.step(step - 1)
        if is_iterable(self._train):
            raise ConfigError(
                "this strategy draws samples by their index; the recipe's training data are a stream. "
                "Return data with an index, or choose another strategy."
            )
        with self._times.drawing():
            return drawn(self._train, self._order, self._world.device, step, logical_rank, self._collate)

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        self._settings.faults.at("evaluate:begin")
        return self._evaluation.batches(split, step, replace(self._world, rank=part, size=parts, groups={}))


_ENDING = 2.0  # seconds that a process needs to end when it waits for nothing


def listeners_of(settings: Settings, run: RunDirectory, global_rank: int, preemption: Preemption) -> list[Listener]:
    """Create the listeners of a process: every training process writes its timing, the first logs global events.

    If all processes serve, the run's first process leads and logs. In a gang that heals, its first member does, which
    need not be the first process.
    """
    role, rank = role_of(global_rank, settings.roles)
    own: list[Listener] = [] if settings.roles[role].serves else [Timing(run, rank=rank)]
    if settings.heals or global_rank != (gang_of(settings.roles) or [0])[0]:
        return own
    return [*own, *global_listeners(settings, run, preemption)]


def global_listeners(settings: Settings, run: RunDirectory, preemption: Preemption) -> list[Listener]:
    """Create the listeners of the whole run."""
    manifest = view(run.path).manifest  # the manifest's configuration has no secrets
    facts = {"run_id": run.id, "folder": run.path, "config": manifest["config"], "manifest": manifest}
    makers = {
        name: partial(make, **facts, group=settings.run.group) for name, make in settings.observe.listeners.items()
    }
    loggers = SubprocessListeners(
        makers,
        grace=lambda: max(1.0, preemption.seconds_left(settings.launcher.save_grace) - _ENDING),
        lock=run.listener_lock,
        alerts=AlertNews(run.events).new,
    )
    return [MetricsFile(run.metrics), EventLog(run.events), loggers]


def patience_of(settings: Settings, world: World, preemption: Preemption) -> Patience:
    """Return the limits of a wait for data; members of a gang that heals have no store in which all could vote."""
    vote = None if settings.heals else StopVote(world)

    def stops(step: int) -> bool:
        return vote is not None and preemption.is_wanted() and vote.passes(step)

    return Patience(settings.cluster.timeout, speaks=world.rank == 0, stops=stops)
