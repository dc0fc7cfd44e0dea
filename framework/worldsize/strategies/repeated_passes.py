"""Lets a recipe that keeps values compute a micro-batch twice in a step, where the first result is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import final

from worldsize.core import MicroBatch, Recipe, saves_state


@final
class RepeatedPasses:
    """Undoes what a dropped pass changes in the values that a recipe keeps.

    Ranks that need equally many passes compute one without effect, DDP learns the order of gradients from one, and
    features are computed before the loss that computes them again. Other passes cost nothing.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._has_state = recipe, saves_state(recipe)

    @contextmanager
    def dropped(self, batch: MicroBatch) -> Iterator[None]:
        """Compute a pass of ``batch`` that is repeated in the same step."""
        start = deepcopy(self._recipe.state(batch.logical_rank)) if self._has_state else None
        try:
            yield
        finally:
            if self._has_state:
                self._recipe.load_state(batch.logical_rank, start)
