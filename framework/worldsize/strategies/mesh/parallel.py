"""Tensor and data sharding of a model over a mesh."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from worldsize.core import Recipe, TensorStyle
from worldsize.strategies.mesh.layout import get_submesh
from worldsize.strategies.tensor_layers import Draws, divide_forward, divide_parameters, get_tensor_plan
from worldsize.strategies.token_shard import TokenSplit, divide_tokens
from worldsize.strategies.unit_collectives import time_sharding
from worldsize.strategies.unit_sharding import detach_shards, shard_units
from worldsize.strategies.wrapping import Wrap


@dataclass(frozen=True)
class Sharding:
    """Sharding over the data axis, with options of :class:`~worldsize.strategies.fsdp.FSDP`."""

    wrap: Wrap = "auto"
    wrap_parameters: int = 1_000_000
    reshard_after_forward: bool = True
    interruptible: bool = False  # whether waits end with the gang's membership
    logical_tensor: int = 1  # slices of each layer in the tensor plan
    is_ordered: bool = False  # whether gradients are summed in the fixed tree
    sequence_parallel: bool = False  # whether tensor-parallel ranks divide tokens between the layers they share
    loss_parallel: bool = False  # whether they also divide the tokens of the head's outputs


def shard_model(
    recipe: Recipe, model: nn.Module, roots: Sequence[nn.Module], mesh: DeviceMesh, sharding: Sharding
) -> None:
    """Shard the layers below ``roots`` over the tensor axis, then each part over the data axis.

    If the mesh has an axis "replicate", FSDP also sums over it unless ``sharding`` is ordered.
    """
    mine = [module for root in roots for module in root.modules()]
    tensor, data = get_submesh(mesh, "tensor"), get_submesh(mesh, "data")
    both = get_submesh(mesh, "replicate", "data")
    summed = data if sharding.is_ordered else both
    detach_shards()
    if tensor.size() > 1:
        _divide_layers(recipe, model, mine, tensor, sharding)
    if both.size() > 1:
        shard_units(
            recipe,
            model,
            roots,
            wrap=sharding.wrap,
            least=sharding.wrap_parameters,
            mesh=summed,
            reshard_after_forward=sharding.reshard_after_forward,
        )
        for root in roots:
            time_sharding(root, torch.device(mesh.device_type), copies=summed.ndim > 1)


def _divide_layers(
    recipe: Recipe, model: nn.Module, mine: Collection[nn.Module], mesh: DeviceMesh, sharding: Sharding
) -> None:
    """Shard layers column-wise or row-wise (Shoeybi et al. 2019, arXiv 1909.08053)."""
    group, draws = mesh.get_group(), Draws()
    splits: dict[TensorStyle, TokenSplit] = {}
    if sharding.sequence_parallel:
        splits["row"] = TokenSplit(group, sharding.is_ordered, "strategy.sequence_parallel")
        divide_tokens(recipe, model, splits["row"])
    if sharding.loss_parallel:
        splits["gathered"] = TokenSplit(group, sharding.is_ordered, "strategy.loss_parallel")
    for name, style in get_tensor_plan(recipe, model, slices=mesh.size(), key="strategy.tensor").items():
        layer = model.get_submodule(name)
        if layer in mine:
            divide_parameters(layer, style, mesh)
            slices = sharding.logical_tensor
            divide_forward(name, layer, style, slices=slices, group=group, draws=draws, token_split=splits.get(style))


def keep_held(optimizer: Optimizer) -> None:
    """Remove meta parameters, which other ranks update, from the optimizer's groups."""
    for group in optimizer.param_groups:
        held = [not parameter.is_meta for parameter in group["params"]]
        for key in group.keys() & {"params", "param_names"}:
            group[key] = [value for value, stays in zip(group[key], held, strict=True) if stays]
