"""Averaging of weights over training steps, and evaluation with and without averaging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from worldsize.collectives.per_rank import get_local_shard
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import MicroBatch, Replica, ReplicaWrapper, StateDict, StepResult
from worldsize.core.sections import WeightAverage


@final
class AveragedReplica(ReplicaWrapper):
    """Trains ``inner``, and averages this rank's shard of the weights after each step.

    Averaging does not communicate. As in torch.optim.swa_utils.AveragedModel, all weights are averaged, including those
    that the step did not change, and the first averaging copies the weights. A step whose updates were all skipped does
    not count.

    The average has float32 precision, or the weights' precision if higher. Buffers and frozen parameters are not
    averaged. In addition to the keys of ``inner``, the state has a key ``ema`` with the averaged ``weights``, by the
    model's names, and the number of ``updates``.
    """

    def __init__(self, inner: Replica, average: WeightAverage) -> None:
        super().__init__(inner)
        self._average = average
        self._updates = 0
        averages: dict[Tensor, Tensor] = {}  # keyed by weight, so that a weight with several names is averaged once
        weights = inner.trained_weights()
        for weight in weights.values():
            if weight not in averages:
                averages[weight] = weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        self._weights = {name: averages[weight] for name, weight in weights.items()}
        self._held = {average: weight for weight, average in averages.items() if not weight.is_meta}

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        result = self._inner.step(micro_batches)
        if not result.skipped or result.partly or result.overflowed:
            self._updates += 1
            if self._updates % self._average.every == 0:
                with measure_phase("update"), torch.no_grad():
                    self._update_average()
        return result

    def _update_average(self) -> None:
        """Add the current weights to the average."""
        averages, live = self._get_local_shards()
        averagings = self._updates // self._average.every - 1
        if averagings == 0:
            torch._foreach_copy_(averages, live)
            return
        wide = [tensor.to(average.dtype) for average, tensor in zip(averages, live, strict=True)]
        torch._foreach_lerp_(averages, wide, 1 - self._average.decay_after(averagings))

    def _get_local_shards(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's shards of the averages, and of the weights in the same order."""
        return [get_local_shard(average) for average in self._held], [
            get_local_shard(weight) for weight in self._held.values()
        ]

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """Replace the weights with their average in this block, once there is one."""
        if self._updates < self._average.every:
            yield
            return
        with torch.no_grad():
            self._inner.trained_weights()  # reshards weights that an evaluation gathered
            averages, live = self._get_local_shards()
            kept = [tensor.clone() for tensor in live]
            torch._foreach_copy_(live, averages)
        try:
            yield
        finally:  # training may continue after an interrupted evaluation
            with torch.no_grad():
                self._inner.trained_weights()
                torch._foreach_copy_(self._get_local_shards()[1], kept)

    def state(self) -> StateDict:
        return {**self._inner.state(), "ema": {"weights": self._weights, "updates": self._updates}}

    def load(self, state: StateDict) -> None:
        self._inner.load(state)
        kept = state["ema"]
        self._updates = kept["updates"]
        with torch.no_grad():
            averages, live = self._get_local_shards()
            if self._updates == 0:  # the checkpoint lacks the average, or the user ignores it
                torch._foreach_copy_(averages, live)
                return
            for name, average in self._weights.items():
                if average in self._held:
                    get_local_shard(average).copy_(get_local_shard(kept["weights"][name]))


def evaluate_all(replica: Replica, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """Return the metrics of the weights, and of their average if ``replica`` has one.

    Metrics of the average have the prefix ``ema/``.
    """
    metrics = evaluate()
    if not isinstance(replica, AveragedReplica):
        return metrics
    with replica.use_average():
        return {**metrics, **{f"ema/{name}": value for name, value in evaluate().items()}}
