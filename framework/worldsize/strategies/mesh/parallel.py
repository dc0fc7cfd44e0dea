"""Divides a model over a mesh, so that each rank keeps its part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from worldsize.core import ConfigError, Recipe, TensorStyle
from worldsize.dist.timed_sharding import time_sharding
from worldsize.strategies.detached_shards import detach_shards
from worldsize.strategies.mesh.interruptible import InterruptibleColumn, InterruptibleRow
from worldsize.strategies.mesh.layout import along
from worldsize.strategies.mesh.timing import time_column, time_row
from worldsize.strategies.unit_sharding import shard_units
from worldsize.strategies.wrapping import Wrap


@dataclass(frozen=True)
class Sharding:
    """Sharding of a model along the data axis: see the options of :class:`~worldsize.strategies.fsdp.FSDP`."""

    wrap: Wrap = "auto"
    wrap_parameters: int = 1_000_000
    reshard_after_forward: bool = True
    interruptible: bool = False  # whether waits end when the gang does


def divide(recipe: Recipe, model: nn.Module, roots: Sequence[nn.Module], mesh: DeviceMesh, sharding: Sharding) -> None:
    """Divide the layers below ``roots`` over the tensor axis, then shard each rank's part over the data axis."""
    mine = [module for root in roots for module in root.modules()]
    tensor, data = along(mesh, "tensor"), along(mesh, "data")
    detach_shards()
    if tensor.size() > 1:
        _divide_layers(recipe, model, mine, tensor, interruptible=sharding.interruptible)
    if data.size() > 1:
        shard_units(
            recipe,
            model,
            roots,
            wrap=sharding.wrap,
            least=sharding.wrap_parameters,
            mesh=data,
            reshard_after_forward=sharding.reshard_after_forward,
        )
        for root in roots:
            time_sharding(root, torch.device(mesh.device_type), copies=False)


def _divide_layers(
    recipe: Recipe, model: nn.Module, mine: Collection[nn.Module], mesh: DeviceMesh, *, interruptible: bool
) -> None:
    """Divide layers column-wise, then row-wise with one all-reduce (Shoeybi et al. 2019, arXiv 1909.08053)."""
    plan = plan_of(recipe, model, ranks=mesh.size())
    held = {
        name: _style(style, model.get_submodule(name), interruptible=interruptible)
        for name, style in plan.items()
        if model.get_submodule(name) in mine
    }
    # every rank has built the same model, so nothing needs to be sent
    parallelize_module(model, mesh, held, src_data_rank=None)
    for name, style in held.items():
        if not isinstance(style, InterruptibleColumn | InterruptibleRow):  # which time their waits themselves
            time = time_column if plan[name] == "column" else time_row
            time(model.get_submodule(name))


def _style(style: TensorStyle, module: nn.Module, *, interruptible: bool) -> ParallelStyle:
    if interruptible and isinstance(module, nn.Linear):
        return InterruptibleColumn() if style == "column" else InterruptibleRow()
    return ColwiseParallel() if style == "column" else RowwiseParallel()


def plan_of(recipe: Recipe, model: nn.Module, *, ranks: int) -> Mapping[str, TensorStyle]:
    """Return how the layers of ``model`` divide over ``ranks`` ranks.

    Raises:
        ConfigError: the recipe has no plan, or a layer's features are not divisible by ``ranks``.
    """
    plan = recipe.tensor_plan(model)
    if not plan:
        raise _undivided(recipe)
    for name, style in plan.items():
        _check_features(name, model.get_submodule(name), style, ranks)
    return plan


def check_divides(recipe: Recipe) -> None:
    """Raise ConfigError if ``recipe`` does not define what tensor parallelism needs."""
    if type(recipe).tensor_plan is Recipe.tensor_plan:
        raise _undivided(recipe)


def _undivided(recipe: Recipe) -> ConfigError:
    return ConfigError(
        f"{type(recipe).__name__} does not say how its layers divide. "
        "Define Recipe.tensor_plan, or set strategy.tensor=1."
    )


def _check_features(name: str, module: nn.Module, style: TensorStyle, ranks: int) -> None:
    features = getattr(module, "out_features" if style == "column" else "in_features", None)
    if features is not None and features % ranks:
        raise ConfigError(
            f"{name} has {features} features, which do not divide over {ranks} ranks. "
            f"Set strategy.tensor to a divisor of {features}."
        )


def keep_held(optimizer: Optimizer) -> None:
    """Remove meta parameters, which other ranks update, from the optimizer's groups."""
    for group in optimizer.param_groups:
        held = [not parameter.is_meta for parameter in group["params"]]
        for key in group.keys() & {"params", "param_names"}:
            group[key] = [value for value, stays in zip(group[key], held, strict=True) if stays]
