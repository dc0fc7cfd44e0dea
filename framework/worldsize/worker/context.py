"""Environment of a training process: context, resources, listeners, limits on data waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from rich.console import Console
from torch.distributed import ProcessGroup

from worldsize.checkpoint.format import Checkpoint, read_checkpoint
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.save import Saver
from worldsize.config.settings import Settings
from worldsize.core import (
    CheckpointSource,
    ConfigError,
    DataSource,
    EvaluationBatch,
    Event,
    Listener,
    MicroBatch,
    Rendezvous,
    RunContext,
    RunStarted,
    StateDict,
    StepTiming,
    World,
)
from worldsize.data.batches import get_collate_fn, is_iterable
from worldsize.data.data_wait import Patience
from worldsize.data.loader import MicroBatchLoader
from worldsize.loop.before_update import BeforeUpdate
from worldsize.observe.events import EventLog
from worldsize.observe.health.files import AlertNews
from worldsize.observe.progress import Progress, ProgressListener
from worldsize.observe.subprocess_listeners import SubprocessListeners
from worldsize.observe.timing import Timing, UnitTimes
from worldsize.record.chain import ChainFile
from worldsize.record.metrics import MetricsFile
from worldsize.record.run_directory import RunDirectory, create_private_folder
from worldsize.record.run_record import read_run
from worldsize.seeds import derive_seed, seed_generators
from worldsize.worker.evaluation import EvaluationData
from worldsize.world.environments import Placement
from worldsize.world.processes import Heartbeat, Preemption
from worldsize.world.roles import find_role
from worldsize.world.scratch import socket_folder
from worldsize.world.world import list_gang_ranks


def create_run_context(
    resources: ProcessResources, settings: Settings, world: World, placement: Placement
) -> RunContext:
    """Return the context of the process described by ``world``."""
    run = resources.run
    breakdown = settings.observe.step_breakdown
    times = _UnitTiming(run, world, every=settings.training.log_every if breakdown else None)
    serves = any(role.serves for role in settings.roles.values())
    data = _RunData(resources, settings, world, placement.heartbeat, times)
    return RunContext(
        world,
        settings.numerics,
        seed=settings.training.seed,
        steps=settings.training.steps,
        workers=settings.roles["worker"].processes,
        logical_ranks=settings.logical_ranks,
        rendezvous=_rendezvous(settings.cluster.timeout, run, placement) if serves else None,
        data=data,
        checkpoints=_RunCheckpoints(settings, run, replace(world, rank=0, size=1, groups={})),
        faults=settings.faults,
        stop=resources.preemption,
        timing=times,
        logs_norm=lambda: resources.before_update.may_log,
        audit_data=data.load_micro_batch,
        integrity=settings.integrity,
        emit=resources.emit,
    )


def _rendezvous(timeout: float, run: RunDirectory, placement: Placement) -> Rendezvous:
    sockets = placement.heartbeat.parent if placement.heartbeat else socket_folder()
    return Rendezvous(
        create_private_folder(run.get_servers_folder(placement.attempt)), placement.address, timeout, sockets
    )


@final
class _RunCheckpoints(CheckpointSource):
    """Reads checkpoints without communicating with peers."""

    def __init__(self, settings: Settings, run: RunDirectory, alone: World) -> None:
        self._settings, self._run, self._alone = settings, run, alone

    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        checkpoint = self._checkpoint()
        if checkpoint is None:
            initial = self._settings.initial
            return (initial.load_into(self._settings.recipe, state()), 0) if initial else None
        self._settings.faults.report_point("load:begin")
        return load_checkpoint(
            checkpoint, state(), ignore=self._settings.checkpoint.list_ignored_parts(checkpoint.step)
        ), checkpoint.step

    def _checkpoint(self) -> Checkpoint | None:
        if (path := self._settings.run.evaluates) is not None:
            return read_checkpoint(path)
        return find_newest(self._run.checkpoints, self._alone, allow_older=self._settings.checkpoint.allow_older)


@final
class _UnitTiming(StepTiming):
    """Step timing that does not create its file before the first measurement."""

    def __init__(self, run: RunDirectory, world: World, *, every: int | None) -> None:
        self._run, self._world, self._every = run, world, every

    @cached_property
    def _times(self) -> UnitTimes | None:
        if self._every is None:
            return None
        return UnitTimes(Timing(self._run, rank=self._world.rank), self._world.device, every=self._every)

    def time_data_wait(self) -> AbstractContextManager[None]:
        """Return a context that times a wait for data."""
        return self._times.measure_data_wait() if self._times else nullcontext()

    def measured(self, step: int) -> AbstractContextManager[None]:
        return self._times.measured(step) if self._times else nullcontext()


@final
class _RunData(DataSource):
    """Loads data in this process.

    Before it loads the first data of a step, it injects the step's faults and updates the heartbeat.

    A process that never loads data, such as a server, does not have a current step.
    """

    def __init__(
        self,
        resources: ProcessResources,
        settings: Settings,
        world: World,
        heartbeat: Path | None,
        times: _UnitTiming,
    ) -> None:
        self._resources, self._settings, self._world = resources, settings, world
        self._heartbeat, self._times = heartbeat, times
        self._order, self._collate = settings.create_order(0, 1), get_collate_fn(settings.recipe)
        self._evaluation = EvaluationData(settings.recipe, settings.training, settings.evaluation.batches)

    @cached_property
    def _beats(self) -> Heartbeat | None:
        return Heartbeat(self._heartbeat, 0) if self._heartbeat else None

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        self._settings.faults.report_step(step)
        if self._beats:
            self._beats.step(step - 1)
        if is_iterable(self._resources.train):
            raise ConfigError(
                "this strategy requires a map-style dataset; the recipe's training data are a stream. "
                "Return a map-style dataset, or choose a different strategy."
            )
        with self._times.time_data_wait():
            return self.load_micro_batch(step, logical_rank)

    def load_micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        """Load the data of any step and logical rank, without injecting faults."""
        return self._loader.load(step, logical_rank)

    @cached_property
    def _loader(self) -> MicroBatchLoader:
        return MicroBatchLoader(self._resources.train, self._order, self._world.device, self._collate)

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        self._settings.faults.report_point("evaluate:begin")
        return self._evaluation.load_batches(split, step, replace(self._world, rank=part, size=parts, groups={}))


@final
class ProcessResources:
    """Datasets, heartbeat, saver and listeners of a process; they survive membership changes."""

    def __init__(
        self,
        settings: Settings,
        run: RunDirectory,
        heartbeat: Path | None,
        listeners: list[Listener],
        preemption: Preemption,
    ) -> None:
        self.settings, self.run, self._heartbeat = settings, run, heartbeat
        self.listeners, self.preemption = listeners, preemption
        self.before_update = BeforeUpdate()  # called in each step by this process's replicas
        self._saver: Saver | None = None
        self._beats: Heartbeat | None = None
        self._logs_run = False
        self._started: list[Listener] = []  # listeners that have received RunStarted

    @cached_property
    def train(self) -> Any:
        """The recipe's training data."""
        return self.settings.recipe.data("train")

    @cached_property
    def evaluation(self) -> EvaluationData:
        """Loader of the evaluation data, created on first use."""
        return EvaluationData(self.settings.recipe, self.settings.training, self.settings.evaluation.batches)

    def build_datasets(self, world: World) -> None:
        """Build the datasets now, so that a gang does not wait while a new member builds them."""
        seed_generators(derive_seed(self.settings.training.seed, "data"), world.device)  # the data may be shuffled
        assert self.train is not None
        self.evaluation.build_splits(self.settings.evaluation.splits)

    def get_saver(self, world: World, group: ProcessGroup | None) -> Saver:
        """Return the saver of checkpoints for ``world``; ``group`` must be reserved for it."""
        if self._saver is not None:
            self._saver = self._saver.regroup_ranks(world, group)
            return self._saver
        self._saver = Saver(
            self.run.checkpoints,
            world,
            group,
            keep=self.settings.checkpoint.keep,
            finite=self.settings.numerics.nonfinite == "stop",
            owner=self.run.manifest,
            at=self.settings.faults.report_point,
        )
        return self._saver

    def get_heartbeat(self, first: int) -> Heartbeat | None:
        """Return this process's heartbeat, from step ``first`` on; None if it has no file."""
        if self._beats is None and self._heartbeat is not None:
            self._beats = Heartbeat(self._heartbeat, first)
        return self._beats

    def log_run(self) -> None:
        """Add the listeners of the whole run, such as loggers; later calls do nothing."""
        if not self._logs_run:
            self.listeners += global_listeners(self.settings, self.run, self.preemption)
        self._logs_run = True

    def emit(self, event: Event) -> None:
        """Send an event to all listeners."""
        for listener in self.listeners:
            listener(event)

    def tell_started(self, event: RunStarted, passing: Sequence[Listener]) -> None:
        """Send RunStarted to new listeners, and to the ``passing`` ones of this membership.

        The ``passing`` listeners are not stored, since they refer to the membership's replica.
        """
        before, self._started = self._started, [*self.listeners]
        for listener in (*self.listeners, *passing):
            if not any(listener is told for told in before):
                listener(event)


