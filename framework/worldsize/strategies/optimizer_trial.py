"""Trials of a recipe's optimizer on small tensors, to see whether ranks may update shards.

If updates are elementwise, any rank can update any shard, with the same bits. A norm over a parameter needs the whole
parameter, and a global norm needs all parameters. A second trial checks whether additional ``state_dict()`` entries
are the same on ranks with different parameters. :func:`substitute_parameters` replaces a model's parameters while the
recipe creates its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.core import Recipe, StateDict
from worldsize.optimizers.groups import all_parameters, create_optimizers
from worldsize.seeds import keep_generators
from worldsize.strategies.step_hooks import disable_recipe_hooks, enclose_steps
from worldsize.strategies.train_state import collect_named_state, extra_state, load_named_state
from worldsize.world.processes import gpus_hidden

_STEPS = 6  # several, since the first steps of some algorithms are special
_LENGTHS = (11, 7, 3, 3)  # odd, so that vectorized loops have a remainder
_LENGTH = 37  # length of a one-dimensional parameter
_OF_A_KIND = 2  # number of parameters to try per group and shape
_LR = 1e-2  # minimum learning rate, to make updates detectable


@final
@dataclass(frozen=True)
class OptimizerTrial:
    """Runs the recipe's optimizers on small tensors in place of the parameters of ``model``.

    Modules, names, numbers of dimensions and dimensions of length 1 do not change, so that the recipe creates the same
    groups and options.
    """

    recipe: Recipe
    model: nn.Module

    @cached_property
    def failure(self) -> str | None:
        """Description of the error in the trial, or None if there was none."""
        try:
            _ = self.result
        except Exception as error:  # of any kind: optimizers are user code
            return format_error(error)
        return None

    def updates_parts(self, dim: int) -> bool:
        """Return whether halves of parameters along ``dim`` are updated like the whole, bit by bit."""
        try:
            return all(
                has_same_values(each, select_half(self.result[name], dim, is_second=is_second))
                for is_second in (False, True)
                for name, each in self.run_steps(
                    lambda _, tensor: select_half(tensor, dim, is_second=is_second)  # noqa: B023
                ).items()
            )
        except Exception:  # of any kind: optimizers are user code
            return False

    @cached_property
    def joint(self) -> str | None:
        """A clause for messages if updates of some parameters depend on others, else None."""
        for own in (self._names[::2], self._names[1::2]):
            try:
                updated = self.run_steps(own=own)
            except Exception as error:  # of any kind: optimizers are user code
                return f"cannot update a subset of the parameters ({format_error(error)})"
            if any(not has_same_values(each, self.result[name]) for name, each in updated.items()):
                return "updates parameters jointly, for example by a global norm"
        return None

    @cached_property
    def values(self) -> Mapping[str, Tensor]:
        """The trial parameters by name, of any shapes, before the first step."""
        return self._draw_tensors(torch.Generator().manual_seed(11))

    @cached_property
    def result(self) -> Mapping[str, Tensor]:
        """The trial parameters, of any shapes, after all steps, updated whole and together."""
        return self.run_steps()

    @property
    def states(self) -> Sequence[StateDict]:
        """The state of each optimizer and its schedule after all trial steps."""
        schedules, states = list[LRScheduler | None](), list[StateDict]()

        def schedule(optimizer: Optimizer) -> None:
            schedules.append(None if self.recipe.has_several_updates else self.recipe.schedule(optimizer))

        def add_state(optimizer: Optimizer) -> None:
            last = schedules[-1]
            if last is not None:
                with suppress(Exception):  # user code, which may need a metric
                    last.step()
            states.append({"optimizer": optimizer.state_dict(), "schedule": last.state_dict() if last else {}})

        self.run_steps(prepare=schedule, finish=add_state)
        return states

    @property
    def resumes(self) -> bool:
        """Whether an optimizer with a loaded state continues like the one that saved it."""
        half, states = _STEPS // 2, list[StateDict]()

        def save_state(optimizer: Optimizer) -> None:
            states.append(deepcopy(_save_state(optimizer)))

        def load_state(optimizer: Optimizer) -> None:
            state = states.pop(0)
            if _collect_shapes(_save_state(optimizer)) != _collect_shapes(state):
                raise RuntimeError("the optimizer state has different tensors after a step")
            load_named_state(_wrap_parameters(optimizer), optimizer, state)

        try:
            values = self.run_steps(steps=range(half), prepare=_save_state, finish=save_state)
            resumed = self.run_steps(values=values, steps=range(half, _STEPS), prepare=load_state)
        except Exception:  # of any kind: optimizers are user code
            return False
        return all(has_same_values(each, self.result[name]) for name, each in resumed.items())

    def run_steps(
        self,
        part: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
        *,
        own: Sequence[str] | None = None,
        prepare: Callable[[Optimizer], object] = lambda _: None,
        finish: Callable[[Optimizer], None] = lambda _: None,
        values: Mapping[str, Tensor] | None = None,
        steps: Sequence[int] = range(_STEPS),
    ) -> Mapping[str, Tensor]:
        """Take trial steps, and return the parameters after them, of any shapes.

        Args:
            part: Takes a name and a parameter or gradient, and returns the shard of it to update.
            own: Names of the parameters to update, as on a rank that owns only these, or None for all trial parameters.
            prepare: Prepares an optimizer for these shards.
            finish: Called with each optimizer after its last step.
            values: The parameters before the first step, or None for :attr:`values`.
            steps: Indices of the steps.
        """
        small = {name: nn.Parameter(part(name, tensor).clone()) for name, tensor in (values or self.values).items()}
        parameters = dict(self.model.named_parameters())
        all_ = {name: _create_meta_parameter(each) for name, each in parameters.items() if name not in small} | small
        replacements = {id(each): all_[name] for name, each in parameters.items()}
        updated = [small[name] for name in self._names if own is None or name in own]
        generator = torch.Generator().manual_seed(12)
        gradients = [self._draw_tensors(generator) for _ in range(_STEPS)]
        with keep_generators(), torch.device("cpu"), substitute_parameters(self.model, replacements):
            torch.manual_seed(13)
            optimizers = create_optimizers(self.recipe, self.model).values()
        for optimizer in optimizers:
            _keep_parameters(optimizer, small.values())
            with keep_generators(), torch.device("cpu"):
                prepare(optimizer)
            _raise_lr(optimizer)
            calls = _restrict(optimizer, updated) if own is not None else None
            with keep_generators(), torch.device("cpu"), gpus_hidden(), disable_recipe_hooks(optimizer):
                for step in steps:
                    torch.manual_seed(step)
                    for name in self._names if own is None else own:
                        small[name].grad = part(name, gradients[step][name]).clone()
                    optimizer.step()
                finish(optimizer)
            if calls is not None and len(calls) != _STEPS:
                raise RuntimeError("step() does not run the hooks of torch.optim.Optimizer")
        return {name: each.detach() for name, each in small.items() if own is None or name in own}

    @cached_property
    def _names(self) -> Sequence[str]:
        """Names of the trial parameters: a few per group and shape."""
        parameters = dict(self.model.named_parameters())
        held = [each for each in parameters.values() if not each.is_meta] or parameters.values()
        names = {id(each): name for name, each in parameters.items() if each.requires_grad and each.numel()}
        kinds: dict[Any, list[str]] = {}
        for number, optimizer in enumerate(create_optimizers(self.recipe, self.model).values()):
            for index, group in enumerate(optimizer.param_groups):
                for each in group["params"]:
                    if id(each) in names and any(each is other for other in held):
                        kinds.setdefault((number, index, _small_shape(each)), []).append(names[id(each)])
        return [name for names_ in kinds.values() for name in names_[:_OF_A_KIND]]

    def _draw_tensors(self, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Generate a small random tensor for each trial parameter."""
        parameters = dict(self.model.named_parameters())
        with torch.device("cpu"):
            return {
                name: torch.randn(_small_shape(parameters[name]), generator=generator).to(parameters[name].dtype)
                for name in self._names
            }


