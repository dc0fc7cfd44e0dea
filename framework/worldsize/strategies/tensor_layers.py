"""Linear layers divided over tensor-parallel ranks, and over logical slices that do not depend on the ranks.

A layer is divided along its output features ("column") or its input features ("row"), as in Shoeybi et al. 2019, arXiv
1909.08053. With ``logical_tensor=L``, each of L slices is a product of its own, wherever it is computed, and sums over
slices are taken in one fixed tree: slice 2i is added to slice 2i + 1, and so on with the sums. A rank holds consecutive
slices, so the first levels of the tree are local; the results have the same bits at each number of ranks that divides
L. In half precision, sums are taken in float32 and rounded once.

Between a column layer and its row layer, a rank computes on its own features only. Kernels of functions such as GELU
treat the last elements of a tensor differently, so the tensor of a slice must have a multiple of ``_VECTOR`` elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from worldsize.collectives.group import start_collective
from worldsize.core import ConfigError, Recipe, TensorStyle

_VECTOR = 64  # elements of the widest unrolled loop of torch's CPU kernels: two AVX-512 vectors of bfloat16


def get_tensor_plan(recipe: Recipe, model: nn.Module, *, slices: int, key: str) -> Mapping[str, TensorStyle]:
    """Return the tensor-parallel style of each layer of ``model``, checked for ``slices`` of equal size.

    ``key``: the configuration's name for the number of slices, such as "strategy.tensor".

    Raises:
        ConfigError: the recipe lacks a plan; or a layer or a unit of the model is not divisible by ``slices``; or a
            layer is of an unsupported kind, or shares a parameter with another module.
    """
    check_divides(recipe, key=key)
    plan = recipe.tensor_plan(model)
    if not plan:
        raise _create_plan_error(recipe, key)
    for name, style in plan.items():
        _check_features(name, model.get_submodule(name), style, slices, key)
    for name, count in recipe.tensor_units(model).items():
        if count % slices:
            raise ConfigError(
                f"the model has {count} {name}, not divisible by {key}={slices}. Set {key} to a divisor of {count}."
            )
    _check_unshared(model, plan)
    return plan


def check_divides(recipe: Recipe, *, key: str) -> None:
    """Raise ConfigError if ``recipe`` lacks a plan for tensor parallelism."""
    if type(recipe).tensor_plan is Recipe.tensor_plan:
        raise _create_plan_error(recipe, key)


def _create_plan_error(recipe: Recipe, key: str) -> ConfigError:
    return ConfigError(
        f"{type(recipe).__name__} does not define a tensor-parallel plan. Define Recipe.tensor_plan, or set {key}=1."
    )


def _check_features(name: str, module: nn.Module, style: TensorStyle, slices: int, key: str) -> None:
    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        features = module.in_features if style == "row" else module.out_features
    elif isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward:
        features = module.num_embeddings if style == "row" else module.embedding_dim
    else:
        raise ConfigError(
            f"{name} is a {kind.__name__}, but only torch.nn.Linear and torch.nn.Embedding can be divided. Leave it "
            f"out of Recipe.tensor_plan, or set {key}=1."
        )
    if features % slices:
        raise ConfigError(
            f"{name} has {features} features, not divisible by {key}={slices}. Set {key} to a divisor of {features}."
        )


def _check_unshared(model: nn.Module, plan: Mapping[str, TensorStyle]) -> None:
    holders: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(name)
    for name in plan:
        for key, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if len(holders[parameter]) > 1:
                raise ConfigError(
                    f"the {key} of {' and '.join(holders[parameter])} is one parameter, which cannot be divided. "
                    f"Leave {name} out of Recipe.tensor_plan, or give each module its own parameter."
                )


def slice_layers(recipe: Recipe, model: nn.Module, slices: int) -> None:
    """Compute each layer in the tensor plan of ``recipe`` in ``slices``, unless it is already divided over ranks."""
    draws = Draws()
    for name, style in recipe.tensor_plan(model).items():
        layer = model.get_submodule(name)
        if not isinstance(layer.forward, _Divided):
            divide_forward(name, layer, style, slices=slices, draws=draws)


def divide_parameters(layer: nn.Module, style: TensorStyle, mesh: DeviceMesh) -> None:
    """Shard the parameters of ``layer`` over the tensor axis ``mesh``; all ranks hold the same values."""
    is_linear = isinstance(layer, nn.Linear)
    along_rows = (
        style == "row"
    ) != is_linear  # weights are (out, in) in linear layers, (vocabulary, features) in tables
    placements: dict[str, Placement] = {"weight": Shard(0 if along_rows else 1)}
    placements["bias"] = Replicate() if style == "row" else Shard(0)
    for key, parameter in layer.named_parameters(recurse=False):
        # all ranks have built the same model, so nothing needs to be sent
        sharded = distribute_tensor(parameter, mesh, [placements[key]], src_data_rank=None)
        layer.register_parameter(key, nn.Parameter(sharded, parameter.requires_grad))


def divide_forward(
    name: str,
    layer: nn.Module,
    style: TensorStyle,
    *,
    slices: int,
    draws: Draws,
    group: ProcessGroup | None = None,
) -> None:
    """Replace the forward pass of ``layer``, called ``name``, by one that computes logical slices.

    Args:
        name: Name of the layer in the model, for messages.
        layer: A linear layer or an embedding; with ``group``, its parameters are already sharded.
        style: How the layer is divided.
        slices: Number of logical slices over all ranks; 1: one product a rank, summed in the order of the backend.
        draws: Shared by all layers of the model.
        group: The tensor-parallel ranks; None: this process computes all slices.
    """
    kind = _DividedLinear if isinstance(layer, nn.Linear) else _DividedEmbedding
    layer.forward = kind(name, layer, style, slices, group, draws)  # a wrapper module would change names in checkpoints


@final
class Draws:
    """Detects random numbers drawn between a column layer and its row layer, which would depend on the ranks."""

    def __init__(self) -> None:
        self._state: Tensor | None = None  # of the generator, after the latest column layer

    def mark(self, device: torch.device) -> None:
        """Record the state of the generator after a column layer."""
        self._state = _get_generator_state(device)

    def check(self, name: str, device: torch.device) -> None:
        """Raise ConfigError if random numbers were drawn since :meth:`mark`; ``name``: the row layer."""
        if self._state is not None and not torch.equal(self._state, _get_generator_state(device)):
            raise ConfigError(
                f"random numbers are drawn on the divided features before {name}, for example by dropout in attention. "
                "With logical_tensor they would depend on strategy.tensor. Set that dropout to 0, or logical_tensor=1."
            )


def _get_generator_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.default_generator.get_state()
    state: Tensor = torch.get_device_module(device).get_rng_state()
    return state


class _Divided:
    """Base: the forward pass of a layer that is divided into ``slices`` over the ranks of ``group``."""

    def __init__(
        self,
        name: str,
        layer: Any,
        style: TensorStyle,
        slices: int,
        group: ProcessGroup | None,
        draws: Draws,
    ) -> None:
        self._name, self._layer, self._style, self._group, self._draws = name, layer, style, group, draws
        self._slices, self._is_ordered = slices, slices > 1
        self._held = max(1, slices // (group.size() if group else 1))  # slices of this rank
        self._is_checked = False

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        return sum_slices(parts, self._group, is_ordered=self._is_ordered)


@final
class _DividedLinear(_Divided):
    """A linear layer: inputs (..., features) to outputs (..., features), of which a rank holds its slices."""

    def __call__(self, inputs: Tensor) -> Tensor:
        layer, device = self._layer, inputs.device.type
        weight, bias = get_local(layer.weight), None if layer.bias is None else get_local(layer.bias)
        if torch.is_autocast_enabled(device):  # once, not for each slice
            dtype = torch.get_autocast_dtype(device)
            inputs, weight, bias = inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        inputs_nf = inputs.reshape(-1, inputs.shape[-1])
        compute = self._compute_row if self._style == "row" else self._compute_column
        outputs = compute(inputs_nf, weight, bias).view(*inputs.shape[:-1], -1)
        return gather_features(outputs, self._group) if self._style == "gathered" else outputs

    def _compute_column(self, inputs_nf: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shared = _Shared.apply(inputs_nf, self)
        biases = [None] * self._held if bias is None else bias.chunk(self._held)
        parts = [_Product.apply(*each) for each in zip(shared, weight.chunk(self._held), biases, strict=True)]
        if self._is_ordered and self._style == "column":
            self._check_size(parts[0])
            if self._layer.training and not self._is_checked:
                self._draws.mark(inputs_nf.device)
                self._is_checked = True
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _compute_row(self, inputs_nf: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._is_ordered and self._layer.training and not self._is_checked:
            self._draws.check(self._name, inputs_nf.device)
            self._is_checked = True
        pairs = zip(inputs_nf.chunk(self._held, dim=1), weight.chunk(self._held, dim=1), strict=True)
        total: Tensor = _Summed.apply(self, *(_Product.apply(*pair, None) for pair in pairs))
        return total if bias is None else total + bias

    def _check_size(self, part: Tensor) -> None:
        """Raise ConfigError in training if a slice's outputs (tokens, features) end within a vector."""
        if part.numel() % _VECTOR and torch.is_grad_enabled():
            features = part.shape[-1]
            rows = _VECTOR // math.gcd(_VECTOR, features)
            raise ConfigError(
                f"a slice of {self._name} has {part.numel() // features} × {features} outputs, not a multiple of "
                f"{_VECTOR} elements, so functions such as GELU would round differently at each strategy.tensor. Use "
                f"micro-batches with a multiple of {rows} tokens, or set logical_tensor to a smaller number."
            )


