"""Lets a recipe that keeps values compute a micro-batch twice in a step, where the first result is dropped."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, final

from worldsize.core import MicroBatch, Recipe, saves_state


@final
class RepeatedPasses:
    """The values of a recipe at the start of a step, with which each pass of a logical rank begins.

    Ranks that need equally many passes compute one without effect, and others learn the order of gradients from one.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._has_state = recipe, saves_state(recipe)
        self._step = 0
        self._starts: dict[int, Any] = {}  # by logical rank

    def begin(self, batch: MicroBatch) -> None:
        """Begin a pass of ``batch``; whatever an earlier one in the same step has changed is undone."""
        if not self._has_state:
            return
        if batch.step != self._step:
            self._step, self._starts = batch.step, {}
        rank = batch.logical_rank
        if rank in self._starts:
            self._recipe.load_state(rank, deepcopy(self._starts[rank]))
        else:
            self._starts[rank] = deepcopy(self._recipe.state(rank))
