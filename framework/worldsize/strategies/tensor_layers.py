"""Linear layers divided over tensor-parallel ranks, and into rank-independent slices.

A layer is divided along its output features ("column") or its input features ("row"), as in Shoeybi et al. 2019, arXiv
1909.08053. With ``logical_tensor=L``, each of L slices is a separate product, wherever it is computed, and sums over
slices are taken in one fixed tree: slice 2i is added to slice 2i + 1, and so on with the sums. A rank holds consecutive
slices, so the first levels of the tree are local; the results have the same bits at each number of ranks that divides
L. In half precision, products are rounded, summed in float32, and rounded again.

Between a column layer and its row layer, a rank computes only on its own features. Kernels of functions such as GELU
treat the last elements of a tensor differently, so the tensor of a slice must have a multiple of ``VECTOR`` elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from worldsize.collectives.group import start_collective
from worldsize.collectives.per_rank import get_local_shard
from worldsize.collectives.slice_sums import sum_slices
from worldsize.core import ConfigError, Recipe, TensorStyle
from worldsize.seeds import get_generator_state
from worldsize.strategies.chunk_tensor import call_by_part
from worldsize.strategies.deferred_weights import is_needed
from worldsize.strategies.token_shard import TokenShard, TokenSplit

_EMBEDDING_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")
VECTOR = 64  # elements of the widest unrolled loop of torch's CPU kernels: two AVX-512 vectors of bfloat16


def get_tensor_plan(recipe: Recipe, model: nn.Module, *, slices: int, key: str) -> Mapping[str, TensorStyle]:
    """Return the recipe's tensor-parallel style of each layer of ``model``.

    Args:
        recipe: The recipe.
        model: The model.
        slices: Number of slices of equal size that each layer must be divisible into.
        key: The configuration key that sets ``slices``, such as "strategy.tensor".

    Raises:
        ConfigError: the recipe lacks a plan; or a layer or a unit of the model is not divisible by ``slices``; or a
            layer is of an unsupported kind, or shares a parameter with a different module.
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
        f"{type(recipe).__name__} does not define a tensor-parallel plan for its model. Define Recipe.tensor_plan, or "
        f"set {key}=1."
    )


def _check_features(name: str, module: nn.Module, style: TensorStyle, slices: int, key: str) -> None:
    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        features = module.in_features if style == "row" else module.out_features
    elif isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward:
        features = module.num_embeddings if style == "row" else module.embedding_dim
    else:
        raise ConfigError(
            f"{name} is a {kind.__name__}, but only torch.nn.Linear and torch.nn.Embedding can be divided. Omit "
            f"{name} from Recipe.tensor_plan, or set {key}=1."
        )
    if is_parametrized(module) or any(getattr(module, option, None) for option in _EMBEDDING_OPTIONS):
        raise ConfigError(
            f"{name} is parametrized, or has {', '.join(_EMBEDDING_OPTIONS)}, which a divided layer does not support. "
            f"Omit {name} from Recipe.tensor_plan, or set {key}=1."
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
                    f"{' and '.join(holders[parameter])} share their {key}, and a shared parameter cannot be divided. "
                    f"Omit {name} from Recipe.tensor_plan, or give each module its own parameter."
                )


def slice_layers(recipe: Recipe, model: nn.Module, slices: int) -> None:
    """Compute layers of the tensor plan in ``slices``, unless already divided over ranks."""
    draws = Draws()
    for name, style in recipe.tensor_plan(model).items():
        layer = model.get_submodule(name)
        if not isinstance(layer.forward, _Divided):
            divide_forward(name, layer, style, slices=slices, draws=draws)


