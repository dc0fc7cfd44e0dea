"""Parameter groups by the names of parameters, as ``optimizer.groups`` of the configuration has them.

Recipes give an optimizer ``model.parameters()``, and groups are chosen by patterns of names.
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

from worldsize.errors import ConfigError, neighbours

T = TypeVar("T")
_model: ContextVar[nn.Module | None] = ContextVar("model", default=None)

Group = dict[str, Any]  # "params" and the options of a parameter group, as torch takes them


def all_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters, of any shapes, of all groups of ``optimizer``, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def named_by(model: nn.Module) -> Iterator[None]:
    """Name parameters as ``model`` does, for the optimizers that are made within the context."""
    token = _model.set(model)
    try:
        yield
    finally:
        _model.reset(token)


def embedding_weights() -> set[int]:
    """Return the ids of the weights of embeddings in the model of :func:`named_by`; none outside of it."""
    model = _model.get()
    modules = model.modules() if model is not None else ()
    return {id(each.weight) for each in modules if isinstance(each, nn.Embedding | nn.EmbeddingBag)}


def groups_of(parameters: Iterable[Any]) -> tuple[list[Group], Mapping[int, Sequence[str]]]:
    """Return what an optimizer was given as a list of groups, and the names of each parameter by its id.

    Args:
        parameters: Tensors, pairs of a name and a tensor, or groups of either, as torch's optimizers take them.
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


def divided(groups: Iterable[Group], kind_of: Callable[[Tensor], T], kinds: Sequence[T]) -> Iterator[tuple[T, Group]]:
    """Yield the parts of each group, with the parameters of one kind each, in the order of ``kinds``; none is empty.

    Args:
        groups: Groups of parameters.
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
    """Check the patterns that ``key`` of the configuration holds.

    Raises:
        ConfigError: they are no list of texts, names are unknown, or a pattern matches no name.
    """
    if not isinstance(patterns, list | tuple) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f'{key}={patterns!r} is no list of patterns. Write them as ["*.bias", "*norm*"].')
    if patterns and not names:
        raise ConfigError(
            f"{key}: the names of parameters are unknown here. Give the optimizer model.named_parameters() in place "
            "of model.parameters()."
        )
    known = [name for each in names.values() for name in each]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(f"{key}: {pattern!r} matches no parameter{neighbours(pattern, known)}")


def matches(parameter: Tensor, patterns: Sequence[str], names: Mapping[int, Sequence[str]]) -> bool:
    """Return whether a pattern matches one of the names of ``parameter`` (of any shape); tied ones have several."""
    return any(fnmatchcase(name, pattern) for name in names.get(id(parameter), ()) for pattern in patterns)


_NO_OPTIONS = {"params", "param_names", "decoupled_weight_decay", "algorithm"}


def grouped(
    parameters: Iterable[Any],
    *,
    make: Callable[..., Optimizer],
    groups: Mapping[str, Mapping[str, Any]],
    **options: Any,
) -> Optimizer:
    """Return the optimizer that ``make`` makes, with the parameters that patterns match in groups of their own.

    The parameters that no pattern matches come first, with the options of ``make``; then the groups, in their order.

    Args:
        parameters: What torch's optimizers take. The recipe's own groups are divided further and keep their options.
        make: Makes the optimizer of a list of groups.
        groups: By name, each with ``match``, a list of patterns such as ``"*.bias"``, and options of the optimizer.
            The first group that matches a name has the parameter.
        options: Further arguments of ``make``.

    Raises:
        ConfigError: a group is malformed, has an option that the optimizer lacks, or a pattern that matches nothing.
    """
    make = partial(make, **options)
    given, names = groups_of(parameters)
    for name, group in groups.items():
        check_patterns(group["match"], names, key=f"optimizer.groups.{name}.match")
    plain = _made(make, given)
    for name, group in groups.items():
        _check_options(name, group, make, plain)
    return _made(make, _divided(given, groups, names)) if groups else plain


def _divided(
    given: Sequence[Group], groups: Mapping[str, Mapping[str, Any]], names: Mapping[int, Sequence[str]]
) -> list[Group]:
    def owner_of(parameter: Tensor) -> str | None:
        return next((name for name, each in groups.items() if matches(parameter, each["match"], names)), None)

    own = {name: {key: value for key, value in each.items() if key != "match"} for name, each in groups.items()}
    parts = divided(given, owner_of, [None, *groups])
    return [part if owner is None else {**part, **own[owner]} for owner, part in parts]


def _made(make: Callable[..., Optimizer], groups: list[Group]) -> Optimizer:
    """Make the optimizer; fused ones refuse parameters on the meta device, which are never updated."""
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
    """Let the optimizer's constructor check the options of a group, which it checks for all parameters alone."""
    options = {key: value for key, value in group.items() if key != "match"}
    known = {key for each in plain.param_groups for key in each} - _NO_OPTIONS
    for option in options:
        if option not in known:
            raise ConfigError(
                f"optimizer.groups.{name}: {type(plain).__name__} has no option {option!r}{neighbours(option, known)}"
            )
    try:
        arguments = {key: value for key, value in options.items() if key in inspect.signature(make).parameters}
        rest = {key: value for key, value in options.items() if key not in arguments}
        _made(partial(make, **arguments), [{"params": plain.param_groups[0]["params"][:1], **rest}])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.groups.{name}: {str(error).rstrip('.')}. Change the option.") from error
