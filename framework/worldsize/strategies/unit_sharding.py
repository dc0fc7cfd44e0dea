"""Shards the units of a model by torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from worldsize.core import Recipe
from worldsize.strategies.wrapping import Wrap, scalars, units


def shard_units(
    recipe: Recipe, model: nn.Module, roots: Sequence[nn.Module], *, wrap: Wrap, least: int, **options: Any
) -> None:
    """Apply ``fully_shard`` to the units of ``model`` below ``roots``, then to ``roots``, with ``options``."""
    mine, options["ignored_params"] = {part for root in roots for part in root.modules()}, scalars(model)
    for module in (*(unit for unit in units(recipe, model, wrap, least) if unit in mine and unit not in roots), *roots):
        if module in roots:
            fully_shard(module, **options)
            continue
        module.register_forward_pre_hook(_join_repeated, prepend=True, with_kwargs=True)
        fully_shard(module, **options)  # whose hook comes before the one above, and after the one below
        module.register_forward_pre_hook(_part_repeated, prepend=True, with_kwargs=True)


@final
@dataclass(frozen=True)
class _Repeated:
    """Stands for an argument that is the same tensor as argument number ``index``."""

    index: int


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _part_repeated(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """Replace arguments that are a tensor given before.

    FSDP makes another tensor of each. A module may ask whether they are one, as torch's attention does, and otherwise
    its gradients would be added up in another order.
    """
    values, first = [*args, *kwargs.values()], dict[int, int]()
    repeated = False
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and first.setdefault(id(value), index) != index:
            values[index], repeated = _Repeated(first[id(value)]), True
    return _rebuilt(values, len(args), kwargs) if repeated else None


def _join_repeated(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """Undo :func:`_part_repeated`."""
    values = [*args, *kwargs.values()]
    if not any(isinstance(value, _Repeated) for value in values):
        return None
    joined = [values[value.index] if isinstance(value, _Repeated) else value for value in values]
    return _rebuilt(joined, len(args), kwargs)


def _rebuilt(values: Sequence[Any], count: int, kwargs: Mapping[str, Any]) -> _Arguments:
    return tuple(values[:count]), dict(zip(kwargs, values[count:], strict=True))
