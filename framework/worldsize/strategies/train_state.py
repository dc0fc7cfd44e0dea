"""A model with its optimizer and schedule, and their state in the form that checkpoints have, for every strategy.

torch.distributed.checkpoint is imported inside functions: it takes as long as torch itself, which commands that only
compose, show or submit a run need not wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.collectives.per_rank import local, zeros_like
from worldsize.core import Recipe, StateDict
from worldsize.errors import CheckpointError
from worldsize.optimizers.counters import attributes_kept, counters_kept
from worldsize.optimizers.groups import all_parameters, named_by
from worldsize.optimizers.schedule_free import begin_training, has_begun, is_schedule_free
from worldsize.record.determinism import drawn_apart
from worldsize.strategies.schedules import Schedule
from worldsize.strategies.step_hooks import without_recipe_hooks
from worldsize.world.processes import gpus_hidden


class OptimizerState(ABC):
    """An optimizer's state by the names of the model's parameters, as a single process would hold it."""

    @abstractmethod
    def state(self) -> StateDict:
        """Return the state; tensors that other ranks hold are on the meta device."""

    @abstractmethod
    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned, under this strategy or another."""


class OptimizedModel(Protocol):
    """A model with one or several optimizers, whose state can be saved and loaded."""

    @property
    def model(self) -> nn.Module:
        """Return the model."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers, which share no parameter."""

    @property
    def schedules(self) -> Sequence[Schedule]:
        """Return the schedules."""

    def state(self) -> StateDict:
        """Return the state of all, which any world size and strategy can load."""

    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned."""


@final
@dataclass(frozen=True)
class TrainState:
    """The model, optimizer and schedule that a recipe trains, on one device."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule | None
    sharded: OptimizerState | None = None
    """The optimizer's state if this rank holds a part of it; None: it holds all of it."""

    @staticmethod
    def of(recipe: Recipe, model: nn.Module) -> TrainState:
        """Make the optimizer and schedule of ``recipe`` for ``model``."""
        optimizer = optimizer_of(recipe, model)
        return TrainState(model, optimizer, Schedule.of(recipe.schedule(optimizer)))

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The single optimizer."""
        return (self.optimizer,)

    @property
    def schedules(self) -> Sequence[Schedule]:
        """The schedule, if there is one."""
        return () if self.schedule is None else (self.schedule,)

    def state(self) -> StateDict:
        """Return the state of model, optimizer and schedule, which any world size and strategy can load.

        The optimizer's state is by the names of the model's parameters.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer_state(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else {},
        }

    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned, and set the learning rates of the next step."""
        load_weights(self.model, state["model"])
        self.load_optimizer(state["optimizer"])
        self.load_schedule(state["schedule"])

    def optimizer_state(self) -> StateDict:
        """Return the optimizer's state by the names of parameters, as a single process would hold it."""
        return named_state(self.model, self.optimizer) if self.sharded is None else self.sharded.state()

    def load_optimizer(self, state: StateDict) -> None:
        """Load what :meth:`optimizer_state` returned."""
        if self.sharded is not None:
            self.sharded.load(state)
            return
        load_named_state(self.model, self.optimizer, state)

    def load_schedule(self, state: StateDict) -> None:
        """Load the schedule's state, and set the learning rates of the next step."""
        if self.schedule is not None:
            self.schedule.load_state_dict(state)
            self.schedule.set_rates()


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load the weights of ``model``, without those that are its own tensors and were filled in place."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        model.load_state_dict(weights)  # says which are missing
        return
    others = {name: value for name, value in weights.items() if not _share_memory(own[name], value)}
    model.load_state_dict(others, strict=False)


