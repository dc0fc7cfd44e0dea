"""Divides a chain of layers into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from torch import nn

from worldsize.core import ConfigError, FeatureRecipe, Recipe, saves_state

Cost = tuple[int, int]  # the heaviest stage, and the sum of squares, which balances the others


def balanced(weights: Sequence[int], stages: int) -> list[range]:
    """Divide ``weights`` into contiguous, nonempty parts so that the heaviest part is as light as possible."""

    @cache
    def best(start: int, left: int) -> tuple[Cost, tuple[int, ...]]:
        """Divide the layers from ``start`` on into ``left`` stages; return their cost, and their ends."""
        if left == 1:
            return (total := sum(weights[start:]), total**2), (len(weights),)
        options = []
        for end in range(start + 1, len(weights) - left + 2):
            own, ((heaviest, squares), ends) = sum(weights[start:end]), best(end, left - 1)
            options.append(((max(own, heaviest), own**2 + squares), (end, *ends)))
        return min(options)

    return [range(*ends) for ends in pairwise((0, *best(0, stages)[1]))]


def check_pipelines(recipe: Recipe) -> None:
    """Raise ConfigError if ``recipe`` does not define what a pipeline needs."""
    if isinstance(recipe, FeatureRecipe):
        raise ConfigError(
            f"the loss of {type(recipe).__name__} needs the features of all logical ranks, and only the last stage of "
            "a pipeline has those of a micro-batch. Set strategy.pipeline=1."
        )
    for method, misses in (
        ("layers", "is not divided into layers"),
        ("model_inputs", "does not say what its model takes"),
    ):
        if getattr(type(recipe), method) is getattr(Recipe, method):
            raise ConfigError(f"{type(recipe).__name__} {misses}. Define Recipe.{method}, or set strategy.pipeline=1.")
    if recipe.remembers or saves_state(recipe):
        raise ConfigError(
            f"{type(recipe).__name__} keeps values from step to step, and only the last stage of a pipeline computes "
            "its loss. Set strategy.pipeline=1."
        )


def stages_of(recipe: Recipe, model: nn.Module, stages: int, split: Sequence[int] | None) -> list[list[nn.Module]]:
    """Return the layers of each stage, balanced by parameters, or with stages that begin at the layers ``split``.

    Raises:
        ConfigError: the recipe does not define what a pipeline needs, has too few layers, or ``split`` leaves a stage
            empty.
    """
    check_pipelines(recipe)
    chain = list(recipe.layers(model))
    if len(chain) < stages:
        raise ConfigError(
            f"{type(recipe).__name__} has {len(chain)} layers, too few for {stages} stages. "
            "Set a smaller strategy.pipeline or strategy.stages_per_rank, or deepen the model."
        )
    if split is None:
        parts = balanced([sum(own.numel() for own in layer.parameters()) for layer in chain], stages)
    else:
        parts = [range(*ends) for ends in pairwise((0, *split, len(chain)))]
        if not all(parts):
            raise ConfigError(f"strategy.split={list(split)} leaves a stage empty: there are {len(chain)} layers.")
    return [[chain[place] for place in part] for part in parts]
