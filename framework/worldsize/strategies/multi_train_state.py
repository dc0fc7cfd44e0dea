"""The optimizers and schedules of a recipe with several updates, and their state in the form that checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, MultiUpdateRecipe, StateDict
from worldsize.errors import neighbours
from worldsize.optimizers.groups import named_by
from worldsize.optimizers.schedule_free import begin_training
from worldsize.record.determinism import drawn_apart
from worldsize.strategies.schedules import Schedule
from worldsize.strategies.train_state import OptimizerState, TrainState, load_weights


@final
@dataclass(frozen=True)
class MultiTrainState:
    """The model that a recipe trains with several optimizers.

    Their state is saved as that of one optimizer with the parameter groups of all, by the names of parameters.
    """

    model: nn.Module
    parts: Mapping[str, TrainState]
    """Each optimizer with its schedule, by the optimizer's name, in the recipe's order."""

    @staticmethod
    def of(recipe: MultiUpdateRecipe, model: nn.Module) -> MultiTrainState:
        """Make the optimizers and schedules of ``recipe`` for ``model``."""
        return MultiTrainState.scheduled(recipe, model, optimizers_of(recipe, model), {})

    @staticmethod
    def scheduled(
        recipe: MultiUpdateRecipe,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        sharded: Mapping[str, OptimizerState],
    ) -> MultiTrainState:
        """Make schedules for ``optimizers``; ``sharded`` has the state of those of which this rank holds a part."""
        schedules = schedules_of(recipe, optimizers)
        parts = {
            name: TrainState(model, optimizer, schedules.get(name), sharded.get(name))
            for name, optimizer in optimizers.items()
        }
        return MultiTrainState(model, parts)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers in the recipe's order."""
        return [part.optimizer for part in self.parts.values()]

    @property
    def schedules(self) -> Sequence[Schedule]:
        """The schedules in the recipe's order."""
        return [schedule for part in self.parts.values() for schedule in part.schedules]

    def state(self) -> StateDict:
        """Return the state of model, optimizers and schedules, which any world size and strategy can load."""
        model = self.model.state_dict()  # first, since it reshards parameters, by which optimizer state is named
        optimizers = {name: part.optimizer_state() for name, part in self.parts.items()}
        extra = {name: state["extra"] for name, state in optimizers.items() if "extra" in state}
        return {
            "model": model,
            "optimizer": {
                "state": {name: values for state in optimizers.values() for name, values in state["state"].items()},
                "param_groups": [group for state in optimizers.values() for group in state["param_groups"]],
                **({"extra": extra} if extra else {}),
            },
            "schedule": {
                name: part.schedule.state_dict() for name, part in self.parts.items() if part.schedule is not None
            },
        }

    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned, and set the learning rates of the next step."""
        load_weights(self.model, state["model"])
        groups = list(state["optimizer"]["param_groups"])
        for name, part in self.parts.items():
            own, groups = _split(groups, len(part.optimizer.param_groups))
            names = [each for group in own for each in group["params"]]
            kept = state["optimizer"]["state"]
            own_state = {each: kept[each] for each in names if each in kept}
            extra = state["optimizer"].get("extra", {}).get(name, {})
            part.load_optimizer({"state": own_state, "param_groups": own, "extra": extra})
            if part.schedule is not None:
                if name not in state["schedule"]:
                    raise ConfigError(
                        f"the checkpoint has no state of the schedule {name!r}{neighbours(name, state['schedule'])} "
                        "Give the recipe the schedules that it had."
                    )
                part.load_schedule(state["schedule"][name])


def _split(groups: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return groups[:count], groups[count:]


def optimizers_of(recipe: MultiUpdateRecipe, model: nn.Module) -> Mapping[str, Optimizer]:
    """Make the recipe's optimizers.

    Raises:
        ConfigError: there is no optimizer, one has nothing to update, or two of them share a parameter.
    """
    with named_by(model), drawn_apart("optimizer"):
        optimizers: Any = recipe.optimizers(model)
    kind = type(recipe).__name__
    if not isinstance(optimizers, Mapping) or not all(isinstance(each, Optimizer) for each in optimizers.values()):
        raise ConfigError(f"{kind}.optimizers returned no mapping of names to optimizers. Return {{name: optimizer}}.")
    if not optimizers:
        raise ConfigError(f"{kind}.optimizers returned no optimizer. Return at least one, as {{name: optimizer}}.")
    for each in optimizers.values():
        begin_training(each)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        if not parameters_of(optimizer):
            raise ConfigError(
                f"{kind}.optimizers: all parameters of {name!r} are frozen. Leave it out, or let one require gradients."
            )
        for parameter in parameters_of(optimizer):
            if (owner := owners.setdefault(id(parameter), name)) != name:
                raise ConfigError(
                    f"{kind} gives {names.get(id(parameter), 'a parameter')!r} to two optimizers, {owner!r} and "
                    f"{name!r}; their state is kept by the names of parameters. Give each parameter to one of them."
                )
    return optimizers


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that ``optimizer`` updates, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def schedules_of(recipe: MultiUpdateRecipe, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Schedule]:
    """Make the recipe's schedules.

    Raises:
        ConfigError: a schedule's name is that of no optimizer, or not that of its own.
    """
    schedules, kind = recipe.schedules(optimizers), type(recipe).__name__
    for name, schedule in schedules.items():
        if name not in optimizers:
            raise ConfigError(f"{kind}.schedules: no optimizer {name!r}{neighbours(name, optimizers)}")
        if schedule.optimizer is not optimizers[name]:
            raise ConfigError(
                f"{kind}.schedules: the schedule {name!r} is that of another optimizer. Give each schedule the name "
                "of its optimizer."
            )
    return {name: Schedule(plain) for name, plain in schedules.items()}