def _share_memory(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    one, other = local(one), local(other)
    if not (one.layout is other.layout is torch.strided):  # others have no address
        return False
    return one.data_ptr() == other.data_ptr() and (one.shape, one.stride(), one.dtype) == (
        other.shape,
        other.stride(),
        other.dtype,
    )


def optimizer_of(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Make the optimizer of ``recipe``, whose parameter groups may be chosen by the names that ``model`` has."""
    with named_by(model), drawn_apart("optimizer"):
        optimizer = recipe.optimizer(model)
    begin_training(optimizer)
    return optimizer


def extra_state(optimizer: Optimizer) -> StateDict:
    """Return the entries that an optimizer adds to its ``state_dict()``, besides its state and groups."""
    return {name: value for name, value in optimizer.state_dict().items() if name not in ("state", "param_groups")}


def named_state(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """Return the optimizer's state by the names of parameters; of those without a step, the initial state.

    :func:`extra_state` is the entry ``extra``, if there is any.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    fresh = not optimizer.state
    extra = deepcopy(extra_state(optimizer)) if fresh else extra_state(optimizer)  # a probe may change it
    with gpus_hidden(), without_recipe_hooks(optimizer):
        if fresh:
            _probe(optimizer)
        options = [{**group} for group in optimizer.param_groups]
        with attributes_kept(optimizer), _weights_kept(optimizer, () if optimizer.state else all_parameters(optimizer)):
            state: StateDict = {**get_optimizer_state_dict(model, optimizer)}
        if not optimizer.state:  # torch has taken a step to create some, which may have changed options
            for saved, group, before in zip(state["param_groups"], optimizer.param_groups, options, strict=True):
                for each in (saved, group):
                    for name in each.keys() - before.keys():
                        del each[name]
                group.update(before)
                saved.update({name: value for name, value in before.items() if name in saved and name != "params"})
    # some optimizers (Adagrad) also keep state for frozen parameters, which torch ignores when it loads
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    state["state"] = {name: values for name, values in state["state"].items() if name not in frozen}
    if fresh:
        _count_from_zero(state["state"].values())
        optimizer.state.clear()
    elif state["state"]:
        state["state"] |= _initial_states(model, optimizer, without=state["state"].keys() | frozen)
    return {**state, "extra": extra} if extra else state


def _initial_states(model: nn.Module, optimizer: Optimizer, *, without: Set[str]) -> StateDict:
    """Return the initial state of each parameter that has had no gradient so far: all but those ``without``."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    named, own = dict(model.named_parameters()), {id(each) for each in all_parameters(optimizer)}
    late = {name: each for name, each in named.items() if name not in without and id(each) in own}
    if not late:
        return {}
    before, gradients = set(optimizer.state), [(each, each.grad) for each in all_parameters(optimizer)]
    with gpus_hidden(), without_recipe_hooks(optimizer):
        _probe(optimizer, only={id(each) for each in late.values()})
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
    """Load what :func:`named_state` returned; an optimizer that had not stepped is reset.

    Raises:
        CheckpointError: the state lacks an entry that the optimizer adds to its ``state_dict()``.
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    extra: Mapping[str, Any] = state.get("extra", {})
    if lost := sorted(extra_state(optimizer).keys() - extra.keys()):
        raise CheckpointError(
            f"the saved state of {type(optimizer).__name__} lacks the entry {lost[0]!r} of its state_dict(). "
            "Resume with the run's own optimizer, or leave its state out with checkpoint.ignore=[optimizer]."
        )
    fresh = not optimizer.state
    with gpus_hidden(), without_recipe_hooks(optimizer):
        if fresh:
            _probe(optimizer)
        unprobed = () if optimizer.state else all_parameters(optimizer)
        with attributes_kept(optimizer), _weights_kept(optimizer, unprobed), _loads_caught(optimizer) as caught:
            set_optimizer_state_dict(model, optimizer, {name: state[name] for name in ("state", "param_groups")})
        for each in caught:
            optimizer.load_state_dict({**each, **deepcopy(dict(extra))})
    if not fresh:
        return
    if _has_not_stepped(optimizer):  # the initial state of NAdam, Rprop and ASGD is not that after a step
        optimizer.state.clear()
    for key in [key for key, values in optimizer.state.items() if "step" in values and float(values["step"]) == 0]:
        del optimizer.state[key]  # of a parameter that has had no gradient so far


@contextmanager
def _loads_caught(optimizer: Optimizer) -> Iterator[list[StateDict]]:
    """Collect the states that are loaded within the context; ``optimizer`` does not get them.

    torch's helper drops extra state, and may take a step, so that counters must be restored before a load.
    """
    caught, own = list[StateDict](), vars(optimizer)
    before = {name: own[name] for name in ("load_state_dict",) if name in own}
    own["load_state_dict"] = lambda state_dict: caught.append(state_dict)
    try:
        yield caught
    finally:
        del own["load_state_dict"]
        own.update(before)


def _probe(optimizer: Optimizer, only: Set[int] | None = None) -> None:
    """Take a step that changes no weight, to create all entries of the state, with zero moments.

    ``only``: the ids of the parameters that it is for; None: all.
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
    """Restore ``parameters`` after the context: optimizers that are not torch's may set their rate in each step."""
    weights = [] if type(optimizer).__module__.startswith("torch.") else list(parameters)
    copies = [each.detach().clone() for each in weights]
    yield
    with torch.no_grad():
        for each, copy in zip(weights, copies, strict=True):
            each.copy_(copy)


def _has_not_stepped(optimizer: Optimizer) -> bool:
    """Decide by the step counts, or for SGD by its momentum buffers, since its first step ignores dampening."""
    if is_schedule_free(optimizer):
        return not has_begun(optimizer)
    states = list(optimizer.state.values())
    if any(group.get("dampening") for group in optimizer.param_groups):
        buffers = [buffer for state in states if (buffer := state.get("momentum_buffer")) is not None]
        return not any(bool(torch.any(local(buffer) != 0)) for buffer in buffers)
    return bool(states) and all("step" in state and float(state["step"]) == 0 for state in states)
