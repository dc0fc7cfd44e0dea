"""Tensor and data sharding of a model over a mesh.

In interruptible layers, waits end when the gang does; other DTensor operations wait for all peers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from worldsize.collectives.group import start_collective
from worldsize.core import ConfigError, Recipe, TensorStyle
from worldsize.strategies.mesh.layout import get_submesh
from worldsize.strategies.mesh.stage import time_column, time_row
from worldsize.strategies.unit_collectives import time_sharding
from worldsize.strategies.unit_sharding import detach_shards, shard_units
from worldsize.strategies.wrapping import Wrap


@dataclass(frozen=True)
class Sharding:
    """Sharding over the data axis, with options of :class:`~worldsize.strategies.fsdp.FSDP`."""

    wrap: Wrap = "auto"
    wrap_parameters: int = 1_000_000
    reshard_after_forward: bool = True
    interruptible: bool = False  # whether waits end when the gang does


def shard_model(
    recipe: Recipe, model: nn.Module, roots: Sequence[nn.Module], mesh: DeviceMesh, sharding: Sharding
) -> None:
    """Shard the layers below ``roots`` over the tensor axis, then each part over the data axis."""
    mine = [module for root in roots for module in root.modules()]
    tensor, data = get_submesh(mesh, "tensor"), get_submesh(mesh, "data")
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
    """Shard layers column-wise or row-wise (Shoeybi et al. 2019, arXiv 1909.08053)."""
    plan = get_tensor_plan(recipe, model, ranks=mesh.size())
    held = {
        name: _create_style(style, model.get_submodule(name), interruptible=interruptible)
        for name, style in plan.items()
        if model.get_submodule(name) in mine
    }
    # all ranks have built the same model, so nothing needs to be sent
    parallelize_module(model, mesh, held, src_data_rank=None)
    for name, style in held.items():
        if not isinstance(style, InterruptibleColumn | InterruptibleRow):  # these time their own waits
            time = time_column if plan[name] == "column" else time_row
            time(model.get_submodule(name))


def _create_style(style: TensorStyle, module: nn.Module, *, interruptible: bool) -> ParallelStyle:
    if interruptible and isinstance(module, nn.Linear):
        return InterruptibleColumn() if style == "column" else InterruptibleRow()
    return ColwiseParallel() if style == "column" else RowwiseParallel()


def get_tensor_plan(recipe: Recipe, model: nn.Module, *, ranks: int) -> Mapping[str, TensorStyle]:
    """Return the tensor-parallel style of each layer of ``model``, checked for ``ranks`` ranks.

    Raises:
        ConfigError: the recipe lacks a plan, or a layer's features are not divisible by ``ranks``.
    """
    plan = recipe.tensor_plan(model)
    if not plan:
        raise _create_plan_error(recipe)
    for name, style in plan.items():
        _check_features(name, model.get_submodule(name), style, ranks)
    return plan


def check_divides(recipe: Recipe) -> None:
    """Raise ConfigError if ``recipe`` lacks a plan for tensor parallelism."""
    if type(recipe).tensor_plan is Recipe.tensor_plan:
        raise _create_plan_error(recipe)


def _create_plan_error(recipe: Recipe) -> ConfigError:
    return ConfigError(
        f"{type(recipe).__name__} does not define a tensor-parallel plan. Define Recipe.tensor_plan, or set "
        "strategy.tensor=1."
    )


def _check_features(name: str, module: nn.Module, style: TensorStyle, ranks: int) -> None:
    features = getattr(module, "out_features" if style == "column" else "in_features", None)
    if features is not None and features % ranks:
        raise ConfigError(
            f"{name} has {features} features, not divisible by {ranks} ranks. "
            f"Set strategy.tensor to a divisor of {features}."
        )


def keep_held(optimizer: Optimizer) -> None:
    """Remove meta parameters, which other ranks update, from the optimizer's groups."""
    for group in optimizer.param_groups:
        held = [not parameter.is_meta for parameter in group["params"]]
        for key in group.keys() & {"params", "param_names"}:
            group[key] = [value for value, stays in zip(group[key], held, strict=True) if stays]


@final
class InterruptibleColumn(ColwiseParallel):
    """Shards linear layers by output features, with interruptible sums of input gradients."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> DTensor:
        shared = _SummedGradient.apply(inputs[0], device_mesh.get_group())
        return DTensor.from_local(shared, device_mesh, [Replicate()], grad_placements=[Partial()])


@final
class InterruptibleRow(RowwiseParallel):
    """Shards linear layers by input features, with interruptible sums of the outputs."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        part = outputs.redistribute(placements=[Partial()]).to_local(grad_placements=[Replicate()])
        total: Tensor = _SummedPart.apply(part, device_mesh.get_group())
        return total


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _all_reduce_sum(gradients[0], ctx.group), None


class _SummedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce_sum(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


def _all_reduce_sum(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of ``part`` over the ranks of ``group``, of the same shape."""
    total = part.clone(memory_format=torch.contiguous_format)
    start_collective(dist.all_reduce, total, group=group).wait()
    return total