def divide_parameters(layer: nn.Module, style: TensorStyle, mesh: DeviceMesh) -> None:
    """Shard the parameters of ``layer``, equal on all ranks, over the tensor axis ``mesh``."""
    is_row, is_linear = style == "row", isinstance(layer, nn.Linear)
    placements: dict[str, Placement] = {  # weights are (out, in) in linear layers, (vocabulary, features) in embeddings
        "weight": Shard(0 if is_row != is_linear else 1),
        "bias": Replicate() if is_row else Shard(0),
    }
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
    token_split: TokenSplit | None = None,
) -> None:
    """Replace the forward pass of ``layer`` by one that computes logical slices.

    Args:
        name: Name of the layer in the model, for messages.
        layer: A linear layer or an embedding; with ``group``, its parameters are already sharded.
        style: How the layer is divided.
        slices: Number of logical slices over all ranks; 1: one product per rank, summed in the order of the backend.
        draws: Shared by all layers of the model.
        group: The tensor-parallel ranks; None: this process computes all slices.
        token_split: How these ranks divide output tokens, unless ``style`` is "column"; None: each has all tokens.
    """
    kind = _DividedLinear if isinstance(layer, nn.Linear) else _DividedEmbedding
    layer.forward = kind(
        name, layer, style, slices, group, draws, token_split
    )  # a wrapper module would change names in checkpoints


@final
class Draws:
    """Detects random draws between column and row layers, which would depend on the ranks."""

    def __init__(self) -> None:
        self._state: Tensor | None = None  # of the generator, after the first column layer since the last row layer

    def mark(self, device: torch.device) -> None:
        """Record the state of the generator after a column layer."""
        if self._state is None:
            self._state = get_generator_state(device)

    def check(self, name: str, device: torch.device) -> None:
        """Raise ConfigError if the generator advanced since :meth:`mark`, before layer ``name``."""
        before, self._state = self._state, None
        if before is not None and not torch.equal(before, get_generator_state(device)):
            raise ConfigError(
                f"random numbers are drawn on the divided features before {name}, for example by dropout in attention. "
                "With logical_tensor they would depend on strategy.tensor. Set that dropout to 0, or logical_tensor=1."
            )


class _Divided:
    """Base: the forward pass of a layer that is divided into ``slices`` over ``group``.

    Attributes:
        held: Number of slices on this rank.
        is_ordered: Whether slices are summed in the fixed tree.
        is_separable: Whether it reads only the layer's own tensors, and returns a plain tensor.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        style: TensorStyle,
        slices: int,
        group: ProcessGroup | None,
        draws: Draws,
        token_split: TokenSplit | None,
    ) -> None:
        self._name, self._layer, self._style, self._group, self._draws = name, layer, style, group, draws
        self.is_ordered, self._token_split = slices > 1, token_split
        self.is_separable = token_split is None
        self.held = max(1, slices // (group.size() if group else 1))

    def sum_parts(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the sum of ``parts``, one for each slice on this rank, over all ranks."""
        return sum_slices(parts, self.held, self._group, is_ordered=self.is_ordered)

    def refuse_second_gradient(self) -> None:
        """Raise ConfigError for double backward (``create_graph=True``), if it needs other ranks."""
        if self._group is not None and torch.is_grad_enabled():
            raise ConfigError(
                f"double backward (create_graph=True) through {self._name} is not supported with tensor parallelism. "
                "Set strategy.tensor=1."
            )


