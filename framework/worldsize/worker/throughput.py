"""Epochs, tokens, samples per update and model FLOPs utilization (MFU) of logged steps.

MFU is the achieved fraction of peak FLOPs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from torch.utils.flop_counter import FlopCounterMode

from worldsize.collectives.cluster_cost import peak_flops
from worldsize.config.learning_rate import update_samples
from worldsize.config.settings import Settings
from worldsize.core import Event, Loss, LossOutput, MicroBatch, Recipe, StepDone, World
from worldsize.data.batches import map_tensors, to_device
from worldsize.data.skips import SkippedSamples
from worldsize.optimizers.groups import create_optimizers, get_trainable_parameters
from worldsize.seeds import keep_generators

_logger = logging.getLogger(__name__)
_META = torch.device("meta")


def count_flops(recipe: Recipe, batch: MicroBatch) -> int:
    """Return the FLOPs of the model's forward and backward passes over ``batch``.

    A multiply-add counts as two. For a recipe with several updates, the result is the total over the updates of the
    batch's step, each with the gradients that its optimizer needs. The passes run eagerly on the meta device, so the
    run's weights, buffers and random generators do not change. Recomputation by the strategy, such as activation
    checkpointing, does not count.
    """
    batch = _move_to_meta(batch)
    with keep_generators(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = recipe.model()
        if recipe.has_several_updates:
            optimizers = create_optimizers(recipe, model)
            for name, loss in recipe.micro_batch_updates(model, batch):
                names = (name,) if isinstance(name, str) else name
                trained = [parameter for each in names for parameter in get_trainable_parameters(optimizers[each])]
                torch.autograd.grad(_extract_loss(loss), trained, retain_graph=True, allow_unused=True)
        else:
            _extract_loss(recipe.micro_batch_loss(model, batch)).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def _extract_loss(loss: Loss) -> torch.Tensor:
    value = LossOutput.from_loss(loss).loss
    return value[0] if isinstance(value, tuple) else value


def _move_to_meta(batch: MicroBatch) -> MicroBatch:
    def move_object(own: Any) -> Any:
        return to_device(copy.copy(own), _META) if callable(getattr(own, "to", None)) else own

    return replace(batch, data=map_tensors(batch.data, lambda tensor: tensor.to(_META), move_object))


@final
class Throughput:
    """Adds the epoch, tokens, samples per update and, if known, the MFU to logged steps.

    ``epoch_samples``: samples per epoch; None if the data are a stream.
    """

    def __init__(self, settings: Settings, world: World, *, epoch_samples: int | None) -> None:
        self._recipe, self._epoch_samples = settings.recipe, epoch_samples
        self._samples = settings.training.batch_size / settings.logical_ranks  # per micro-batch
        self._update_samples = update_samples(settings, settings.training.batch_size)
        self._skipped = SkippedSamples.from_words(settings.training.skip_samples)
        self._tokens = settings.recipe.tokens_per_sample()
        peak = None
        if world.rank == 0:
            peak = settings.cluster.peak_flops or _find_peak_flops(settings.numerics.precision, world.device)
        self._peak = peak * settings.cluster.processes if peak else None
        self._first: MicroBatch | None = None  # on the meta device
        self._flops: float | None = None  # per sample

    def counting(self, batches: Iterable[list[MicroBatch]]) -> Iterable[list[MicroBatch]]:
        """Yield ``batches``, and record the shapes of the first batch, for counting its FLOPs later."""
        for step in batches:
            if self._peak is not None and self._first is None and step:
                self._first = _move_to_meta(step[0])
            yield step

    def _record_flops(self, batch: MicroBatch) -> None:
        try:
            self._flops = count_flops(self._recipe, batch) / self._samples
        except Exception as error:  # any exception, since recipes are user code and may need real values
            _logger.warning("failed to count the model's FLOPs, so MFU is not shown: %s", error)
            self._peak = None

    def add_throughput(self, event: Event) -> Event:
        """Return ``event``; add throughput and samples per update if it is a logged step."""
        if not isinstance(event, StepDone):
            return event
        rate, mfu, size = event.samples_per_second, None, self._tokens
        if self._peak is not None and self._flops is None and self._first is not None:
            self._record_flops(self._first)  # between two steps, so that it does not count as waiting for data
        if self._flops and self._peak:
            mfu = rate * self._flops / self._peak
        return replace(
            event,
            mfu=mfu,
            update_samples=self._update_samples,
            tokens=None if size is None else round(event.samples * size),
            tokens_per_second=None if size is None else rate * size,
            epoch=(self._skipped.find_position(event.samples - 1) + 1) / self._epoch_samples
            if self._epoch_samples
            else None,
        )


def _find_peak_flops(precision: Any, device: torch.device) -> float | None:
    """Return the peak operations per second of one process's device; None if unknown."""
    if device.type != "cuda":
        return None
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), precision)
