"""Makes the replica of a process that trains a model alone."""

from __future__ import annotations

from torch import nn

from worldsize.core import MultiUpdateRecipe, Recipe, Reduction, RunContext
from worldsize.strategies.model_replica import ModelReplica
from worldsize.strategies.multi_train_state import MultiTrainState
from worldsize.strategies.multi_update import MultiUpdateReplica
from worldsize.strategies.reducers import gradient_reducer
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.update_reducers import update_reducer


def alone(recipe: Recipe, model: nn.Module, context: RunContext, reduce: Reduction = "flat") -> ModelReplica:
    """Return a replica that trains ``model``, on the device of ``context.world``, in this process alone."""
    if isinstance(recipe, MultiUpdateRecipe):
        reducer, states = update_reducer(reduce, model, None), MultiTrainState.of(recipe, model)
        return MultiUpdateReplica(recipe, context, train_state=states, reducer=reducer, sums_alone=True)
    sums = gradient_reducer(reduce, model, None)
    return SynchronousReplica(recipe, context, train_state=TrainState.of(recipe, model), reducer=sums, sums_alone=True)


def train_state_of(recipe: Recipe, model: nn.Module) -> TrainState | MultiTrainState:
    """Make the optimizers and schedules of ``recipe`` for ``model``."""
    if isinstance(recipe, MultiUpdateRecipe):
        return MultiTrainState.of(recipe, model)
    return TrainState.of(recipe, model)
