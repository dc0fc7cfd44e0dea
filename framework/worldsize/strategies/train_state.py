"""A model with optimizers and schedules, and their state as saved in checkpoints.

torch.distributed.checkpoint is imported inside functions because its import takes as long as torch's, and commands
that only compose, show or submit a run do not need it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.collectives.per_rank import get_local_shard, zeros_like
from worldsize.core import ONE_UPDATE, ConfigError, Recipe, StateDict
from worldsize.errors import CheckpointError, neighbours
from worldsize.moved import resolve_renamed
from worldsize.optimizers.counters import attributes_kept, counters_kept
from worldsize.optimizers.groups import all_parameters, create_optimizers
from worldsize.optimizers.schedule_free import has_begun, is_schedule_free
from worldsize.strategies.schedules import Schedule
from worldsize.strategies.step_hooks import disable_recipe_hooks
from worldsize.world.processes import gpus_hidden


class OptimizerState(ABC):
    """Abstract base: unsharded optimizer state, keyed by parameter name."""

    @abstractmethod
    def state(self) -> StateDict:
        """Return the state; tensors held by other ranks are on the meta device."""

    @abstractmethod
    def load(self, state: StateDict) -> None:
        """Load the result of :meth:`state`, from this or any other strategy."""


@final
@dataclass(frozen=True)
class OptimizerPart:
    """An optimizer of a model, with its schedule."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule | None = None
    sharded: OptimizerState | None = None
    """The optimizer's state if this rank holds only a part of it, else None."""

    def state(self) -> StateDict:
        """Return the unsharded optimizer state, keyed by parameter name."""
        return collect_named_state(self.model, self.optimizer) if self.sharded is None else self.sharded.state()

    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned."""
        if self.sharded is not None:
            self.sharded.load(state)
            return
        load_named_state(self.model, self.optimizer, state)


@final
@dataclass(frozen=True)
class TrainState:
    """The model that a recipe trains, on one device, with its optimizers and their schedules.

    The states of several optimizers are saved as one state with all parameter groups.
    """

    model: nn.Module
    parts: Mapping[str, OptimizerPart]
    """Each optimizer with its schedule, keyed by the optimizer's name, in the recipe's order."""

    @staticmethod
    def from_recipe(
        recipe: Recipe,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer] | None = None,
        sharded: Mapping[str, OptimizerState] = {},
    ) -> TrainState:
        """Create the optimizers and schedules of ``recipe`` for ``model``.

        Args:
            recipe: The recipe.
            model: Its model.
            optimizers: Its optimizers by name, if they already exist.
            sharded: The sharded state, by name, of optimizers that this rank holds only in part.
        """
        optimizers = create_optimizers(recipe, model) if optimizers is None else optimizers
        schedules = Schedule.create_schedules(recipe, optimizers)
        parts = {
            name: OptimizerPart(model, optimizer, schedules.get(name), sharded.get(name))
            for name, optimizer in optimizers.items()
        }
        return TrainState(model, parts)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of a recipe with one update per step."""
        return self.parts[ONE_UPDATE].optimizer

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers in the recipe's order."""
        return [part.optimizer for part in self.parts.values()]

    @property
    def schedules(self) -> Sequence[Schedule]:
        """The schedules in the recipe's order."""
        return [part.schedule for part in self.parts.values() if part.schedule is not None]

    def state(self) -> StateDict:
        """Return the state of model, optimizers and schedules, for any world size and strategy.

        Optimizer state is keyed by parameter name.
        """
        model = self.model.state_dict()  # first, since it reshards the parameters that key optimizer state
        states = {name: part.state() for name, part in self.parts.items()}
        extra = {name: state["extra"] for name, state in states.items() if "extra" in state}
        schedules = {name: part.schedule.state_dict() for name, part in self.parts.items() if part.schedule is not None}
        return {
            "model": model,
            "optimizer": {
                "state": {name: values for state in states.values() for name, values in state["state"].items()},
                "param_groups": [group for state in states.values() for group in state["param_groups"]],
                **({"extra": extra.get(ONE_UPDATE, extra)} if extra else {}),
            },
            "schedule": schedules.get(ONE_UPDATE, schedules),
        }

    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned, and set the learning rates of the next step."""
        load_weights(self.model, state["model"])
        is_one = ONE_UPDATE in self.parts
        optimizers = {ONE_UPDATE: state["optimizer"]} if is_one else self._split_state(state["optimizer"])
        schedules = {ONE_UPDATE: state["schedule"]} if is_one else state["schedule"]
        for name, part in self.parts.items():
            part.load(optimizers[name])
            if part.schedule is not None:
                if name not in schedules:
                    raise ConfigError(
                        f"the checkpoint has no state for the schedule {name!r}{neighbours(name, schedules)} Use the "
                        "schedules of the checkpoint in the recipe."
                    )
                part.schedule.load_state_dict(schedules[name])
                part.schedule.set_rates()

    def _split_state(self, state: StateDict) -> Mapping[str, StateDict]:
        """Split the saved state by optimizer."""
        divided, first = dict[str, StateDict](), 0
        for name, part in self.parts.items():
            groups = state["param_groups"][first : first + len(part.optimizer.param_groups)]
            first += len(groups)
            names = [each for group in groups for each in group["params"]]
            own = {each: state["state"][each] for each in names if each in state["state"]}
            divided[name] = {"state": own, "param_groups": groups, "extra": state.get("extra", {}).get(name, {})}
        return divided


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load the weights of ``model``, except tensors that were already filled in place."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        model.load_state_dict(weights)  # reports missing names
        return
    others = {name: value for name, value in weights.items() if not _share_memory(own[name], value)}
    model.load_state_dict(others, strict=False)


def _share_memory(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    one, other = get_local_shard(one), get_local_shard(other)
    if not (one.layout is other.layout is torch.strided):  # other layouts lack an address
        return False
    return one.data_ptr() == other.data_ptr() and (one.shape, one.stride(), one.dtype) == (
        other.shape,
        other.stride(),
        other.dtype,
    )


def extra_state(optimizer: Optimizer) -> StateDict:
    """Return the ``state_dict()`` entries besides ``state`` and ``param_groups``."""
    return {name: value for name, value in optimizer.state_dict().items() if name not in ("state", "param_groups")}


def collect_named_state(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """Return optimizer state by parameter name.

    Parameters that have not been stepped have their initial state. The entry ``extra`` holds :func:`extra_state`, if
    there is any.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    fresh = not optimizer.state
    extra = deepcopy(extra_state(optimizer)) if fresh else extra_state(optimizer)  # the probe step may change it
    with gpus_hidden(), disable_recipe_hooks(optimizer):
        if fresh:
            _take_probe_step(optimizer)
        options = [{**group} for group in optimizer.param_groups]
        with attributes_kept(optimizer), _weights_kept(optimizer, () if optimizer.state else all_parameters(optimizer)):
            state: StateDict = {**get_optimizer_state_dict(model, optimizer)}
        if not optimizer.state:  # torch took a step to create state, which may have changed options
            for saved, group, before in zip(state["param_groups"], optimizer.param_groups, options, strict=True):
                for each in (saved, group):
                    for name in each.keys() - before.keys():
                        del each[name]
                group.update(before)
                saved.update({name: value for name, value in before.items() if name in saved and name != "params"})
    # some optimizers, such as Adagrad, also keep state for frozen parameters, which torch does not load
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    state["state"] = {name: values for name, values in state["state"].items() if name not in frozen}
    if fresh:
        _count_from_zero(state["state"].values())
        optimizer.state.clear()
    elif state["state"]:
        state["state"] |= _initial_states(model, optimizer, without=state["state"].keys() | frozen)
    return {**state, "extra": extra} if extra else state