_ENDING = 2.0  # seconds for a process to exit when it is not waiting for anything


def create_listeners(
    settings: Settings, run: RunDirectory, global_rank: int, preemption: Preemption, *, shows: bool = False
) -> list[Listener]:
    """Create the listeners of a process.

    All training processes write timings, and the first one also logs global events.

    If all processes serve, the run's first process leads and logs. In a healing gang the first member logs, which may
    not be the first process. ``shows``: the first process also shows the progress, as there is no launching process.
    """
    role, rank = find_role(global_rank, settings.roles)
    own: list[Listener] = [] if settings.roles[role].serves else [Timing(run, rank=rank)]
    if settings.heals or global_rank != (list_gang_ranks(settings.roles) or [0])[0]:
        return own
    return [*own, *global_listeners(settings, run, preemption, shows=shows)]


def global_listeners(
    settings: Settings, run: RunDirectory, preemption: Preemption, *, shows: bool = False
) -> list[Listener]:
    """Create the listeners of the whole run; with ``shows``, also one that shows the progress."""
    manifest = read_run(run.path).manifest  # the manifest's configuration does not contain secrets
    facts = {"run_id": run.id, "folder": run.path, "config": manifest["config"], "manifest": manifest}
    makers: dict[str, Callable[[], Listener]] = {
        name: partial(make, **facts, group=settings.run.group) for name, make in settings.observe.listeners.items()
    }
    if shows:
        progress = Progress(run.metrics, settings.training.steps, Console())
        makers["progress display"] = partial(ProgressListener, progress)
    loggers = SubprocessListeners(
        makers,
        grace=lambda: max(1.0, preemption.seconds_left(settings.launcher.save_grace) - _ENDING),
        lock=run.listener_lock,
        alerts=AlertNews(run.events).read_alerts,
    )
    # the chain first: if this process fails between two files, another one writes only the metrics again
    return [ChainFile(run), MetricsFile(run.metrics), EventLog(run.events), loggers]


