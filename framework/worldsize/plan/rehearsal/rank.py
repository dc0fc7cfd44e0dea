"""Rehearses one rank: builds its replica, trains and evaluates with the run's own code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final
from unittest.mock import patch

import torch

from worldsize.config.instantiate import describe_failure
from worldsize.config.settings import Settings
from worldsize.core import (
    ConfigError,
    EvaluationBatch,
    EvaluationBatches,
    MicroBatch,
    Recipe,
    Replica,
    ReplicaWrapper,
    RunContext,
    StateDict,
    StepDone,
    StepResult,
    World,
)
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import evaluation_batches, micro_batches
from worldsize.errors import WorldsizeError
from worldsize.loop.agreement import Agreement
from worldsize.loop.averaging import AveragedReplica
from worldsize.loop.fit import LoopCallbacks, LoopConfig, fit
from worldsize.plan.dry_run import world_seen_by
from worldsize.plan.rehearsal.calls import Call, CallRecorder, short_path
from worldsize.plan.rehearsal.exchange import CallIndex, Message, SentMessages
from worldsize.plan.rehearsal.memory import FakeTensors, MemoryRecorder, Peak
from worldsize.seeds import derive_seed, seed_generators
from worldsize.strategies.deferred.model import fill_with_fakes

_CPU = torch.device("cpu")
_BATCHES = 2  # number of batches per evaluated split
_NOTHING = Peak(0, {})


@final
@dataclass(frozen=True)
class Rehearsed:
    """The recorded behavior of one rank.

    Attributes:
        rank: Global rank.
        calls: Collectives and messages of the rank, in order.
        peak: Peak memory in training.
        evaluation: Peak memory in an evaluation. None without one.
        messages: Small tensors sent by the rank.
        error: The error that ended the rehearsal early, with the line. None if there was none.
        building: Peak memory while building the replica.
        waits: Maps a call's number, from 0, to the number of calls made when the rank waited for that call. Calls
            without a wait are missing. None if the rank waits for each call immediately.
        refusal: The message of a ConfigError. None if there was none.
        is_settled: False if the calls still changed in the last allowed repetition of the rehearsal.
    """

    rank: int
    calls: Sequence[Call]
    peak: Peak
    evaluation: Peak | None
    messages: Mapping[CallIndex, Message]
    error: str | None = None
    building: Peak = _NOTHING
    waits: Mapping[int, int] | None = None
    refusal: str | None = None
    is_settled: bool = True

    @property
    def most(self) -> int:
        """Peak tensor bytes over all phases."""
        peaks = (self.building, self.peak, self.evaluation or _NOTHING)
        return max(each.nbytes for each in peaks)


@final
@dataclass(frozen=True)
class RehearsedPart:
    """The part of a run to rehearse.

    Attributes:
        steps: Number of training steps.
        is_fake: Whether tensors have neither memory nor values.
        evaluates: Whether to evaluate two batches of each split after the steps; never with fake tensors.
    """

    steps: int = 2
    is_fake: bool = False
    evaluates: bool = True


@final
@dataclass(frozen=True)
class Recorders:
    """Recorders for the calls and the memory of a rehearsed rank."""

    calls: CallRecorder
    memory: MemoryRecorder


Data = Mapping[str, Any]  # the recipe's data, by split


def load_splits(settings: Settings, part: RehearsedPart) -> Data:
    """Load the recipe's training data and the evaluated splits.

    Raises:
        ConfigError: the recipe cannot load its data.
    """
    splits = settings.evaluation.splits if part.evaluates and not part.is_fake else ()
    return {split: _load_split(settings.recipe, split) for split in dict.fromkeys(("train", *splits))}


def _load_split(recipe: Recipe, split: str) -> Any:
    try:
        return recipe.data(split)
    except WorldsizeError:
        raise
    except Exception as error:  # any exception: recipes are user code
        raise ConfigError(
            f"{type(recipe).__name__} failed to load the {split} data: {describe_failure(error)}. "
            "No process was started. Change the options under recipe."
        ) from error


def rehearse_rank(rank: int, settings: Settings, part: RehearsedPart, data: Data, received: SentMessages) -> Rehearsed:
    """Rehearse ``rank`` in this process with a fake group, replaying messages ``received``."""
    calls, memory, error, refusal = CallRecorder(received), MemoryRecorder(), None, None
    settings.determinism.apply("cpu")
    torch.set_num_threads(1)
    fakes = FakeTensors() if part.is_fake else None
    with world_seen_by(rank, settings, _CPU) as world, memory.recording(fakes.is_own_tensor if fakes else None), calls:
        try:
            take_part(settings, world, part, data, Recorders(calls, memory), fakes)
        except Exception as failure:  # any exception: recipes are user code
            error = _describe_failure(failure, calls.step)
            refusal = str(failure) if isinstance(failure, ConfigError) else None
    return Rehearsed(
        rank,
        calls.calls,
        memory.log.compute_training_peak(),
        memory.log.evaluation_peak(),
        calls.message_recorder.messages,
        error,
        memory.log.building_peak(),
        calls.waits,
        refusal,
    )


def take_part(
    settings: Settings,
    world: World,
    part: RehearsedPart,
    data: Data,
    recorders: Recorders,
    fakes: FakeTensors | None = None,
) -> None:
    """Build this process's replica, train and evaluate; other ranks may be absent.

    Args:
        settings: The run.
        world: The world as seen by this process.
        part: The part of the run to rehearse.
        data: The recipe's data, by split.
        recorders: Recorders to notify at the start of steps and evaluations.
        fakes: Creates fake tensors. None for real ones.
    """
    seed_generators(derive_seed(settings.training.seed, "init"), world.device)
    context = RunContext(
        world,
        replace(settings.numerics, compile=False),  # operations in compiled code cannot be recorded
        seed=settings.training.seed,
        steps=settings.training.steps,
        workers=world.size,
        logical_ranks=settings.logical_ranks,
    )
    with fill_with_fakes(fakes.mode) if fakes else nullcontext():
        inner = settings.strategy.replica(settings.recipe, context)
    if fakes:
        fakes.check_model(inner.state(), settings.strategy)
    averaged = AveragedReplica(inner, settings.average) if settings.average else inner
    recorders.memory.log.begin_training()
    replica, data_part = _RehearsedReplica(averaged, fakes, recorders), settings.data_part(world)
    order, collate = (
        settings.create_order(data_part.rank, data_part.size, inner.dealing),
        get_collate_fn(settings.recipe),
    )
    batches = micro_batches(data["train"], order, world.device, collate=collate)

    def evaluate(step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for split in settings.evaluation.splits if part.evaluates and fakes is None else ():
            recorders.memory.log.begin_evaluation()
            recorders.calls.phase = "evaluation"
            metrics |= replica.evaluate(_evaluation(settings, data[split], split, step, data_part))
        recorders.calls.phase = "logging"
        return metrics

    loop = LoopConfig(part.steps, settings.training.batch_size, log_every=1, stop_on_nonfinite=False)
    with _equal_pace():
        fit(replica, batches, world, config=loop, callbacks=LoopCallbacks(evaluate, lambda event: None))
    recorders.memory.label_state(replica.state())


@contextmanager
def _equal_pace() -> Iterator[None]:
    """Make all ranks report the same speed, one step per second, since the loop's decisions depend on speed."""
    tell = Agreement.update_interval

    def tell_equal_rate(agreement: Agreement, done: StepDone) -> None:
        tell(agreement, replace(done, samples_per_second=done.samples / done.step))  # one step per second

    with patch.object(Agreement, "update_interval", tell_equal_rate):
        yield


