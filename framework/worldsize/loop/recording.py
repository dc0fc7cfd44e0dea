"""Trains up to one step, and records the operations of this step and the state after each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, final

from torch import Tensor, nn

from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.core import Loss, MicroBatch, Recipe, Replica, ReplicaWrapper, StepResult, Update
from worldsize.data.data_wait import StopBetweenSteps
from worldsize.record.operations import STATES, OperationRecorder, digest_tensor

T = TypeVar("T")


def stop_after(steps: Iterable[T], last: int, *, first: int) -> Generator[T]:
    """Yield ``steps``, numbered from ``first + 1``; stop training on all ranks after step ``last``."""
    for number, step in enumerate(steps, first + 1):
        if number > last:
            raise StopBetweenSteps
        yield step


@final
class RecordingReplica(ReplicaWrapper):
    """Trains ``inner``; records the operations of ``step``, and on the first rank a digest of each step's state.

    Args:
        inner: The replica to train.
        recipe: Its recipe; the replica's passes must call ``micro_batch_loss`` or ``micro_batch_updates``.
        folder: Folder of the files.
        rank: This process's rank.
        step: The step to record.
        saved: ``STREAM/NUMBER`` of an operation in this step whose inputs and results are saved.
    """

    def __init__(
        self, inner: Replica, recipe: Recipe, folder: Path, *, rank: int, step: int, saved: str | None
    ) -> None:
        super().__init__(inner)
        self._recipe, self._folder = recipe, folder
        self._rank, self._step, self._saved = rank, step, saved
        self._digested = False
        folder.mkdir(parents=True, exist_ok=True)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        step = micro_batches[0].step
        if not self._digested:
            self._digested = True
            self._write_state(step - 1)
        result = self._record_step(micro_batches) if step == self._step else self._inner.step(micro_batches)
        self._write_state(step)
        return result

    def _record_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        with OperationRecorder(self._folder, process=self._rank, saved=self._saved) as recorder:
            recorder.add_tensors("state", self._collect_tensors())
            with _attribute_passes(self._recipe, recorder):
                result = self._inner.step(micro_batches)
            recorder.add_tensors("new state", self._collect_tensors())
            return result

    def _collect_tensors(self) -> dict[str, Tensor]:
        return split_tensors(self._inner.state())[0]

    def _write_state(self, step: int) -> None:
        if self._rank == 0:
            digest = hashlib.sha256()
            for name, tensor in self._collect_tensors().items():
                digest.update(f"{name} {digest_tensor(tensor)}".encode())
            with (self._folder / STATES).open("a") as file:
                file.write(json.dumps({"step": step, "digest": digest.hexdigest()}) + "\n")


@contextmanager
def _attribute_passes(recipe: Recipe, recorder: OperationRecorder) -> Iterator[None]:
    """Attribute each pass of ``recipe`` in this block to its logical rank."""
    compute_loss, compute_updates = recipe.micro_batch_loss, recipe.micro_batch_updates

    def micro_batch_loss(model: nn.Module, batch: MicroBatch) -> Loss:
        with recorder.compute(model, batch.data, logical_rank=batch.logical_rank):
            return compute_loss(model, batch)

    def micro_batch_updates(model: nn.Module, batch: MicroBatch) -> Generator[Update, None, Any]:
        updates = iter(compute_updates(model, batch))
        while True:
            with recorder.compute(model, batch.data, logical_rank=batch.logical_rank):
                try:
                    update = next(updates)
                except StopIteration as end:
                    return end.value
            yield update

    # attributes of the object, since strategies check the class of a recipe; it may have set some of its own
    wrappers = {"micro_batch_loss": micro_batch_loss, "micro_batch_updates": micro_batch_updates}
    previous = {name: vars(recipe)[name] for name in wrappers if name in vars(recipe)}
    vars(recipe).update(wrappers)
    try:
        yield
    finally:
        for name in wrappers:
            del vars(recipe)[name]
        vars(recipe).update(previous)