_VOTING = 10.0  # timeout of a vote in seconds; a rank that is computing does not vote
_POLL = 0.05  # seconds between two polls
_STOP, _GO_ON = b"stop", b"go on"


@final
class StopVote:
    """Vote among the ranks of ``world``, in their rendezvous store, to stop before a step."""

    def __init__(self, world: World) -> None:
        self._size, self._key = world.size, f"stop_vote/{world.role}"
        self._voted = -1  # last step at which this rank voted

    def vote_to_stop(self, step: int) -> bool:
        """Vote to stop before ``step``; return whether all ranks did so in time.

        The result is the same on all ranks. A second vote on the same step returns False.
        """
        if self._size == 1:
            return True
        if self._voted == step:
            return False
        self._voted = step
        store, key = dist.distributed_c10d._get_default_store(), f"{self._key}/{step}"
        until = time.monotonic() + _VOTING
        decision = b""
        store.add(f"{key}/votes", 1)
        while not decision:
            if store.add(f"{key}/votes", 0) >= self._size:
                decision = store.compare_set(f"{key}/decision", "", _STOP.decode())
            elif time.monotonic() > until:
                decision = store.compare_set(f"{key}/decision", "", _GO_ON.decode())
            elif store.check([f"{key}/decision"]):
                decision = store.get(f"{key}/decision")
            else:
                time.sleep(_POLL)
        return decision == _STOP


def create_patience(timeout: float, world: World, preemption: Preemption, *, heals: bool) -> Patience:
    """Return the limits on waits for data.

    Healing gangs do not vote to stop, since their processes do not share a store.
    """
    vote = None if heals else StopVote(world)

    def should_stop(step: int) -> bool:
        return vote is not None and preemption.is_wanted() and vote.vote_to_stop(step)

    return Patience(timeout, speaks=world.rank == 0, stops=should_stop)