def _initial_states(model: nn.Module, optimizer: Optimizer, *, without: Set[str]) -> StateDict:
    """Return the initial state of parameters without a gradient so far: all but ``without``."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    named, own = dict(model.named_parameters()), {id(each) for each in all_parameters(optimizer)}
    late = {name: each for name, each in named.items() if name not in without and id(each) in own}
    if not late:
        return {}
    before, gradients = set(optimizer.state), [(each, each.grad) for each in all_parameters(optimizer)]
    with gpus_hidden(), disable_recipe_hooks(optimizer):
        _take_probe_step(optimizer, only={id(each) for each in late.values()})
        states: Any = get_optimizer_state_dict(model, optimizer)["state"]
    for each, gradient in gradients:
        each.grad = gradient
    for key in optimizer.state.keys() - before:
        del optimizer.state[key]
    initial: StateDict = {name: states[name] for name in late if name in states}
    _count_from_zero(initial.values())
    return initial


def _count_from_zero(states: Iterable[dict[str, Any]]) -> None:
    for values in states:
        if isinstance(count := values.get("step"), Tensor):
            count.zero_()
        elif count is not None:
            values["step"] = 0


def load_named_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`collect_named_state` returned.

    A state saved before any step leaves ``optimizer.state`` empty.

    Raises:
        CheckpointError: the state lacks an entry that the optimizer adds to its ``state_dict()``.
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    extra: Mapping[str, Any] = state.get("extra", {})
    if lost := sorted(extra_state(optimizer).keys() - extra.keys()):
        raise CheckpointError(
            f"the saved state of {type(optimizer).__name__} is missing {lost[0]!r}, an entry of its state_dict(). "
            "Resume with the run's original optimizer, or set checkpoint.ignore=[optimizer] to skip the optimizer "
            "state."
        )
    fresh = not optimizer.state
    with gpus_hidden(), disable_recipe_hooks(optimizer):
        if fresh:
            _take_probe_step(optimizer)
        unprobed = () if optimizer.state else all_parameters(optimizer)
        with attributes_kept(optimizer), _weights_kept(optimizer, unprobed), _loads_caught(optimizer) as caught:
            set_optimizer_state_dict(model, optimizer, {name: state[name] for name in ("state", "param_groups")})
        for each in caught:
            optimizer.load_state_dict({**each, **deepcopy(dict(extra))})
    if not fresh:
        return
    if _has_not_stepped(optimizer):  # NAdam, Rprop and ASGD start from a different state than after a probe step
        optimizer.state.clear()
    for key in [key for key, values in optimizer.state.items() if "step" in values and float(values["step"]) == 0]:
        del optimizer.state[key]  # of a parameter without a gradient so far


@contextmanager
def _loads_caught(optimizer: Optimizer) -> Iterator[list[StateDict]]:
    """Collect states passed to ``load_state_dict`` within the context, without loading them.

    ``set_optimizer_state_dict`` drops extra state and may take a step. The caller undoes that step, and then loads the
    whole state itself.
    """
    caught, own = list[StateDict](), vars(optimizer)
    before = {name: own[name] for name in ("load_state_dict",) if name in own}
    own["load_state_dict"] = lambda state_dict: caught.append(state_dict)
    try:
        yield caught
    finally:
        del own["load_state_dict"]
        own.update(before)


def _take_probe_step(optimizer: Optimizer, only: Set[int] | None = None) -> None:
    """Take a step that does not change weights, to create all state entries with zero moments.

    ``only``: ids of the parameters to step, or None for all.
    """
    parameters = all_parameters(optimizer)
    probed = [each for each in parameters if each.requires_grad and (only is None or id(each) in only)]
    with counters_kept(optimizer), _weights_kept(optimizer, probed):
        for parameter in parameters:
            parameter.grad = None
        for parameter in probed:
            parameter.grad = zeros_like(parameter)
        optimizer.step()
    optimizer.zero_grad()


@contextmanager
def _weights_kept(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restore ``parameters``; optimizers outside torch may override a learning rate of 0."""
    weights = [] if type(optimizer).__module__.startswith("torch.") else list(parameters)
    copies = [each.detach().clone() for each in weights]
    yield
    with torch.no_grad():
        for each, copy in zip(weights, copies, strict=True):
            each.copy_(copy)


def _has_not_stepped(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` has not stepped, from step counts or momentum buffers."""
    if is_schedule_free(optimizer):
        return not has_begun(optimizer)
    states = list(optimizer.state.values())
    if any(group.get("dampening") for group in optimizer.param_groups):  # not applied in the first step
        buffers = [buffer for state in states if (buffer := state.get("momentum_buffer")) is not None]
        return not any(bool(torch.any(get_local_shard(buffer) != 0)) for buffer in buffers)
    return bool(states) and all("step" in state and float(state["step"]) == 0 for state in states)


def __getattr__(name: str) -> Any:
    return resolve_renamed(__name__, name)