@final
class _DividedLinear(_Divided):
    """A linear layer, (..., in) to (..., out), in slices.

    A rank holds slices of the inputs ("row") or of the outputs.
    """

    def __call__(self, inputs: Tensor) -> Tensor:
        layer = self._layer
        weight, bias = get_local_shard(layer.weight), None if layer.bias is None else get_local_shard(layer.bias)
        outputs: Tensor = call_by_part(self._compute, inputs, weight, bias)
        return outputs

    def _compute(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layer, device = self._layer, inputs.device
        if torch.is_autocast_enabled(device.type):  # once, not for each slice
            dtype = torch.get_autocast_dtype(device.type)
            inputs, weight, bias = inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        checks_draws = self.is_ordered and layer.training
        if self._style == "row":
            if checks_draws and type(inputs) is Tensor:  # a rehearsal with fakes does not draw random numbers
                self._draws.check(self._name, device)
            split = self._token_split
            if split is not None and split.can_divide(inputs):
                own: Tensor = _Row.apply(inputs, weight, bias, self, split)
                return TokenShard(own, split)
            total: Tensor = _Row.apply(inputs.reshape(-1, inputs.shape[-1]), weight, None, self, None)
            outputs = total if bias is None else total + bias
        else:
            if isinstance(inputs, TokenShard):
                outputs = _Column.apply(inputs.own, weight, bias, self, inputs.token_split)
            else:
                outputs = _Column.apply(inputs.reshape(-1, inputs.shape[-1]), weight, bias, self, None)
            if self.is_ordered and self._style == "column":
                self._check_size(outputs)
                if checks_draws and type(outputs) is Tensor:
                    self._draws.mark(device)
        outputs = outputs.view(*inputs.shape[:-1], outputs.shape[-1])
        if self._style != "gathered":
            return outputs
        split = self._token_split
        if split is not None and outputs.ndim == 3 and (split.can_divide(outputs) or torch.is_grad_enabled()):
            return TokenShard.exchange(outputs, split)
        return gather_features(outputs, self._group)

    def _check_size(self, outputs: Tensor) -> None:
        """Raise ConfigError if a slice of ``outputs`` (tokens, features) ends within a vector.

        Checked only in training on a CPU.
        """
        tokens, features = outputs.shape[0], outputs.shape[1] // self.held
        if tokens * features % VECTOR and outputs.device.type == "cpu" and torch.is_grad_enabled():
            multiple = VECTOR // math.gcd(VECTOR, features)
            raise ConfigError(
                f"a slice of {self._name} has {tokens} × {features} outputs, not a multiple of {VECTOR} elements, so "
                "functions such as GELU would round differently for each strategy.tensor. Use micro-batches with a "
                f"multiple of {multiple} tokens, or set logical_tensor to a smaller number."
            )


@final
class _DividedEmbedding(_Divided):
    """An embedding, indices (...) to features (..., features), in slices.

    It is divided by features or by vocabulary ("row").
    """

    def __call__(self, indices: Tensor) -> Tensor:
        outputs: Tensor = call_by_part(self._compute, indices, get_local_shard(self._layer.weight))
        return outputs

    def _compute(self, indices: Tensor, weight: Tensor) -> Tensor:
        layer = self._layer
        if self._style != "row":
            outputs = F.embedding(indices, weight, layer.padding_idx)
            return outputs if self._style == "column" else gather_features(outputs, self._group)
        if self._group is None:
            return F.embedding(indices, weight, layer.padding_idx) + 0.0  # -0.0 becomes 0.0, as in a sum
        first = self._group.rank() * len(weight)
        padding = None if layer.padding_idx is None else layer.padding_idx - first
        rows: Tensor = _Vocabulary.apply(indices - first, weight, padding, self)
        return rows


def gather_features(outputs: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return outputs (..., features) with the features of all ranks of ``group``, in order."""
    if group is None:
        return outputs
    gathered: Tensor = _Gathered.apply(outputs, group)
    return gathered


class _Column(torch.autograd.Function):
    """Computes a column layer slice by slice: outputs (n, out) of inputs (n, in).

    The weight is (out, in), and the bias is (out,) or None. With ``split``, inputs are this rank's tokens (batch, time,
    in), which are gathered.

    Operands of products are contiguous. Autograd, and libraries such as MKL, choose formulas by strides, which depend
    on the number of slices that a rank holds.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: _Divided, split: TokenSplit | None
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer, ctx.has_bias, ctx.split = layer, bias is not None, split
        own, weights = _gather_rows(inputs, split), weight.chunk(layer.held)
        if bias is None:
            parts = [own @ each.t() for each in weights]
        else:
            pairs = zip(bias.chunk(layer.held), weights, strict=True)
            parts = [torch.addmm(each, own, part.t()) for each, part in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        layer, split, (inputs, weight) = ctx.layer, ctx.split, ctx.saved_tensors
        layer.refuse_second_gradient()
        parts = [each.contiguous() for each in gradients[0].chunk(layer.held, dim=1)]
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0] and is_needed("inputs"):
            pairs = zip(parts, weight.chunk(layer.held), strict=True)
            products = (part @ each for part, each in pairs)
            of_inputs = layer.sum_parts(products) if split is None else _scatter_rows(products, inputs, layer, split)
        if ctx.needs_input_grad[1] and is_needed("weights"):
            own = _gather_rows(inputs, split)
            of_weight = torch.cat([part.t() @ own for part in parts])
        if ctx.has_bias and ctx.needs_input_grad[2] and is_needed("weights"):
            of_bias = torch.cat([part.sum(0) for part in parts])
        return of_inputs, of_weight, of_bias, None, None


class _Row(torch.autograd.Function):
    """Outputs (n, out) of inputs (n, in) and a weight (out, in), summed over slices of ``in``.

    With ``split``, inputs are (batch, time, in), and outputs are this rank's tokens, after adding the bias (out,).
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: _Divided, split: TokenSplit | None
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer, ctx.split = layer, split
        pairs = zip(inputs.flatten(0, -2).chunk(layer.held, dim=1), weight.chunk(layer.held, dim=1), strict=True)
        products = (own.contiguous() @ each.contiguous().t() for own, each in pairs)
        if split is None:
            return layer.sum_parts(products)
        wholes = (each.view(*inputs.shape[:2], -1) for each in products)
        total = split.scatter_sum(wholes, layer.held, in_tree=layer.is_ordered)
        return total if bias is None else total + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        layer, (inputs, weight) = ctx.layer, ctx.saved_tensors
        layer.refuse_second_gradient()
        gradient = _gather_rows(gradients[0], ctx.split)
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0] and is_needed("inputs"):
            products = [gradient @ each.contiguous() for each in weight.chunk(layer.held, dim=1)]
            of_inputs = torch.cat(products, dim=1).view_as(inputs)
        if ctx.needs_input_grad[1] and is_needed("weights"):
            own = inputs.flatten(0, -2).chunk(layer.held, dim=1)
            of_weight = torch.cat([gradient.t() @ each.contiguous() for each in own], dim=1)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        return of_inputs, of_weight, of_bias, None, None


def _gather_rows(inputs: Tensor, split: TokenSplit | None) -> Tensor:
    """Return contiguous inputs (n, features); with ``split``, gathered from all ranks' tokens."""
    return inputs.contiguous() if split is None else split.gather(inputs).flatten(0, 1)


def _scatter_rows(products: Iterable[Tensor], like: Tensor, layer: _Divided, split: TokenSplit) -> Tensor:
    """Return this rank's tokens, shaped as ``like``, of the sum of ``products`` (n, features)."""
    wholes = (each.view(len(like), -1, like.shape[-1]) for each in products)
    return split.scatter_sum(wholes, layer.held, in_tree=layer.is_ordered)


class _Vocabulary(torch.autograd.Function):
    """Looks up rows (..., features) in a table sharded by vocabulary.

    ``indices`` (...) are relative to this rank's shard. Indices outside of this rank's shard belong to other ranks; the
    rows are summed over ranks.
    """

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int | None, layer: _Divided) -> Tensor:
        is_mine = (indices >= 0) & (indices < len(weight))
        is_trained = is_mine if padding is None else is_mine & (indices != padding)
        ctx.save_for_backward(indices.where(is_trained, len(weight)))
        ctx.rows = len(weight)
        rows = F.embedding(indices.where(is_mine, 0), weight)
        return layer.sum_parts([rows.masked_fill(~is_mine.unsqueeze(-1), 0.0)])  # nonzero on at most one rank

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        # an extra row, which is dropped, for the indices of other ranks and of the padding
        rows = torch.ops.aten.embedding_dense_backward(gradients[0], indices, ctx.rows + 1, ctx.rows, False)
        return None, rows[: ctx.rows], None, None


class _Gathered(torch.autograd.Function):
    """Gathers features over ranks; each rank gets the gradient of its own features."""

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
