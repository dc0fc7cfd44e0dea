"""A recipe's optimizers, and parameter groups by name patterns (``optimizer.groups``).

Recipes usually pass ``model.parameters()`` without names, so the names are taken from the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ONE_UPDATE, Recipe
from worldsize.errors import ConfigError, neighbours
from worldsize.optimizers.schedule_free import begin_training
from worldsize.seeds import draw_from

T = TypeVar("T")
_model: ContextVar[nn.Module | None] = ContextVar("model", default=None)

Group = dict[str, Any]  # a parameter group of torch: "params" and options


def all_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters (of any shapes) of all groups of ``optimizer``, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def use_parameter_names(model: nn.Module) -> Iterator[None]:
    """Use the parameter names of ``model`` for optimizers that are created within the block."""
    token = _model.set(model)
    try:
        yield
    finally:
        _model.reset(token)


def create_optimizers(recipe: Recipe, model: nn.Module) -> Mapping[str, Optimizer]:
    """Create the recipe's optimizers, with access to ``model``'s parameter names.

    Raises:
        ConfigError: the recipe has several updates per step, and it returned no optimizers, or one without trainable
            parameters, or two that share a parameter.
    """
    with use_parameter_names(model), draw_from("optimizer"):
        optimizers = recipe.optimizers(model)
    if recipe.has_several_updates:
        _check_optimizers(type(recipe).__name__, model, optimizers)
    for each in optimizers.values():
        begin_training(each)
    return optimizers


def create_optimizer(recipe: Recipe, model: nn.Module, name: str = ONE_UPDATE) -> Optimizer:
    """Create a recipe's optimizers and return the one called ``name``.

    The default is the only optimizer of a recipe with one update per step.
    """
    return create_optimizers(recipe, model)[name]


def _check_optimizers(kind: str, model: nn.Module, optimizers: Any) -> None:
    if not isinstance(optimizers, Mapping) or not all(isinstance(each, Optimizer) for each in optimizers.values()):
        raise ConfigError(
            f"{kind}.optimizers did not return a mapping of names to optimizers. Return {{name: optimizer}}."
        )
    if not optimizers:
        raise ConfigError(
            f"{kind}.optimizers returned an empty mapping. Return at least one optimizer, as {{name: optimizer}}."
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        if not get_trainable_parameters(optimizer):
            raise ConfigError(
                f"{kind}.optimizers: all parameters of {name!r} are frozen. Remove the optimizer, or set "
                "requires_grad=True on a parameter."
            )
        for parameter in get_trainable_parameters(optimizer):
            if (owner := owners.setdefault(id(parameter), name)) != name:
                raise ConfigError(
                    f"{kind} assigns {names.get(id(parameter), 'a parameter')!r} to two optimizers, {owner!r} and "
                    f"{name!r}. Pass each parameter to one optimizer."
                )


def get_trainable_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of ``optimizer`` that require gradients, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def embedding_weights() -> set[int]:
    """Return the ids of the embedding weights; empty outside :func:`use_parameter_names`."""
    model = _model.get()
    modules = model.modules() if model is not None else ()
    return {id(each.weight) for each in modules if isinstance(each, nn.Embedding | nn.EmbeddingBag)}


def normalize_groups(parameters: Iterable[Any]) -> tuple[list[Group], Mapping[int, Sequence[str]]]:
    """Convert ``parameters`` to groups; also return each parameter's names, keyed by its id.

    Args:
        parameters: Tensors, (name, tensor) pairs, or groups of either, as for torch's optimizers.
    """
    given = list(parameters)
    groups = [dict(each) for each in given] if given and isinstance(given[0], Mapping) else [{"params": given}]
    names: dict[int, list[str]] = {}
    if (model := _model.get()) is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    for group in groups:
        listed = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for each in listed:
            if isinstance(each, tuple) and each[0] not in names.setdefault(id(each[1]), []):
                names[id(each[1])].append(each[0])
        group["params"] = [each[1] if isinstance(each, tuple) else each for each in listed]
    return groups, names


def split_groups(
    groups: Iterable[Group], kind_of: Callable[[Tensor], T], kinds: Sequence[T]
) -> Iterator[tuple[T, Group]]:
    """Split groups by the kind of parameters; yield nonempty parts in the order of ``kinds``.

    Args:
        groups: Parameter groups.
        kind_of: Returns the kind of a parameter (of any shape).
        kinds: All kinds.
    """
    for group in groups:
        parts: dict[T, list[Tensor]] = {kind: [] for kind in kinds}
        for parameter in group["params"]:
            parts[kind_of(parameter)].append(parameter)
        for kind, parameters in parts.items():
            if parameters:
                yield kind, {**group, "params": parameters}


def check_patterns(patterns: Any, names: Mapping[int, Sequence[str]], *, key: str) -> None:
    """Check name patterns; ``key`` is their configuration key, for messages.

    Raises:
        ConfigError: ``patterns`` is not a list of strings, names are unknown, or a pattern does not match any name.
    """
    if not isinstance(patterns, list | tuple) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f'{key} must be a list of patterns such as ["*.bias", "*norm*"], got {patterns!r}.')
    if patterns and not names:
        raise ConfigError(
            f"{key} requires parameter names. Pass model.named_parameters() to the optimizer instead of "
            "model.parameters()."
        )
    known = [name for each in names.values() for name in each]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(f"{key}: {pattern!r} matches no parameter{neighbours(pattern, known)}")


def has_matching_name(parameter: Tensor, patterns: Sequence[str], names: Mapping[int, Sequence[str]]) -> bool:
    """Return whether a pattern matches a name of ``parameter``; tied ones have several names."""
    return any(fnmatchcase(name, pattern) for name in names.get(id(parameter), ()) for pattern in patterns)


_NO_OPTIONS = {"params", "param_names", "decoupled_weight_decay", "algorithm"}


def create_grouped_optimizer(
    parameters: Iterable[Any],
    *,
    make: Callable[..., Optimizer],
    groups: Mapping[str, Mapping[str, Any]],
    **options: Any,
) -> Optimizer:
    """Create an optimizer with separate groups for parameters with names that match patterns.

    Unmatched parameters come first, with the options of ``make``, followed by ``groups`` in order.

    Args:
        parameters: Parameters or parameter groups, as for torch's optimizers. Existing groups are split further and
            keep their options.
        make: Creates the optimizer from a list of groups.
        groups: Groups by name, each with ``match``, a list of patterns such as ``"*.bias"``, and optimizer options.
            A parameter belongs to the first group that matches one of its names.
        options: Further arguments of ``make``.

    Raises:
        ConfigError: a group is malformed, or has an unknown option or a pattern without matches.
    """
    make = partial(make, **options)
    given, names = normalize_groups(parameters)
    for name, group in groups.items():
        check_patterns(group["match"], names, key=f"optimizer.groups.{name}.match")
    plain = _create_optimizer(make, given)
    for name, group in groups.items():
        _check_options(name, group, make, plain)
    return _create_optimizer(make, _split_by_pattern(given, groups, names)) if groups else plain


def _split_by_pattern(
    given: Sequence[Group], groups: Mapping[str, Mapping[str, Any]], names: Mapping[int, Sequence[str]]
) -> list[Group]:
    def find_owner(parameter: Tensor) -> str | None:
        return next((name for name, each in groups.items() if has_matching_name(parameter, each["match"], names)), None)

    own = {name: {key: value for key, value in each.items() if key != "match"} for name, each in groups.items()}
    parts = split_groups(given, find_owner, [None, *groups])
    return [part if owner is None else {**part, **own[owner]} for owner, part in parts]


def _create_optimizer(make: Callable[..., Optimizer], groups: list[Group]) -> Optimizer:
    """Create the optimizer, also for meta tensors.

    Fused optimizers reject meta tensors, so they are created unfused. ``fused`` is then set unless all tensors are on
    the meta device.
    """
    on_meta = [parameter.is_meta for group in groups for parameter in group["params"]]
    if not any(on_meta) or not (_keywords(make).get("fused") or any(group.get("fused") for group in groups)):
        return make(groups)
    wanted = [group.get("fused", _keywords(make).get("fused")) for group in groups]
    made = make([{**group, "fused": None} for group in groups], fused=None)
    if not all(on_meta):
        for group, fused in zip(made.param_groups, wanted, strict=True):
            group["fused"] = fused
    return made


def _keywords(make: Callable[..., Optimizer]) -> Mapping[str, Any]:
    return getattr(make, "keywords", {})


def _check_options(name: str, group: Mapping[str, Any], make: Callable[..., Optimizer], plain: Optimizer) -> None:
    """Check a group's options by passing them to the optimizer's constructor."""
    options = {key: value for key, value in group.items() if key != "match"}
    known = {key for each in plain.param_groups for key in each} - _NO_OPTIONS
    for option in options:
        if option not in known:
            raise ConfigError(
                f"optimizer.groups.{name}: unknown option {option!r} for "
                f"{type(plain).__name__}{neighbours(option, known)}"
            )
    try:
        arguments = {key: value for key, value in options.items() if key in inspect.signature(make).parameters}
        rest = {key: value for key, value in options.items() if key not in arguments}
        _create_optimizer(partial(make, **arguments), [{"params": plain.param_groups[0]["params"][:1], **rest}])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.groups.{name}: {str(error).rstrip('.')}. Change the option.") from error
