"""Initialization from weights in a checkpoint, safetensors files or a state_dict file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from worldsize.checkpoint.manifest_tree import join_tensors, split_tensors
from worldsize.checkpoint.weights import Weights, open_weights
from worldsize.core import ConfigError, Recipe, StateDict
from worldsize.errors import neighbours
from worldsize.seeds import keep_generators
from worldsize.strategies.wrapping import sparse_embeddings

_logger = logging.getLogger(__name__)

_SHOWN = 8  # maximum number of names in a message


@final
@dataclass(frozen=True)
class InitialWeights:
    """The initial weights of a new run; its optimizer starts from scratch."""

    path: Path
    """A checkpoint, a folder of safetensors files, or a state_dict file."""
    strict: bool
    """Whether the files and the model must have the same weight names."""

    def check_recipe(self, recipe: Recipe, *, makes_rows: bool) -> None:
        """Check that the weights fit the recipe's model.

        Unless ``strict``, log the names that are ignored.

        Args:
            recipe: Recipe whose model is initialized.
            makes_rows: Whether servers create the rows of sparse embeddings on first use.

        Raises:
            ConfigError: a shape or, if ``strict``, a name differs; or servers create rows of the model's embeddings.
        """
        model = build_empty_model(recipe)
        if makes_rows and sparse_embeddings(model):
            raise ConfigError(
                "init_from is not supported with this strategy for sparse=True embeddings: servers create their rows "
                "on first use. Use a strategy without servers, or remove init_from; nothing was started."
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        weights = open_weights(self.path)
        weights.verify()
        fits = self._match_sources(shapes, weights, tied_names(model))
        missing, unused = sorted(shapes.keys() - fits.keys()), sorted(weights.entries.keys() - set(fits.values()))
        if missing:
            _logger.warning("init_from: no weights for %s; keeping the random initialization", _format_names(missing))
        if unused:
            _logger.warning("init_from: unused weights %s in %s, not in the model", _format_names(unused), self.path)

    def load_into(self, recipe: Recipe, state: StateDict) -> StateDict:
        """Return ``state`` with its model's weights replaced; each rank reads only its own shards."""
        # imports half of torch.distributed, which a launching process does not need
        from worldsize.checkpoint.load import read_into

        tensors, values = split_tensors({"model": state["model"]})
        model = {name.removeprefix("model/"): tensor for name, tensor in tensors.items()}
        weights = open_weights(self.path)
        ties = {} if model.keys() <= weights.entries.keys() else tied_names(build_empty_model(recipe))
        sources = self._match_sources({name: tuple(tensor.shape) for name, tensor in model.items()}, weights, ties)
        held = {name: model[name].detach() for name in sources if not model[name].is_meta}
        read_into(held, weights, sources)
        return {**state, **join_tensors(values, tensors)}

    def _match_sources(
        self, shapes: Mapping[str, tuple[int, ...]], weights: Weights, ties: Mapping[str, str]
    ) -> dict[str, str]:
        """Map the model's weight names to names in the files, omitting weights that the files lack.

        A tied weight, which has several names in the model, may have any of these names in the files.

        Raises:
            ConfigError: a shape differs, or if ``strict``, a name.
        """
        entries = weights.entries
        others: dict[str, str] = {}  # first name of a weight in the model to a name in the files
        for name, first in ties.items():
            if name in entries:
                others.setdefault(first, name)
        candidates = {name: name if name in entries else others.get(ties.get(name, name)) for name in shapes}
        sources = {name: source for name, source in candidates.items() if source is not None}
        for name, source in sources.items():
            if entries[source].shape != shapes[name]:
                raise ConfigError(
                    f"shape mismatch for {source}: init_from={self.path} has {list(entries[source].shape)}, the model "
                    f"{list(shapes[name])}. Use weights of a model of the same size; nothing was started."
                )
        if self.strict and sources.keys() != shapes.keys():
            name = sorted(shapes.keys() - sources.keys())[0]
            raise ConfigError(
                f"init_from={self.path} is missing the weight {name!r}{neighbours(name, entries)} {_REMEDY}"
            )
        if self.strict and (unused := sorted(entries.keys() - set(sources.values()) - ties.keys())):
            raise ConfigError(
                f"init_from={self.path}: the weight {unused[0]!r} is not in the model"
                f"{neighbours(unused[0], shapes)} {_REMEDY}"
            )
        return sources


_REMEDY = "Set init_from_strict=false to ignore missing and unused weights; nothing was started."


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def build_empty_model(recipe: Recipe) -> nn.Module:
    """Build the recipe's model on the meta device.

    If that fails, build it as sharding strategies do (:class:`.DeferredModel`).
    """
    try:
        with keep_generators(), torch.device("meta"):
            return recipe.model()
    except Exception:  # any exception: recipes are user code, which may e.g. read values of its weights
        # imports half of torch.distributed, which a launching process does not need
        from worldsize.strategies.deferred.model import DeferredModel

        with keep_generators():
            return DeferredModel.from_factory(recipe.model, warns=False).model


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter name in ``model`` to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in model.named_parameters(remove_duplicate=False)}
