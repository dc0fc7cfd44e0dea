"""Random streams of layers: a layer draws the same numbers in any pipeline stage.

A micro-batch has one random stream. In a pipeline, each process runs only some layers, so it does not draw the numbers
of earlier layers. Here, each layer in ``Recipe.layers`` begins a stream that depends on the seed of the micro-batch and
on the layer's place in the chain; code after the layer uses the stream of the next place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError, FeatureRecipe, Recipe
from worldsize.seeds import derive_seed, seed_generators

_KEPT = 4096  # calls remembered per layer, for recomputation; exceeds the micro-batches in flight


class AdaptedLayer(nn.Module, ABC):
    """A layer for ``Recipe.layers`` that passes additional arguments to ``module``.

    ``module`` is a module of the model. The layer uses the random stream of ``module``. Subclasses may have other
    modules of the model as attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @abstractmethod
    def create_arguments(self, hidden: Tensor) -> Mapping[str, Any]:
        """Return the keyword arguments of ``module`` for ``hidden``, without random draws."""

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.module(hidden, **self.create_arguments(hidden))
        return output


@final
class LayerStreams:
    """Seeds the generators of ``device`` for each micro-batch.

    With ``by_layer``, seeds them also for each layer of ``model``. A layer of the recipe that is not a module of the
    model, such as a head that exists only in a pipeline, continues the stream of the layer before it.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, device: torch.device, *, by_layer: bool) -> None:
        self.device = device
        self.unseen: frozenset[int] = frozenset()
        """Places of layers without a separate stream: neither they nor their predecessors are modules of the model."""
        self._seed, self._count = 0, 0
        self._all_calls: list[_Calls] = []
        self._expected: int | None = None
        if isinstance(recipe, FeatureRecipe) or recipe.has_several_updates:  # no pipeline trains these
            return
        if not by_layer or not (chain := _list_layers(recipe, model)):
            return
        own, places = set(model.modules()), dict[nn.Module, list[int]]()
        self._count = len(chain)
        self.unseen = frozenset(place for place in range(1, len(chain)) if not own & {chain[place], chain[place - 1]})
        for place, layer in enumerate(chain):
            if layer in own and layer is not model:
                places.setdefault(layer, []).append(place)
        for layer, its_places in places.items():
            calls = _Calls(its_places)
            self._all_calls.append(calls)
            layer.register_forward_pre_hook(partial(self._enter_layer, calls), prepend=True)
            if any(place + 1 == self._count or chain[place + 1] not in own for place in its_places):
                layer.register_forward_hook(partial(self._leave_layer, calls))
        calls = _Calls([self._count])
        self._all_calls.append(calls)
        model.register_forward_hook(partial(self._enter_layer, calls))

    @property
    def by_layer(self) -> bool:
        """Whether each layer has a separate random stream."""
        return self._count > 0

    def begin(self, seed: int) -> None:
        """Begin the stream of a micro-batch or an evaluation batch with ``seed``."""
        self._seed, self._expected = seed, None
        for calls in self._all_calls:
            calls.count = 0
        seed_generators(seed, self.device)

    def expect(self, place: int) -> None:
        """Announce the next layer, at ``place``, in a stage, which runs only some layers."""
        self._expected = place

    def enter(self, place: int, repeat: int = 0) -> None:
        """Begin the stream of the layer at ``place`` for its call ``repeat`` (from 0) in a batch."""
        if self._count:
            numbers = (place, repeat) if repeat else (place,)
            seed_generators(derive_seed(self._seed, "layer", *numbers), self.device)

    def enter_loss(self) -> None:
        """Begin the stream of the code after the model, if layers have separate streams."""
        self.enter(self._count)

    def _enter_layer(self, calls: _Calls, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        before = torch.initial_seed()
        if _is_backward():
            if before in calls.seeds:
                seed_generators(calls.seeds[before], self.device)
            return
        calls.begin_call(self._expected)
        self._expected = None
        self.enter(calls.place, calls.repeat)
        calls.record_seed(before, torch.initial_seed())

    def _leave_layer(self, calls: _Calls, *_: Any) -> None:
        """Begin the stream of the next place, whose layer may not be a module of the model."""
        if not torch.compiler.is_compiling() and not _is_backward():
            self.enter(calls.place + 1, calls.repeat)


class _Calls:
    """Counts the calls of a module in a batch; ``places``: its places in the chain of layers."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places, self.count = places, 0
        self.place, self.repeat = places[0], 0
        """The current call's place in the chain, and the number of earlier runs of the chain in the batch."""
        self.seeds: dict[int, int] = {}
        """Seeds of recent calls, keyed by the generator's seed before the call, which recomputation restores."""

    def begin_call(self, expected: int | None) -> None:
        """Count a call; ``expected``: its place, if known."""
        self.repeat, index = divmod(self.count, len(self._places))
        self.place, self.count = self._places[index], self.count + 1
        if expected is not None:
            self.place, self.repeat = expected, 0

    def record_seed(self, before: int, seed: int) -> None:
        """Record the ``seed`` of a call for its recomputation, and drop old ones."""
        self.seeds[before] = seed
        if len(self.seeds) > _KEPT:
            del self.seeds[next(iter(self.seeds))]


def _is_backward() -> bool:
    """Return whether a backward pass is running, so that a forward call is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _list_layers(recipe: Recipe, model: nn.Module) -> list[nn.Module]:
    try:
        chain = list(recipe.layers(model))
    except ConfigError:  # no pipeline supports this model, so no other run needs the same streams
        return []
    return [layer.module if isinstance(layer, AdaptedLayer) else layer for layer in chain]