def _evaluation(settings: Settings, data: Any, split: str, step: int, part: World) -> EvaluationBatches:
    def load_batches() -> Iterator[EvaluationBatch]:
        batches = evaluation_batches(
            data,
            part,
            batch_size=settings.training.evaluate_batch_size,
            collate=get_collate_fn(settings.recipe),
            drawn=settings.evaluation.batches,
            seed=derive_seed(settings.training.seed, f"evaluation/{split}", step),
        )
        return islice(batches, _BATCHES)  # the same number on all ranks

    return EvaluationBatches(load_batches, split, step)


@final
class _RehearsedReplica(ReplicaWrapper):
    """Trains ``inner`` on real or fake tensors, and notifies ``recorders`` of steps."""

    def __init__(self, inner: Replica, fakes: FakeTensors | None, recorders: Recorders) -> None:
        super().__init__(inner)
        self._fakes, self._recorders = fakes, recorders

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        calls = self._recorders.calls
        calls.step, calls.phase = calls.step + 1, "step"
        try:
            return self._run_step(micro_batches)
        finally:
            calls.phase = "logging"

    def _run_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        if self._fakes is None:
            self._recorders.memory.track_tensors([each.data for each in micro_batches])
            return self._inner.step(micro_batches)
        with self._fakes.create_fakes():
            own = [replace(each, data=self._fakes.replace_tensors(each.data)) for each in micro_batches]
            self._recorders.memory.track_tensors([each.data for each in own])
            result = self._inner.step(own)
        norm = None if result.grad_norm is None else torch.ones(())
        metrics = {name: torch.ones_like(pairs_b2, device="cpu") for name, pairs_b2 in result.metrics.items()}
        return replace(result, losses=[torch.ones(()) for _ in result.losses], grad_norm=norm, metrics=metrics)

    def load(self, state: StateDict) -> None:
        raise NotImplementedError("a rehearsal does not load checkpoints")


def _describe_failure(error: Exception, step: int) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (own or list(frames))[-1]
    when = f"in step {step}" if step else "before the first step"
    return f"{when}: {type(error).__name__}: {error} ({short_path(last.filename)}:{last.lineno})"