def format_error(error: Exception) -> str:
    """Return the type and first sentence of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]


def select_half(tensor: Tensor, dim: int, *, is_second: bool) -> Tensor:
    """Return one half of a tensor of any shape, split at an odd index of ``dim`` if possible."""
    if tensor.ndim <= dim or tensor.shape[dim] < 2:
        return tensor
    end = (tensor.shape[dim] // 2) | 1
    return tensor.narrow(dim, end, tensor.shape[dim] - end) if is_second else tensor.narrow(dim, 0, end)


def has_same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same shape are equal, including NaNs."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _small_shape(parameter: Tensor) -> tuple[int, ...]:
    lengths = (_LENGTH,) if parameter.ndim == 1 else (*_LENGTHS, *(2 for _ in parameter.shape))
    return tuple(own if own < 2 else small for own, small in zip(parameter.shape, lengths, strict=False))


def _create_meta_parameter(parameter: Tensor) -> nn.Parameter:
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _keep_parameters(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Remove all other parameters from the groups."""
    ids = {id(each) for each in parameters}
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) in ids]


def _restrict(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[None]:
    """Restrict each step to ``parameters``; return a list that grows by one entry per step."""
    calls, complete = list[None](), [group["params"] for group in optimizer.param_groups]
    ids = {id(each) for each in parameters}

    def restrict_groups() -> None:
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in ids]

    def restore_groups() -> None:
        calls.append(None)
        for group, own in zip(optimizer.param_groups, complete, strict=True):
            group["params"] = own

    enclose_steps(optimizer, restrict_groups, restore_groups)
    return calls


