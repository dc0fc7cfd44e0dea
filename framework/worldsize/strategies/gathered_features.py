"""Gradients of losses on gathered features, see :class:`~worldsize.core.FeatureRecipe`.

The features of all logical ranks are gathered as bytes. The derivatives of all losses with respect to them are summed
in the fixed tree, so that a step has the same bits on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.collectives.ordered import Counter
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import ConfigError, FeatureRecipe, Features, Loss, MicroBatch
from worldsize.core.recipe_kinds import attach_gradients
from worldsize.seeds import seed_generators
from worldsize.strategies.buffer_combinations import StepShape
from worldsize.strategies.declared_buffers import buffer_slots
from worldsize.strategies.loss_record import differentiable
from worldsize.strategies.step_buffers import KeptBuffers

_Repeated = Callable[[MicroBatch], AbstractContextManager[None]]


@final
class GatheredFeatures:
    """The features of a step, and the derivatives of its losses with respect to them.

    ``call``: runs a function that computes with ``model``; if the model is sharded, gathers its parameters first.
    """

    def __init__(
        self, recipe: FeatureRecipe, model: nn.Module, device: torch.device, call: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._recipe, self._model, self._device, self._call = recipe, model, device, call
        self._features: Sequence[Tensor] = ()  # of all logical ranks, in order
        self._own: dict[int, Sequence[slice]] = {}  # rows of a micro-batch in each tensor, by its id()
        self._gradients: dict[int, Sequence[Tensor | None]] = {}  # by the same id

    def gather_features(
        self,
        batches: Sequence[MicroBatch],
        shape: StepShape,
        dropped: _Repeated,
    ) -> None:
        """Gather the features of all logical ranks; differentiate all losses with respect to them.

        All processes must call it before :meth:`compute_loss`. ``dropped``: returns the context of a discarded pass.
        """
        kept = KeptBuffers(buffer_slots(self._model))

        @contextmanager
        def discard_changes(batch: MicroBatch) -> Iterator[None]:
            try:
                with dropped(batch):
                    yield
            finally:
                kept.restore()

        own = self._compute_features(batches, shape, discard_changes)
        with measure_phase("communication"):
            ends_kr = _count_rows(own, shape, self._device).cumsum(1).tolist()
            rows = []
            for place, parts in enumerate(own):
                ends = [ends_r[shape.logical_rank(place)] for ends_r in ends_kr]
                rows.append([slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)])
            self._features = [
                _gather_rows([parts[index] for parts in own], [each[index] for each in rows], ends_r[-1], shape)
                for index, ends_r in enumerate(ends_kr)
            ]
        self._own = {id(batch): slices for batch, slices in zip(batches, rows, strict=True)}
        self._gradients = self._derivatives(batches, shape, discard_changes)

    def compute_loss(self, batch: MicroBatch) -> Loss:
        """Return the loss of ``batch``; its gradient includes all losses that use its features."""
        features = self._recipe.features(self._model, batch.data)
        loss = self._compute_feature_loss(batch, self._features)
        return attach_gradients(loss, features, self._gradients[id(batch)])

    def _compute_features(
        self, batches: Sequence[MicroBatch], shape: StepShape, repeated: _Repeated
    ) -> list[Sequence[Tensor]]:
        """Return the features of each micro-batch; ranks with fewer micro-batches repeat one."""
        own: list[Sequence[Tensor]] = []
        with torch.no_grad():
            for place in range(shape.passes):
                batch = batches[min(place, len(batches) - 1)]
                seed_generators(batch.seed, self._device)
                with repeated(batch):
                    own.append(self._call(partial(self._recipe.features, self._model, batch.data)))
        return own[: len(batches)]

    def _compute_feature_loss(self, batch: MicroBatch, features: Sequence[Tensor]) -> Loss:
        seed_generators((batch.seed + 1) % 2**63, self._device)
        return self._recipe.feature_loss(self._model, Features(features, self._own[id(batch)]), batch.data)

    def _derivatives(
        self, batches: Sequence[MicroBatch], shape: StepShape, repeated: _Repeated
    ) -> dict[int, Sequence[Tensor | None]]:
        """Return the derivatives of the summed losses with respect to each micro-batch's features."""
        nodes = shape.map_nodes()
        counters = [Counter() for _ in set(nodes.values())]
        for place, node in nodes.items():
            with repeated(batches[place]):
                counters[node].add([self._call(partial(self._derivative, batches[place]))])
        for _ in range(shape.passes - len(batches)):  # keep up with other ranks, since a pass may gather parameters
            with repeated(batches[0]):
                self._call(partial(self._derivative, batches[0]))
        with measure_phase("communication"):
            total_n = shape.sum_nodes([counter.waiting[0][0] for counter in counters])
        trained = [each for each in self._features if each.is_floating_point()]
        parts = iter(torch.split(total_n, [each.numel() for each in trained]))
        sums = [next(parts).view_as(each) if each.is_floating_point() else None for each in self._features]
        return {
            batch: [None if each is None else each[rows] for each, rows in zip(sums, own, strict=True)]
            for batch, own in self._own.items()
        }

    def _derivative(self, batch: MicroBatch) -> Tensor:
        """Return the loss derivative with respect to all logical ranks' features, float32 (n,)."""
        features = [each.detach().requires_grad_(each.is_floating_point()) for each in self._features]
        trained = [each for each in features if each.requires_grad]
        with torch.enable_grad():
            scalar, _ = differentiable(self._compute_feature_loss(batch, features))
            if not scalar.requires_grad:
                raise ConfigError(
                    f"{type(self._recipe).__name__}.feature_loss does not depend on the features of the step. Compute "
                    "it from features.everyone, the features of all logical ranks."
                )
            gradients = torch.autograd.grad(scalar, trained, allow_unused=True, materialize_grads=True)
        return torch.cat([each.float().flatten() for each in gradients])


def _count_rows(own: Sequence[Sequence[Tensor]], shape: StepShape, device: torch.device) -> Tensor:
    """Return the row counts per tensor and logical rank, int64 (tensors, logical ranks)."""
    counts_kr = torch.zeros(len(own[0]), shape.logical_ranks, dtype=torch.int64, device=device)
    for place, parts in enumerate(own):
        for index, part in enumerate(parts):
            counts_kr[index, shape.logical_rank(place)] = len(part)
    return shape.reduce_over_ranks(counts_kr)


def _gather_rows(parts: Sequence[Tensor], rows: Sequence[slice], total: int, shape: StepShape) -> Tensor:
    """Gather a tensor (total, ...) from all processes' ``parts``, each at its ``rows``."""
    gathered = parts[0].new_zeros(total, *parts[0].shape[1:])
    for part, place in zip(parts, rows, strict=True):
        gathered[place] = part
    shape.reduce_over_ranks(gathered.view(-1).view(torch.uint8))
    return gathered
