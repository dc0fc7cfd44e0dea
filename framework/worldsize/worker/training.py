"""Training in one process: resumes, trains, saves, and records the result."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from worldsize.checkpoint.format import RECIPE_STATES, STREAMS, Checkpoint
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.collectives.gather_full import use_full
from worldsize.collectives.step_timer import StepTimer
from worldsize.config.settings import Settings
from worldsize.core import (
    ConfigError,
    Event,
    Listener,
    MicroBatch,
    Replica,
    RunContext,
    RunEnded,
    RunStarted,
    Spike,
    StepDone,
    World,
)
from worldsize.data.batches import get_collate_fn, is_iterable
from worldsize.data.loader import micro_batches
from worldsize.data.order import SampleDigest, epoch_length, refuse_skips
from worldsize.data.streams import TrainingStream
from worldsize.data.worker_loader import AutoWorkers
from worldsize.errors import WorldsizeError
from worldsize.healing.loop_state import GangHooks, LoopState
from worldsize.healing.rewind import request_rewind
from worldsize.loop.fit import LoopCallbacks, TrainingProgress, fit
from worldsize.loop.recording import stop_after
from worldsize.loop.spikes import SpikeFoundError
from worldsize.observe.health.files import why_host_is_slow
from worldsize.observe.timing import peak_device_bytes, trace_steps
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.record.metrics import evaluations, last_step, logged_values, metrics_digest
from worldsize.record.run_directory import create_parent_folders
from worldsize.record.run_record import write_result
from worldsize.seeds import derive_seed, seed_generators
from worldsize.worker.checkpointing import Checkpointing, History
from worldsize.worker.context import ProcessResources, create_patience
from worldsize.worker.evaluation import advance_schedules, evaluate_splits, try_evaluation
from worldsize.worker.replica_check import ReplicaCheck
from worldsize.worker.save_interval import save_interval
from worldsize.worker.slow_hosts import SlowHostWatch
from worldsize.worker.step_memory import StepMemory, writes_states
from worldsize.worker.throughput import Throughput
from worldsize.worker.uneven_streams import UnevenStreams
from worldsize.world.processes import PREEMPTED, Heartbeat
from worldsize.world.world import threads_per_process

_Examination = Callable[[StepDone], None]  # called on all ranks at a logged step
_StreamStates = Callable[[int], dict[str, Tensor]]  # returns the states after a step, given its number


@final
class Training:
    """One process's training, from the newest checkpoint to the end of the run.

    A process whose role serves leads the loop, while other processes load the data and compute the steps.
    """

    def __init__(
        self,
        resources: ProcessResources,
        settings: Settings,
        world: World,
        replica: Replica,
        state: LoopState,
        hooks: GangHooks,
    ) -> None:
        self._resources, self._state, self._hooks, run = resources, state, hooks, resources.run
        self._leads = settings.roles[world.role].serves
        self._settings, self._run, self._replica = settings, run, replica
        self._world = world = replace(world, rank=0, size=1) if self._leads else world
        self._part = part = world if self._leads else settings.data_part(world)
        order = settings.create_order(part.rank, part.size, replica.dealing)
        self._memory = StepMemory(settings.recipe, world, part, order, exact=settings.determinism.exact_mode)
        self._preemption = resources.preemption
        self._history = History(run.metrics)
        if spike := settings.spike:
            self._history.logged = deque(maxlen=spike.window + 1)
        self._watch: SlowHostWatch | None = None
        if settings.observe.step_breakdown and world.size > 1:
            exclude = self._exclude_host if settings.excludes_slow else None
            health = partial(why_host_is_slow, run, per_node=settings.cluster.processes_per_node)
            self._watch = SlowHostWatch(
                world, settings.list_peer_groups(), emit=self._emit_events, exclude=exclude, health=health
            )
        context = RunContext(world, integrity=settings.integrity, emit=self._emit_events)
        self._replicas = ReplicaCheck(replica, context) if settings.integrity.replicas and world.size > 1 else None
        self._own: list[Listener] = [self._history, *([self._watch] if self._watch else [])]
        group = world.groups.get(f"checkpoint/{world.role}")
        is_auto, on_failure = settings.checkpoint.every == "auto", settings.checkpoint.on_failure
        self._interval = save_interval(settings.cluster, run, group, emit=self._emit_events) if is_auto else None
        self._checkpoints = Checkpointing(
            resources.get_saver(world, group), emit=self._emit_events, on_failure=on_failure, interval=self._interval
        )

    @property
    def state(self) -> LoopState:
        """The state to continue with in the next membership."""
        return replace(self._state, saves=self._interval.export_facts() if self._interval else {})

    def run(self) -> int:
        """Train to the end, or until a request to stop; return the exit code."""
        steps, replica, saves = self._settings.training.steps, self._replica, self._state.saves
        first, checkpoint = (self._state.progress, None) if self._state.progress else self._load_checkpoint()
        if self._settings.heals:
            first = self._memory.restore_or_share(first)
        self._record_progress(first)
        self._hooks.copy(first)
        log = self._state.log
        self._resources.tell_started(RunStarted(self._run.id, steps, *log.get_last_logged(first)), passing=self._own)
        if log.missing and log.missing.step > last_step(self._run.metrics):
            self._emit_events(log.missing)
            self._state = replace(self._state, log=replace(self._state.log, step=log.missing.step))
        self._broadcast_evaluations(first)
        self._broadcast_logged_values(first)
        self._checkpoints.resume(first.step, checkpoint.facts if checkpoint else {"save_interval": saves})
        beats = self._resources.get_heartbeat(first.step)
        try:
            if first.step:
                self._check_spike()  # processes may have died before they could react to the last logged step
            last = self._run_loop(first, checkpoint, beats)
        except SpikeFoundError as found:
            return self._end_for_rewind(found.spike, beats)
        if beats:
            beats.step(last.step)
        self._checkpoints.finish()
        if last.step < steps and last.stopped_early is None:
            self._checkpoints.check_stop()
            self._hooks.finish()
            self._checkpoints.close()
            self._emit_events(RunEnded(last.step, "preempted"))
            replica.close(complete=False)
            return PREEMPTED
        self._compare_replicas(last.step)
        self._checkpoints.check_end(last.step)
        if summary := use_full(replica.state()["model"], self._world, partial(self._collect_result, last=last)) or {}:
            write_result(self._run, summary)
        if self._settings.heals and self._world.group is not None:
            dist.barrier(group=self._world.group)  # a process that fails before this barrier is still replaced
        self._hooks.finish()
        self._checkpoints.close()  # not earlier, since the replacement of a failed process may save again
        self._emit_events(RunEnded(last.step, "completed", summary))
        replica.close(complete=True)
        return 0

    def _broadcast_evaluations(self, first: TrainingProgress) -> None:
        """Broadcast the recorded evaluations from the first rank if early stopping depends on them."""
        if self._settings.early_stopping and first.step:
            done = first.step if first.evaluated else first.step - 1  # later evaluations are repeated
            logged = [list[Any](evaluations(self._run.metrics, until=done) if self._world.rank == 0 else ())]
            if self._world.group is not None:
                dist.broadcast_object_list(logged, group=self._world.group, group_src=0)
            self._history.evaluations = logged[0]

    def _broadcast_logged_values(self, first: TrainingProgress) -> None:
        """Broadcast the recorded losses and gradient norms from the first rank, to detect spikes.

        Raises:
            WorldsizeError: this process skips other samples than the first rank.
        """
        spike, own = self._settings.spike, list(self._settings.training.skip_samples)
        last = spike.window + 1 if spike and first.step else 0
        logged = logged_values(self._run.metrics, until=first.step, last=last) if self._world.rank == 0 else []
        shared: list[Any] = [logged, own]
        if self._world.group is not None:
            dist.broadcast_object_list(shared, group=self._world.group, group_src=0)
        if shared[1] != own:  # the run went back, and a network file system still has the earlier file
            raise WorldsizeError(
                f"{self._run.config} has skip_samples={own} on this host, but {shared[1]} on the first one. Check that "
                "the hosts share the run folder, and resume the run."
            )
        self._history.logged.clear()  # it may have a step that was logged again after a change of the membership
        self._history.logged.extend(shared[0])

    def _check_spike(self, done: StepDone | None = None) -> None:
        """Report a spike at the last logged step; with on_spike=rewind, raise SpikeFoundError on all ranks.

        The first rank decides, since some strategies have different gradient norms on each rank.
        """
        if (rule := self._settings.spike) is None:
            return
        found = [rule.find_spike([*self._history.logged], nonfinite=self._settings.spikes_if_nonfinite)]
        if rule.is_rewinding and self._world.group is not None:
            dist.broadcast_object_list(found, group=self._world.group, group_src=0)
        if (spike := found[0]) is None:
            return
        if rule.is_rewinding:
            self._emit_events(spike)
            raise SpikeFoundError(spike)
        if done is not None:
            self._emit_events(spike)

    def _end_for_rewind(self, spike: Spike, heartbeat: Heartbeat | None) -> int:
        """End this attempt without saving, so that the run goes back to before ``spike``."""
        is_stopping = self._preemption.is_wanted()
        step = max(spike.step, self._state.progress.step if self._state.progress else 0)
        if heartbeat:
            heartbeat.step(step)
        self._checkpoints.finish()
        if self._world.rank == 0:
            request_rewind(self._run, spike, stops=is_stopping)
        self._hooks.finish()
        self._checkpoints.close()
        self._emit_events(RunEnded(step, "preempted"))
        self._replica.close(complete=False)
        return PREEMPTED

    def _ends_early(self) -> str | None:
        rule = self._settings.early_stopping
        return rule.find_stop_reason(self._history.evaluations) if rule else None

    def _emit_events(self, *events: Event) -> None:
        for event in events:
            is_new = self._state.log.is_new(event)
            if isinstance(event, StepDone) and is_new:
                self._state = replace(self._state, log=replace(self._state.log, last=event))
                event = self._add_sample_digest(event)
            for listener in [*(self._resources.listeners if is_new else ()), *self._own]:
                listener(event)

    def _add_sample_digest(self, event: StepDone) -> StepDone:
        """Add the digest of the sample indices since the previous logged step, on the first process."""
        train = self._resources.train
        if self._leads or self._world.rank != 0 or is_iterable(train):
            return event
        first = self._settings.loop.find_previous_log(event.step)
        return replace(event, indices_sha256=self._samples.digest_steps(range(first + 1, event.step + 1)))

    @cached_property
    def _samples(self) -> SampleDigest:
        return SampleDigest(self._resources.train, self._memory.order)

    def _record_progress(self, progress: TrainingProgress) -> None:
        self._state = replace(self._state, progress=progress)

    def _exclude_host(self, host: str) -> None:
        """Save and stop, so that the run continues without ``host``."""
        with self._run.excluded.open("a") as file:
            file.write(f"{host}\n")
        self._preemption.request_stop()

    def _load_checkpoint(self) -> tuple[TrainingProgress, Checkpoint | None]:
        """Load the initial checkpoint, if any; return the progress and the checkpoint."""
        settings, replica, checkpoint = self._settings, self._replica, self._state.checkpoint
        if self._leads:  # not earlier, since the servers may have continued meanwhile
            checkpoint = find_newest(self._run.checkpoints, self._world, allow_older=settings.checkpoint.allow_older)
        facts: Mapping[str, Any] = checkpoint.facts if checkpoint else {"skipped": 0}
        step, metrics = replica.step_reached, self._memory.own_metrics(facts.get("training_metrics", {}))
        if step and (checkpoint is None or step != checkpoint.step):  # a server took over and continued
            return TrainingProgress(step, facts["skipped"], evaluated=not settings.loop.evaluates(step)), checkpoint
        if checkpoint is None:
            if settings.initial and step is None:
                replica.load(settings.initial.load_into(settings.recipe, replica.state()))
            return TrainingProgress(), None
        if step is None:
            settings.faults.report_point("load:begin")
            replica.load(
                load_checkpoint(
                    checkpoint, replica.state(), ignore=settings.checkpoint.list_ignored_parts(checkpoint.step)
                )
            )
        if RECIPE_STATES not in settings.checkpoint.list_ignored_parts(checkpoint.step):
            self._memory.resume(checkpoint)
        first = TrainingProgress(checkpoint.step, facts["skipped"], facts.get("evaluated", True), metrics=metrics)
        return first, checkpoint

    def _run_loop(
        self, first: TrainingProgress, checkpoint: Checkpoint | None, heartbeat: Heartbeat | None
    ) -> TrainingProgress:
        settings, world, part = self._settings, self._world, self._part
        batches, streams, examine_data = self._load_data(first.step, checkpoint)
        is_drawn = not self._leads and not is_iterable(self._resources.train)
        epoch_samples = epoch_length(self._resources.train) if is_drawn else None
        throughput = Throughput(settings, world, epoch_samples=epoch_samples)
        data, splits = self._resources.evaluation, settings.evaluation.splits
        if not self._leads:
            data.build_splits(splits)
            if first.step == 0:
                try_evaluation(self._replica, data, settings, part)

        def evaluation(step: int) -> Mapping[str, float]:
            settings.faults.report_point("evaluate:begin")
            with self._checkpoints.exclude_duration():
                metrics = evaluate_splits(self._replica, data, splits, step=step, part=part)
            advance_schedules(self._replica, settings.training, metrics, step=step)
            return metrics

        callbacks = LoopCallbacks(
            evaluate=evaluation,
            emit=lambda *events: self._emit_events(*map(throughput.add_throughput, events)),
            save=partial(self._save_checkpoint, streams),
            save_is_due=self._checkpoints.is_due,
            ends_early=self._ends_early,
            wishes=lambda: self._checkpoints.collect_wishes(stop=self._preemption.is_wanted()),
            at=settings.faults.report_point,
            progressed=self._record_progress,
            logged=self._hooks.copy,
            check=self._check_spike,
            examine=partial(
                _run_examinations, [self._watch.measure_links if self._watch else _skip_examination, examine_data]
            ),
            share=self._memory.share_step if settings.heals else None,
            before_update=self._resources.before_update,
        )
        timer = StepTimer(world.device) if settings.observe.step_breakdown else None
        watched = settings.faults.inject_into_steps(
            self._watch_steps(throughput.counting(batches), first.step, heartbeat), first.step
        )
        if span := settings.observe.profile.steps:
            trace = self._run.get_profile_file(world.rank)
            create_parent_folders(trace, self._run)
            watched = trace_steps(watched, trace, first=first.step, span=(span[0], span[1]), device=world.device)
        for last in (settings.run.stop_after, settings.observe.profile.operations):
            if last is not None:
                watched = stop_after(watched, last, first=first.step)
        with closing(watched), timer.record_phases() if timer else nullcontext():
            return fit(
                self._replica,
                watched,
                world,
                config=settings.loop,
                callbacks=callbacks,
                first=first,
                timer=timer,
            )

    def _load_data(
        self, first: int, checkpoint: Checkpoint | None
    ) -> tuple[Iterable[list[MicroBatch]], _StreamStates, _Examination]:
        """Return the batches after step ``first``, a stream's states, and its examination.

        States and examination are functions. For a leading process, the batches are empty.
        """
        if self._leads:
            return repeat([]), _no_states, _skip_examination
        settings, world, states, examine = self._settings, self._world, _no_states, _skip_examination
        seed_generators(derive_seed(settings.training.seed, "data"), world.device)  # the dataset may be shuffled
        train = self._resources.train
        if settings.skips_samples:
            refuse_skips(train)
        if is_iterable(train):
            if settings.integrity.audit:
                raise ConfigError(
                    "integrity.audit requires a map-style dataset; a stream's micro-batches cannot be loaded by a "
                    "second process. Return a map-style dataset, or set integrity.audit=0."
                )
            if settings.heals:
                raise ConfigError(
                    "strategy.on_failure=heal requires a map-style dataset; a stream's position is lost with its "
                    "process. Return a map-style dataset, or set strategy.on_failure=restart."
                )
            if checkpoint and STREAMS in settings.checkpoint.list_ignored_parts(checkpoint.step):
                checkpoint = None
            train = TrainingStream(train, checkpoint=checkpoint, speaks=world.rank == 0)
            examine = UnevenStreams(train, world).compare_passes
            if self._writes_states:
                states = train.collect_states
        workers: int | AutoWorkers | str = settings.training.data_workers
        if not isinstance(workers, int):
            workers = AutoWorkers(
                threads_per_process(settings.cluster.processes_per_node), tell=self._emit_events, rank=world.rank
            )
        collate = get_collate_fn(settings.recipe)
        patience = create_patience(settings.cluster.timeout, world, self._preemption, heals=settings.heals)
        batches = micro_batches(
            train, self._memory.order, world.device, first=first, workers=workers, collate=collate, patience=patience
        )
        return batches, states, examine

    @property
    def _writes_states(self) -> bool:
        return not self._leads and writes_states(self._settings.strategy, self._world)

    def _watch_steps(
        self, batches: Iterable[list[MicroBatch]], first: int, heartbeat: Heartbeat | None
    ) -> Iterator[Any]:
        """Yield each step's data; before each step, run the checks and callbacks that are due."""
        for done, step in enumerate(batches, first):
            if heartbeat:
                heartbeat.step(done)
            self._checkpoints.begin_step()
            self._hooks.begin_step(done)
            if self._replicas is not None and done and done % self._settings.integrity.replicas == 0:
                self._compare_replicas(done)
            self._memory.check_shared()
            yield step

    def _compare_replicas(self, done: int) -> None:
        """Compare copies after ``done`` steps: at intervals, and before each save and the result."""
        if self._replicas is not None:
            self._replicas.compare(done + 1)

    def _save_checkpoint(self, streams: _StreamStates, progress: TrainingProgress) -> None:
        self._compare_replicas(progress.step)
        facts = {
            "strategy": type(self._settings.strategy).__name__,
            "logical_ranks": self._settings.logical_ranks,
            "skipped": progress.skipped,
            "evaluated": progress.evaluated,
            "metrics": dict(self._history.metrics),
            "samples": progress.step * self._settings.training.batch_size,
            "training_metrics": self._memory.metrics_of_all(progress.metrics),
        }
        states = streams(progress.step) | (
            self._memory.collect_states() if self._memory.has_state and self._writes_states else {}
        )
        self._checkpoints.save(self._replica.state(), step=progress.step, facts=facts, streams=states)
        if not progress.evaluated:
            self._checkpoints.finish()  # before the evaluation, which may fail

    def _collect_result(self, model: Mapping[str, Tensor], *, last: TrainingProgress) -> dict[str, Any]:
        tensors, batch_size = tensor_digests(model), self._settings.training.batch_size
        seconds, steps = time.perf_counter() - self._history.started, last.step - self._history.first
        return {
            "state_digest": state_digest(tensors),
            "tensors": tensors,
            "remarks": self._settings.recipe.remarks(model),
            "metrics_digest": metrics_digest(self._run.metrics),
            "metrics": dict(self._history.metrics),
            "steps": last.step,
            "samples": last.step * batch_size,
            "seconds": seconds,
            "samples_per_second": steps * batch_size / seconds,
            "first_step_at": self._history.first_step_at,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            **peak_device_bytes(self._world.device),
            "exit_reason": "completed",
            **({"compiled": compiled} if (compiled := self._history.compiled) else {}),
            **({"stopped_early": last.stopped_early} if last.stopped_early else {}),
            **({"failed_saves": failed} if (failed := self._checkpoints.list_failed_saves()) else {}),
        }


def _no_states(step: int) -> dict[str, Tensor]:
    return {}


def _skip_examination(done: StepDone) -> None: ...


def _run_examinations(examinations: Iterable[_Examination], done: StepDone) -> None:
    for examine in examinations:
        examine(done)