def _raise_lr(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float | int):
            group["lr"] = max(group["lr"], _LR)


def _wrap_parameters(optimizer: Optimizer) -> nn.Module:
    """Return a module with the parameters of ``optimizer``, to name them in its saved state."""
    return nn.ParameterList(all_parameters(optimizer))


def _save_state(optimizer: Optimizer) -> StateDict:
    return collect_named_state(_wrap_parameters(optimizer), optimizer)


def _collect_shapes(state: StateDict) -> Mapping[str, Any]:
    tensors, _ = split_tensors(state)
    return {name: (each.shape, each.dtype) for name, each in tensors.items()}


@contextmanager
def substitute_parameters(model: nn.Module, replacements: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Replace parameters of ``model``, of any shapes, within the context.

    ``replacements`` is keyed by the id of the replaced parameter. Modules and names do not change, so a recipe creates
    its optimizer for the new parameters with the same groups and options.
    """
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in replacements
    ]
    for own, name, parameter in places:
        own[name] = replacements[id(parameter)]
    try:
        yield
    finally:
        for own, name, parameter in places:
            own[name] = parameter


_Split = tuple[dict[str, Tensor], Any]  # tensors of any shapes by path, then other values


def has_extra_state(trial: OptimizerTrial) -> bool:
    """Return whether an optimizer has additional ``state_dict()`` entries."""
    return any(tensors or values for tensors, values in _extra_states(trial))


def divides_extra_state(trial: OptimizerTrial) -> bool:
    """Return whether extra state differs if only some parameters or shards are updated."""
    if not has_extra_state(trial):
        return False
    names = list(trial.values)
    parts = [partial(select_half, dim=dim, is_second=is_second) for dim in range(2) for is_second in (False, True)]
    try:
        complete = _extra_states(trial)
        divided = [_extra_states(trial, part=lambda _, tensor: part(tensor)) for part in parts]  # noqa: B023
        divided += [_extra_states(trial, own=own) for own in (names[::2], names[1::2])]
        return not all(
            _has_equal_state(one, other) for each in divided for one, other in zip(complete, each, strict=True)
        )
    except Exception:  # of any kind: optimizers are user code
        return True


def _extra_states(trial: OptimizerTrial, **options: Any) -> list[_Split]:
    """Return the extra state of each optimizer after all steps."""
    states = list[_Split]()
    trial.run_steps(finish=lambda optimizer: states.append(split_tensors(extra_state(optimizer))), **options)
    return states


def _has_equal_state(one: _Split, other: _Split) -> bool:
    (tensors, values), (others, other_values) = one, other
    return (
        values == other_values
        and tensors.keys() == others.keys()
        and all(
            each.shape == others[name].shape and has_same_values(each, others[name]) for name, each in tensors.items()
        )
    )
