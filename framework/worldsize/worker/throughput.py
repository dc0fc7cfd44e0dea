"""Tokens a second, samples of an update, and the model FLOP utilisation: the share of the devices' peak (MFU)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from worldsize.config.learning_rate import update_samples
from worldsize.config.settings import Settings
from worldsize.core import Event, LossOutput, MicroBatch, MultiUpdateRecipe, Recipe, StepDone, World
from worldsize.cost.peaks import peak_flops
from worldsize.reproducibility.seeds import generators_kept

_logger = logging.getLogger(__name__)


def counted_flops(recipe: Recipe, batch: MicroBatch) -> int:
    """Return the operations of the model's forward and backward pass over ``batch``, a multiplication and a sum as two.

    The passes run eagerly on the meta device, where nothing is computed: no weight, buffer or random generator of the
    run changes, and what a strategy does twice, such as activation checkpointing, does not count.
    """
    data = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch.data)
    with generators_kept(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        loss = LossOutput.of(recipe.loss_at(recipe.model(), data, batch.step)).loss
        (loss[0] if isinstance(loss, tuple) else loss).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


@final
class Throughput:
    """Adds to a logged step the samples of an update, tokens a second and, if the devices' peak is known, the MFU."""

    def __init__(self, settings: Settings, world: World) -> None:
        self._recipe = settings.recipe
        self._samples = settings.training.batch_size / settings.logical_ranks  # of a micro-batch
        self._update_samples = update_samples(settings)
        self._tokens = settings.recipe.tokens_per_sample()
        peak = _peak(settings, world) if world.rank == 0 and not isinstance(self._recipe, MultiUpdateRecipe) else None
        self._peak = peak * settings.cluster.processes if peak else None
        self._flops: float | None = None  # of a sample

    def counting(self, batches: Iterable[list[MicroBatch]]) -> Iterable[list[MicroBatch]]:
        """Yield ``batches``, and count the operations of a sample with the first one."""
        for step in batches:
            if self._peak is not None and self._flops is None and step:
                try:
                    self._flops = counted_flops(self._recipe, step[0]) / self._samples
                except Exception as error:  # any exception: recipes are user code, and may need values
                    _logger.warning(
                        "the operations of the model could not be counted, so that no MFU is shown: %s", error
                    )
                    self._peak = None
            yield step

    def told(self, event: Event) -> Event:
        """Return ``event``; that of a logged step with what is known of its throughput and its updates."""
        if not isinstance(event, StepDone):
            return event
        rate, tokens, mfu = event.samples_per_second, None, None
        if self._tokens is not None:
            tokens = rate * self._tokens
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