@final
class _DividedEmbedding(_Divided):
    """An embedding: indices (...) to features (..., features), divided by features or by vocabulary ("row")."""

    def __call__(self, indices: Tensor) -> Tensor:
        layer = self._layer
        weight = get_local(layer.weight)
        if self._style != "row":
            outputs = F.embedding(indices, weight, layer.padding_idx)
            return outputs if self._style == "column" else gather_features(outputs, self._group)
        if self._group is None:
            return F.embedding(indices, weight, layer.padding_idx) + 0.0  # -0.0 becomes 0.0, as in a sum
        first = self._group.rank() * len(weight)
        is_mine = (indices >= first) & (indices < first + len(weight))
        padding = None if layer.padding_idx is None else layer.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < len(weight) else None
        rows = F.embedding((indices - first).where(is_mine, 0), weight, padding)
        own = rows.masked_fill(~is_mine.unsqueeze(-1), 0.0)
        total: Tensor = _Summed.apply(self, own)  # only one rank has values other than 0
        return total


def get_local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of ``parameter``, of any shape, or the whole of it if it is not sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gather_features(outputs: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return outputs (..., features) with the features of all ranks of ``group``, in order."""
    if group is None:
        return outputs
    gathered: Tensor = _Gathered.apply(outputs, group)
    return gathered


def sum_slices(parts: Sequence[Tensor], group: ProcessGroup | None, *, is_ordered: bool) -> Tensor:
    """Return the sum of ``parts``, this rank's slices, and of those on the other ranks of ``group``.

    All have the same shape, and so has the result. ``is_ordered``: sum in the fixed tree; otherwise in the order of the
    backend.
    """
    dtype = parts[0].dtype
    total = sum_pairs([_widen(each) for each in parts] if len(parts) > 1 else parts)
    if group is None:
        return total.to(dtype)
    if not is_ordered or group.size() == 2:  # a sum of two does not depend on the order
        total = total.clone(memory_format=torch.contiguous_format)
        start_collective(dist.all_reduce, total, group=group).wait()
        return total.to(dtype)
    size, shard = group.size(), -(-total.numel() // group.size())
    mine_ps = F.pad(total.flatten(), (0, size * shard - total.numel())).view(size, shard)
    theirs_ps = torch.empty_like(mine_ps)
    start_collective(dist.all_to_all_single, theirs_ps, mine_ps, group=group).wait()
    total_s = sum_pairs([_widen(each) for each in theirs_ps]).to(dtype)
    total_n = total_s.new_empty(size * shard)
    start_collective(dist.all_gather_into_tensor, total_n, total_s, group=group).wait()
    return total_n[: total.numel()].view_as(total)


def sum_pairs(nodes: Sequence[Tensor]) -> Tensor:
    """Sum a power of two of tensors with the same shape, neighbor by neighbor."""
    while len(nodes) > 1:
        nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]


def _widen(part: Tensor) -> Tensor:
    return part.float() if part.dtype in (torch.bfloat16, torch.float16) else part


class _Product(torch.autograd.Function):
    """The product of inputs (n, in) with a weight (out, in), plus a bias (out,): outputs (n, out).

    Autograd chooses the formula for a weight's gradient by its strides, and these depend on the number of slices held.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return inputs @ weight.t() if bias is None else torch.addmm(bias, inputs, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            gradient.t() @ inputs if ctx.needs_input_grad[1] else None,
            gradient.contiguous().sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None,
        )


class _Shared(torch.autograd.Function):
    """Gives each slice of a column layer the same inputs; sums their gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: _Divided) -> tuple[Tensor, ...]:
        ctx.layer = layer
        return tuple(inputs.view_as(inputs) for _ in range(layer._held))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.layer._sum(gradients), None


class _Summed(torch.autograd.Function):
    """Sums the outputs of the slices of a row layer; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, layer: _Divided, *parts: Tensor) -> Tensor:
        return layer._sum(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, *tuple[Tensor, ...]]:
        return None, *(gradients[0] for _ in range(len(ctx.needs_input_grad) - 1))


class _Gathered(torch.autograd.Function):
    """Gathers features over ranks; each rank gets the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.features = group.rank(), part.shape[-1]
        own = part.contiguous()
        whole = own.new_empty(group.size() * own.numel())
        start_collective(dist.all_gather_into_tensor, whole, own.flatten(), group=group).wait()
        return torch.cat(whole.view(group.size(), *own.shape).unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, ctx.rank * ctx.features, ctx.features).contiguous(), None
