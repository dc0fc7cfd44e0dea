"""Tokens a second, samples of an update, and the model FLOP utilisation: the share of the devices' peak (MFU)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from worldsize.collectives.cluster_cost import peak_flops
from worldsize.config.learning_rate import update_samples
from worldsize.config.settings import Settings
from worldsize.core import Event, Loss, LossOutput, MicroBatch, MultiUpdateRecipe, Recipe, StepDone, World
from worldsize.data.batches import map_tensors, to_device
from worldsize.record.determinism import generators_kept
from worldsize.strategies.multi_train_state import optimizers_of, parameters_of

_logger = logging.getLogger(__name__)
_META = torch.device("meta")


def counted_flops(recipe: Recipe, batch: MicroBatch) -> int:
    """Return the operations of the model's forward and backward pass over ``batch``, a multiplication and a sum as two.

    Of a recipe with several updates it is those of all updates of the batch's step, each with the gradients that its
    optimizer needs. The passes run eagerly on the meta device, where nothing is computed: no weight, buffer or random
    generator of the run changes, and what a strategy does twice, such as activation checkpointing, does not count.
    """
    batch = _on_meta(batch)
    with generators_kept(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = recipe.model()
        if isinstance(recipe, MultiUpdateRecipe):
            optimizers = optimizers_of(recipe, model)
            for name, loss in recipe.micro_batch_updates(model, batch):
                names = (name,) if isinstance(name, str) else name
                trained = [parameter for each in names for parameter in parameters_of(optimizers[each])]
                torch.autograd.grad(_scalar(loss), trained, retain_graph=True, allow_unused=True)
        else:
            _scalar(recipe.micro_batch_loss(model, batch)).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def _scalar(loss: Loss) -> Tensor:
    value = LossOutput.of(loss).loss
    return value[0] if isinstance(value, tuple) else value


def _on_meta(batch: MicroBatch) -> MicroBatch:
    def on_meta(own: Any) -> Any:
        return to_device(copy.copy(own), _META) if callable(getattr(own, "to", None)) else own

    return replace(batch, data=map_tensors(batch.data, lambda tensor: tensor.to(_META), on_meta))


@final
class Throughput:
    """Adds to a logged step the samples of an update, tokens a second and, if the devices' peak is known, the MFU."""

    def __init__(self, settings: Settings, world: World) -> None:
        self._recipe = settings.recipe
        self._samples = settings.training.batch_size / settings.logical_ranks  # of a micro-batch
        self._update_samples = update_samples(settings, settings.training.batch_size)
        self._tokens = settings.recipe.tokens_per_sample()
        peak = _peak(settings, world) if world.rank == 0 else None
        self._peak = peak * settings.cluster.processes if peak else None
        self._first: MicroBatch | None = None  # without its values
        self._flops: float | None = None  # of a sample

    def counting(self, batches: Iterable[list[MicroBatch]]) -> Iterable[list[MicroBatch]]:
        """Yield ``batches``, and note the shape of the first one, whose operations are counted later."""
        for step in batches:
            if self._peak is not None and self._first is None and step:
                self._first = _on_meta(step[0])
            yield step

    def _count(self, batch: MicroBatch) -> None:
        try:
            self._flops = counted_flops(self._recipe, batch) / self._samples
        except Exception as error:  # any exception: recipes are user code, and may need values
            _logger.warning("the operations of the model could not be counted, so that no MFU is shown: %s", error)
            self._peak = None

    def told(self, event: Event) -> Event:
        """Return ``event``; that of a logged step with what is known of its throughput and its updates."""
        if not isinstance(event, StepDone):
            return event
        rate, tokens, mfu = event.samples_per_second, None, None
        if self._tokens is not None:
            tokens = rate * self._tokens
        if self._peak is not None and self._flops is None and self._first is not None:
            self._count(self._first)  # between two steps: it is no wait for data
        if self._flops and self._peak:
            mfu = rate * self._flops / self._peak
        return replace(event, tokens_per_second=tokens, mfu=mfu, update_samples=self._update_samples)


def _peak(settings: Settings, world: World) -> float | None:
    """Return the operations a second of one process's device; None: neither declared nor known."""
    if settings.cluster.peak_flops is not None:
        return settings.cluster.peak_flops
    if world.device.type != "cuda":
        return None
    precision: Any = settings.numerics.precision
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return peak_flops(torch.cuda.get_device_name(world.device), precision)
