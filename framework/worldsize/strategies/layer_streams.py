"""Random streams of layers, so that a layer draws the same numbers in any stage of a pipeline.

A micro-batch has one random stream. In a pipeline, each process runs only some layers, so it cannot know what earlier
layers have drawn. Here, each layer in ``Recipe.layers`` begins a stream that depends on the seed of the micro-batch and
on the layer's place, and what follows the layer has the stream of the next place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError, Recipe
from worldsize.seeds import derive_seed, seed_generators


class AdaptedLayer(nn.Module, ABC):
    """A layer for ``Recipe.layers`` that calls ``module``, a module of the model, with more arguments than the input.

    It has the random stream of ``module``. Subclasses may have other modules of the model as attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @abstractmethod
    def create_arguments(self, hidden: Tensor) -> Mapping[str, Any]:
        """Return the keyword arguments of ``module`` for input ``hidden``, without drawing random numbers."""

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.module(hidden, **self.create_arguments(hidden))
        return output


@final
class LayerStreams:
    """Seeds the generators of ``device`` for each micro-batch, and with ``by_layer`` also for each layer of ``model``.

    A layer of the recipe that is not a module of the model, such as a head that exists only in a pipeline, continues
    the stream of the layer before it.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, device: torch.device, *, by_layer: bool) -> None:
        self.device = device
        self.unseen: frozenset[int] = frozenset()
        """Places of layers without a stream of their own: neither they nor the layers before are in the model."""
        self._seed, self._count = 0, 0
        if not by_layer or recipe.has_several_updates or not (chain := _list_layers(recipe, model)):
            return
        own = set(model.modules())
        self._count = len(chain)
        self.unseen = frozenset(place for place in range(1, len(chain)) if not own & {chain[place], chain[place - 1]})
        for place, (layer, following) in enumerate(zip_longest(chain, chain[1:])):
            if layer in own and layer is not model:
                layer.register_forward_pre_hook(partial(self._enter, place), prepend=True)
                if following not in own:
                    layer.register_forward_hook(partial(self._enter, place + 1))
        model.register_forward_hook(partial(self._enter, self._count))

    @property
    def by_layer(self) -> bool:
        """Whether layers have streams of their own."""
        return self._count > 0

    def begin(self, seed: int) -> None:
        """Begin the stream of a micro-batch or an evaluation batch with ``seed``."""
        self._seed = seed
        seed_generators(seed, self.device)

    def enter(self, place: int) -> None:
        """Begin the stream of the layer at ``place``, unless layers have no streams."""
        if self._count:
            seed_generators(derive_seed(self._seed, "layer", place), self.device)

    def enter_loss(self) -> None:
        """Begin the stream of what follows the model, unless layers have no streams."""
        self.enter(self._count)

    def _enter(self, place: int, *_: Any) -> None:
        self.enter(place)


def _list_layers(recipe: Recipe, model: nn.Module) -> list[nn.Module]:
    try:
        chain = list(recipe.layers(model))
    except ConfigError:  # no pipeline supports this model, so no other run needs the same streams
        return []
    return [layer.module if isinstance(layer, AdaptedLayer) else layer for layer in chain]
