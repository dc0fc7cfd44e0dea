"""What a worker does: resume, train, save, and say how it ended."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, final

from worldsize.checkpoints.load import load, newest
from worldsize.checkpoints.save import Saver
from worldsize.collectives.gather_full import gather_full
from worldsize.collectives.step_timer import StepTimer
from worldsize.config.settings import Settings
from worldsize.core import (
    CheckpointSaved,
    Evaluated,
    Event,
    Listener,
    MicroBatch,
    Replica,
    RunEnded,
    RunStarted,
    StateDict,
    StepDone,
    Straggling,
    World,
)
from worldsize.data.loader import micro_batches
from worldsize.engine.evaluate import evaluate
from worldsize.engine.fit import LoopCallbacks, TrainingProgress, fit
from worldsize.observe.events import EventLog
from worldsize.observe.profile import traced
from worldsize.observe.slow_links import SlowLinkSearch, slow_link_search
from worldsize.observe.stragglers import Straggler, Stragglers
from worldsize.observe.subprocess_listener import SubprocessListener
from worldsize.observe.timing import Timing
from worldsize.planning.doctor.edges import measured
from worldsize.records.metrics import JsonLines, last_metrics, metrics_digest
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import view, write_result
from worldsize.reproducibility.digest import state_digest, tensor_digests
from worldsize.worker.probe import network_edges
from worldsize.world.heartbeat import Heartbeat
from worldsize.world.preemption import PREEMPTED, Preemption
from worldsize.world.roles import role_of
from worldsize.world.world import gang_of, places


def listeners_of(settings: Settings, run: RunDirectory, global_rank: int) -> list[Listener]:
    """Every process that trains writes its own timing; only the first of them logs what is global.

    Where all serve, the run's first process leads, and logs.
    """
    role, rank = role_of(global_rank, settings.roles)
    own: list[Listener] = [] if settings.roles[role].serves else [Timing(run.timing(rank), rank=rank)]
    if global_rank != (gang_of(settings.roles) or [0])[0]:
        return own
    config = view(run.path).manifest["config"]  # without secrets
    facts = {"run_id": run.id, "folder": run.path, "config": config, "manifest": run.manifest}
    logger = settings.observe.logger
    remote = [SubprocessListener(partial(logger, **facts, group=settings.run.group))] if logger else []
    return [*own, JsonLines(run.metrics), EventLog(run.events), *remote]


@final
class Training:
    """One process's part of a run, from its newest checkpoint to its end.

    If its role serves, it leads: the steps are computed, and their data drawn, by others.
    """

    def __init__(
        self,
        settings: Settings,
        run: RunDirectory,
        world: World,
        replica: Replica,
        listeners: Sequence[Listener],
        preemption: Preemption,
    ) -> None:
        self._leads = settings.roles[world.role].serves
        self._settings, self._run, self._replica = settings, run, replica
        self._world = world = replace(world, rank=0, size=1) if self._leads else world
        self._preemption = preemption
        self._history = _History(run.metrics)
        self._listeners: list[Listener] = [*listeners, self._history]
        self._stragglers: Stragglers | None = None
        self._links: SlowLinkSearch | None = None
        self._saver = Saver(
            run.checkpoints,
            world,
            world.groups.get(f"checkpoint/{world.role}"),
            keep=settings.checkpoint.keep,
            facts={"strategy": type(settings.strategy).__name__, "logical_ranks": settings.logical_ranks},
            finite=settings.numerics.nonfinite == "stop",
            at=settings.faults.at,
        )

    def run(self, heartbeat: Path | None) -> int:
        """Train; the exit code."""
        steps, replica = self._settings.intervals.steps, self._replica
        first = self._resume(replica)
        if self._settings.observe.step_breakdown and self._world.size > 1:
            self._stragglers, self._places = Stragglers(self._settings.peers(), first.step), places(self._world)
            self._links = slow_link_search(self._world)
        self._emit(RunStarted(self._run.id, steps, first.step, first.evaluated))
        beats = Heartbeat(heartbeat, first.step) if heartbeat else None
        last = self._fit(replica, first, beats)
        if beats:
            beats.step(last.step)
        self._tell(self._saver.finish())
        self._saver.close()
        if last.step < steps:
            self._emit(RunEnded(last.step, "preempted"))
            replica.close(complete=False)
            return PREEMPTED
        model = gather_full(replica.state()["model"], self._world)
        summary = self._result(model) if self._world.rank == 0 else {}
        if summary:
            write_result(self._run, summary)
        self._emit(RunEnded(steps, "completed", summary))
        replica.close(complete=True)
        return 0

    def _emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
        if isinstance(event, StepDone) and self._stragglers and event.splits:
            self._say(event.step, self._stragglers.judge(event.step, event.splits))

    def _examine(self, done: StepDone) -> None:
        """Measure the links, with all other ranks, if their waits give reason to."""
        if self._links and self._links.are_worth_a_look(done):
            edges = network_edges(self._world, self._links.per_node, self._links.distance)
            found = self._links.judge(measured(edges, self._links.per_node)["network"])
            if self._world.rank == 0:
                self._say(done.step, found)

    def _say(self, step: int, found: Iterable[Straggler]) -> None:
        for slow in found:
            host, device = self._places[slow.rank]
            self._emit(Straggling(step, host=host, device=device, **vars(slow)))
            if self._settings.excludes_slow:
                self._leave_out(host)

    def _leave_out(self, host: str) -> None:
        """Save and stop, to go on without ``host``."""
        with self._run.excluded.open("a") as file:
            file.write(f"{host}\n")
        self._preemption.want()

    def _tell(self, saved: Iterable[CheckpointSaved]) -> None:
        for event in saved:
            self._emit(event)

    def _resume(self, replica: Replica) -> TrainingProgress:
        """Load the newest checkpoint, if there is one."""
        checkpoint = newest(self._run.checkpoints, self._world, allow_older=self._settings.checkpoint.allow_older)
        facts: Mapping[str, Any] = checkpoint.facts if checkpoint else {"skipped": 0}
        step = replica.step_reached
        if step and (checkpoint is None or step != checkpoint.step):  # of a server that took over
            return TrainingProgress(step, facts["skipped"], evaluated=not self._settings.intervals.evaluates(step))
        if checkpoint is None:
            return TrainingProgress()
        if step is None:
            self._settings.faults.at("load:begin")
            replica.load(load(checkpoint, replica.state(), ignore=self._settings.checkpoint.ignored(checkpoint.step)))
        return TrainingProgress(checkpoint.step, facts["skipped"], facts.get("evaluated", True))

    def _fit(self, replica: Replica, first: TrainingProgress, heartbeat: Heartbeat | None) -> TrainingProgress:
        settings, world = self._settings, self._world
        part = world if self._leads else settings.data_part(world)
        recipe, order = settings.recipe, settings.order(part.rank, part.size)
        batches: Iterable[list[MicroBatch]] = repeat([])
        test: Any = ()
        if not self._leads:
            train, test = recipe.data("train"), recipe.data("test")
            batches = micro_batches(
                train, order, world.device, first=first.step, workers=settings.training.data_workers
            )

        def evaluation() -> Mapping[str, float]:
            settings.faults.at("evaluate:begin")
            return evaluate(replica, test, part, batch_size=settings.training.evaluate_batch_size)

        callbacks = LoopCallbacks(
            evaluate=evaluation,
            emit=self._emit,
            save=partial(self._save, replica),
            wants_stop=self._preemption.is_wanted,
            begins=partial(settings.faults.at, "step:compute"),
            examine=self._examine,
        )
        timer = StepTimer(world.device) if settings.observe.step_breakdown else None
        watched = settings.faults.within(self._watched(batches, first.step, heartbeat), first.step)
        if settings.observe.profiled:
            trace = self._run.profile(world.rank)
            watched = traced(watched, trace, first=first.step, span=settings.observe.profiled, device=world.device)
        with closing(watched), timer.opened() if timer else nullcontext():
            return fit(
                replica,
                watched,
                world,
                order=order,
                intervals=settings.intervals,
                callbacks=callbacks,
                first=first,
                stop_on_nonfinite=settings.numerics.nonfinite == "stop",
                timer=timer,
            )

    def _watched(self, batches: Iterable[list[MicroBatch]], first: int, heartbeat: Heartbeat | None) -> Iterator[Any]:
        """Each step's data; in between, what has to be looked at at every step."""
        for done, step in enumerate(batches, first):
            if heartbeat:
                heartbeat.step(done)
            self._tell(self._saver.ended())
            yield step

    def _save(self, replica: Replica, position: TrainingProgress) -> None:
        facts = {
            "skipped": position.skipped,
            "evaluated": position.evaluated,
            "metrics": dict(self._history.metrics),
            "samples": position.step * self._settings.training.batch_size,
        }
        self._tell(self._saver.save(replica.state(), step=position.step, facts=facts))
        if not position.evaluated:
            self._tell(self._saver.finish())  # before the evaluation, which may fail

    def _result(self, model: StateDict) -> dict[str, Any]:
        tensors, intervals = tensor_digests(model), self._settings.intervals
        seconds = time.perf_counter() - self._history.started
        steps = intervals.steps - self._history.first
        return {
            "state_digest": state_digest(tensors),
            "tensors": tensors,
            "remarks": self._settings.recipe.remarks(model),
            "metrics_digest": metrics_digest(self._run.metrics),
            "metrics": dict(self._history.metrics),
            "steps": intervals.steps,
            "samples": intervals.steps * self._settings.training.batch_size,
            "seconds": seconds,
            "samples_per_second": steps * self._settings.training.batch_size / seconds,
            "first_step_at": self._history.first_step_at,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "exit_reason": "completed",
        }


@dataclass
class _History:
    """A listener that keeps what the result and the checkpoints need; ``file`` is the run's metrics."""

    file: Path
    started: float = field(default_factory=time.perf_counter)
    first: int = 0
    first_step_at: float | None = None  # Unix time
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self.first, self.metrics = first, last_metrics(self.file) if first else {}
            case StepDone():
                self.first_step_at = self.first_step_at or time.time()
            case Evaluated(metrics=metrics):
                self.metrics = metrics
