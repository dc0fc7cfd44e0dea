"""Parameter groups by patterns of names, as ``optimizer.groups`` of the configuration has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from worldsize.errors import ConfigError, neighbours
from worldsize.optimizers.names import Group, check_patterns, divided, groups_of, matches

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
