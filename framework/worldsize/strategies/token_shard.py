"""Sequence and loss parallelism: outside of its layers, a tensor-parallel rank has a part of the tokens.

Without it, tensor-parallel ranks repeat norms, dropout and residual connections, and keep their inputs for the backward
pass. Here, a column layer gathers its inputs, and a row layer scatters the sum of its outputs (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2), which sends as much as an all-reduce.

The model runs as it is written. :class:`TokenShard` has the shape of the whole tensor. Operations that treat each
token by itself run on the rank's tokens; any other operation gathers the tensor first. The gradient of a norm's weight
is summed over the ranks. With ``is_ordered``, it is computed from all tokens instead, in one sum as by one process, so
the bits do not depend on the number of ranks. Dropout draws the numbers of all tokens, and each rank uses its own.

In loss parallelism, ranks exchange the outputs of a "gathered" head, so that each has all outputs of its own tokens,
and computes their cross entropy. Unlike with outputs divided by classes, this is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node, tree_map_only

from worldsize.collectives.group import start_collective
from worldsize.collectives.slice_sums import scatter_slices, sum_slices
from worldsize.core import ConfigError, Recipe
from worldsize.strategies.chunk_tensor import call_by_part

_TIME, _BATCHED = 1, 2  # dimension of tokens; number of dimensions before those of the features
_REMEDY = "Set strategy.sequence_parallel=false and strategy.loss_parallel=false."


@final
@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The tensor-parallel ranks over which the tokens of each sequence are divided, in order.

    Attributes:
        group: These ranks.
        is_ordered: Whether results have the same bits at each number of ranks.
        key: Name of the key that divides the tokens, for messages.
    """

    group: ProcessGroup
    is_ordered: bool
    key: str

    def cut(self, whole: Tensor) -> TokenShard:
        """Return this rank's part of ``whole`` (batch, time, ...), which all ranks have.

        Raises:
            ConfigError: the length is not divisible by the number of ranks.
        """
        return TokenShard(_Cut.apply(self, whole), self)

    def take_own(self, whole: Tensor, dim: int = _TIME) -> Tensor:
        """Return this rank's tokens of ``whole`` along dimension ``dim``."""
        length, size = whole.shape[dim], self.group.size()
        if length % size:
            raise ConfigError(
                f"a sequence of {length} tokens cannot be divided over strategy.tensor={size} ranks. Use sequences "
                f"with a multiple of {size} tokens, or set {self.key}=false."
            )
        return whole.narrow(dim, self.group.rank() * (length // size), length // size).contiguous()

    def gather(self, own: Tensor) -> Tensor:
        """Return tensors (batch, time, ...) from the parts of all ranks, without a gradient."""
        batch, time, *rest = own.shape
        gathered = own.new_empty(self.group.size() * batch, time, *rest)
        start_collective(dist.all_gather_into_tensor, gathered, own.contiguous(), group=self.group).wait()
        return gathered.view(-1, *own.shape).transpose(0, 1).reshape(batch, -1, *rest)

    def scatter_sum(self, parts: Iterable[Tensor], count: int) -> Tensor:
        """Return this rank's tokens of the sum of ``parts`` over all ranks.

        Each rank has ``count`` parts (batch, time, features), one for each of its slices.
        """
        rows = (self._group_by_rank(part) for part in parts)
        if self.is_ordered:
            return scatter_slices(rows, count, self.group)[0]
        (total,) = rows
        own = total.new_empty(total.shape[1:])
        start_collective(dist.reduce_scatter_tensor, own, total.flatten(0, 1), group=self.group).wait()
        return own

    def exchange(self, parts: Tensor) -> Tensor:
        """Return all features of this rank's tokens, from all ranks' ``parts`` (batch, time, features / ranks)."""
        mine = self._group_by_rank(parts)
        theirs = torch.empty_like(mine)
        start_collective(dist.all_to_all_single, theirs, mine, group=self.group).wait()
        return theirs.movedim(0, 2).flatten(2)

    def exchange_back(self, own: Tensor) -> Tensor:
        """Return this rank's features of all tokens, from the tokens (batch, time / ranks, features) of all ranks."""
        mine = torch.stack(own.chunk(self.group.size(), dim=2))
        theirs = torch.empty_like(mine)
        start_collective(dist.all_to_all_single, theirs, mine, group=self.group).wait()
        return theirs.transpose(0, 1).flatten(1, 2)

    def _group_by_rank(self, whole: Tensor) -> Tensor:
        """Return (ranks, batch, time, features)."""
        batch, time, features = whole.shape
        return whole.view(batch, self.group.size(), time // self.group.size(), features).transpose(0, 1).contiguous()

    def reduce(self, gradient: Tensor) -> Tensor:
        """Return the sum of ``gradient`` over all ranks, in the order of the backend."""
        return sum_slices([gradient], 1, self.group, is_ordered=False)


def divide_tokens(recipe: Recipe, model: nn.Module, split: TokenSplit) -> None:
    """Divide the tokens of the input of each block, (batch, time, features).

    Raises:
        ConfigError: the recipe does not define blocks.
    """
    for block in list_blocks(recipe, model):
        block.register_forward_pre_hook(_DividedInput(split), with_kwargs=True)


def list_blocks(recipe: Recipe, model: nn.Module) -> Sequence[nn.Module]:
    """Return the blocks whose tokens are divided.

    Raises:
        ConfigError: the recipe does not define blocks.
    """
    if not (blocks := recipe.blocks(model)):
        raise ConfigError(
            "strategy.sequence_parallel=true divides the inputs of blocks, but "
            f"{type(recipe).__name__} does not define Recipe.blocks. Define it, or set it to false."
        )
    return blocks


@final
@dataclass(frozen=True)
class _DividedInput:
    """Divides the first tensor of floating-point numbers among the arguments of a block."""

    split: TokenSplit

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for key, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                if value.ndim != 3:
                    raise ConfigError(
                        f"the input of {type(block).__name__} has shape {tuple(value.shape)}, but "
                        f"{self.split.key}=true requires (batch, time, features). Set {self.split.key}=false."
                    )
                own = call_by_part(self._divide, value)
                if key in kwargs:
                    return args, {**kwargs, key: own}
                return (*args[:key], own, *args[key + 1 :]), kwargs
        return args, kwargs

    def _divide(self, hidden: Tensor) -> TokenShard:
        return hidden if isinstance(hidden, TokenShard) else self.split.cut(hidden)


@final
class TokenShard(Tensor):
    """This rank's tokens of a tensor (batch, time, ...) or (batch * time, ...), of which it has the shape.

    Attributes:
        own: The tokens of this rank, (batch, time / ranks, ...).
        token_split: The ranks.
        is_flat: Whether batch and time are one dimension.
    """

    own: Tensor
    token_split: TokenSplit
    is_flat: bool

    def __new__(cls, own: Tensor, split: TokenSplit, *, is_flat: bool = False) -> TokenShard:
        batch, time, *rest = own.shape
        time *= split.group.size()
        shape = (batch * time, *rest) if is_flat else (batch, time, *rest)
        made: Any = Tensor._make_wrapper_subclass(
            cls, shape, dtype=own.dtype, device=own.device, requires_grad=own.requires_grad
        )
        made.own, made.token_split, made.is_flat = own, split, is_flat
        return made  # type: ignore[no-any-return]

    def gather_all(self) -> Tensor:
        """Return the whole tensor; the gradient of this rank's tokens must be complete on this rank."""
        whole: Tensor = _Gather.apply(self.token_split, self.own)
        return whole.flatten(0, 1) if self.is_flat else whole

    @staticmethod
    def exchange(parts: Tensor, split: TokenSplit) -> TokenShard:
        """Return all features of the tokens, from this rank's ``parts`` (batch, time, features / ranks)."""
        return TokenShard(_Exchange.apply(split, parts), split)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ConfigError(f"{func} was called on a part of the tokens. {_REMEDY}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TokenShard({self.own})"


register_pytree_node(  # FSDP and activation checkpointing look for tensors in arguments
    TokenShard,
    lambda shard: ([shard.own], (shard.token_split, shard.is_flat)),
    lambda parts, context: TokenShard(next(iter(parts)), context[0], is_flat=context[1]),
)


def gather_tokens(tree: Any) -> Any:
    """Return ``tree`` with whole tensors instead of this rank's tokens."""
    return tree_map_only(TokenShard, TokenShard.gather_all, tree, is_leaf=lambda node: isinstance(node, TokenShard))


def _create_refusal(what: str) -> ConfigError:
    return ConfigError(f"the model calls {what} on a tensor of which a rank has a part of the tokens. {_REMEDY}")


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` on this rank's tokens if it treats each by itself, otherwise on whole tensors.

    Raises:
        ConfigError: a function that needs whole tensors would change one in place, or register a hook.
    """
    name = getattr(func, "__name__", "")
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", *_OPERATORS)
    result: Any = NotImplemented
    if handler := _HANDLERS.get(func):
        result = handler(*args, **kwargs)
    elif len({(each.is_flat, each.own.shape[:_BATCHED]) for each in _find_shards((args, kwargs))}) == 1:
        result = _call_by_token(func, args, kwargs)
    if result is not NotImplemented:
        return result
    if is_in_place or func in _REFUSED or kwargs.get("out") is not None or kwargs.get("inplace"):
        raise _create_refusal(name)
    whole_args, whole_kwargs = gather_tokens((args, kwargs))
    return func(*whole_args, **whole_kwargs)


def _find_shards(node: Any) -> Iterator[TokenShard]:
    if isinstance(node, TokenShard):
        yield node
    elif isinstance(node, tuple | list):
        for each in node:
            yield from _find_shards(each)
    elif isinstance(node, Mapping):
        yield from _find_shards(tuple(node.values()))


def _is_by_token(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call computes the results of each token from its inputs only, with the same bits."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    shards = [each for each in tensors if isinstance(each, TokenShard)]
    if not shards or (shards[0].is_flat and len(tensors) > 1):
        return False
    features = shards[0].own.ndim - _BATCHED  # dimensions of the features
    if func in _NORMS:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return isinstance(args[0], TokenShard) and 0 < len(shape) <= features
    if func in _MEANS:  # over the features
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        last = dims[0] if isinstance(dims, tuple | list) and len(dims) == 1 else dims
        return features > 0 and last in (-1, shards[0].ndim - 1)
    if func in _POWERS and args[1:] != (2,):
        return False
    if func in _IN_PLACE:  # the gradient of a shared tensor may need what the call overwrites
        whole = [each for each in tensors if not isinstance(each, TokenShard)]
        is_shared = any(each.requires_grad and not _has_all_tokens(each, shards[0]) for each in whole)
        return isinstance(args[0], TokenShard) and not is_shared
    most = max(each.ndim for each in tensors)
    return func in _ELEMENTWISE and all(each.ndim == most for each in shards)


def _has_all_tokens(tensor: Tensor, like: TokenShard) -> bool:
    """Return whether a whole tensor has the batch and the tokens of ``like``, so that it can be cut."""
    return tensor.ndim == like.own.ndim and tensor.shape[:_BATCHED] == like.shape[:_BATCHED]


def _call_by_token(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` with this rank's tokens of all arguments; return NotImplemented if it needs whole tensors."""
    if not _is_by_token(func, args, kwargs):
        return NotImplemented
    like = next(_find_shards((args, kwargs)))
    split, place = like.token_split, like.own.ndim - _TIME  # of the tokens, counted from the last dimension
    given = [*args, *kwargs.values()]
    leaves = [
        split.cut(each) if not isinstance(each, TokenShard) and _has_all_tokens(each, like) else each
        for each in given
        if isinstance(each, Tensor)
    ]

    def call(*tensors: Tensor) -> Tensor:
        replacing = iter(tensors)
        values = [next(replacing) if isinstance(each, Tensor) else each for each in given]
        own = dict(zip(kwargs, values[len(args) :], strict=True))
        result: Tensor = func(*values[: len(args)], **own)
        return result

    is_shared = [torch.is_grad_enabled() and each.requires_grad and not isinstance(each, TokenShard) for each in leaves]
    own = []
    for each, shared in zip(leaves, is_shared, strict=True):
        if isinstance(each, TokenShard):
            own.append(each.own)
            continue
        if shared:
            each = each.detach() if split.is_ordered else _Shared.apply(split, each)
        has_tokens = each.ndim >= place and each.shape[-place] == like.shape[_TIME]
        own.append(split.take_own(each, each.ndim - place) if has_tokens else each)
    result = call(*own)
    if split.is_ordered and any(is_shared):
        inputs = [each.own.detach() if isinstance(each, TokenShard) else each for each in leaves]
        is_own = [isinstance(each, TokenShard) for each in leaves]
        result = _FromWhole.apply(split, call, is_own, is_shared, result, *inputs)
    return TokenShard(result, split, is_flat=like.is_flat)


def _drop(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Apply dropout with the numbers that one process would draw for all tokens."""
    if not training or p == 0.0:
        return input
    with torch.no_grad():
        scale = F.dropout(torch.ones(input.shape, dtype=input.dtype, device=input.device), p)
        own = input.token_split.take_own(scale.view(input.own.shape[0], -1, *input.own.shape[_BATCHED:]))
    dropped = input.own.mul_(own) if inplace else input.own * own
    return TokenShard(dropped, input.token_split, is_flat=input.is_flat)


def _reshape(func: Callable[..., Tensor], shard: Any, *args: Any, **kwargs: Any) -> Any:
    """Merge batch and time, or return NotImplemented."""
    shape = func(torch.empty(shard.shape, device="meta"), *args, **kwargs).shape
    flat = (len(shard.own) * shard.own.shape[_TIME] * shard.token_split.group.size(), *shard.own.shape[_BATCHED:])
    return TokenShard(shard.own, shard.token_split, is_flat=True) if shape == flat else NotImplemented


def _compute_cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the cross entropy of this rank's tokens, and add those of all in the order of one process."""
    is_usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not (is_usual and isinstance(input, TokenShard) and input.is_flat and input.ndim == 2 and target.ndim == 1):
        return NotImplemented
    split, batch = input.token_split, len(input.own)
    own = split.take_own(target.view(batch, -1)).flatten()
    losses = F.cross_entropy(input.own.flatten(0, 1), own, ignore_index=ignore_index, reduction="none")
    whole: Tensor = _Gather.apply(split, losses.view(batch, -1)).flatten()
    if reduction == "none":
        return whole
    classes = torch.where(target == ignore_index, -100, 0)  # one class: the loss is its negative score
    return F.nll_loss(-whole[:, None], classes, reduction=reduction)


class _Cut(torch.autograd.Function):
    """Takes this rank's tokens; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, split: TokenSplit, whole: Tensor) -> Tensor:
        ctx.split = split
        return split.take_own(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        _refuse_second_gradient()
        return None, ctx.split.gather(gradients[0])


class _Gather(torch.autograd.Function):
    """Gathers tokens; each rank has the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, split: TokenSplit, own: Tensor) -> Tensor:
        ctx.split = split
        return split.gather(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        _refuse_second_gradient()
        return None, ctx.split.take_own(gradients[0])


class _Exchange(torch.autograd.Function):
    """Exchanges features of all tokens for all features of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, split: TokenSplit, parts: Tensor) -> Tensor:
        ctx.split = split
        return split.exchange(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        _refuse_second_gradient()
        return None, ctx.split.exchange_back(gradients[0])


class _Shared(torch.autograd.Function):
    """Uses a tensor for the tokens of all ranks, over which its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, split: TokenSplit, shared: Tensor) -> Tensor:
        ctx.split = split
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        _refuse_second_gradient()
        return None, ctx.split.reduce(gradients[0])


class _FromWhole(torch.autograd.Function):
    """Returns ``result`` of a function of this rank's tokens, and differentiates it by shared tensors for all tokens.

    Gradients of shared tensors are sums over tokens, which thus have the bits of one process. ``is_own``: the arguments
    of which this rank has a part. ``is_shared``: those to differentiate by.
    """

    @staticmethod
    def forward(
        ctx: Any,
        split: TokenSplit,
        call: Callable[..., Tensor],
        is_own: Sequence[bool],
        is_shared: Sequence[bool],
        result: Tensor,
        *arguments: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*arguments)
        ctx.split, ctx.call, ctx.is_own, ctx.is_shared = split, call, is_own, is_shared
        device = result.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.mark_dirty(result)  # returned as it is, and not as a view, so that the model may change it in place
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_gradient()
        split, (device, dtype, enabled) = ctx.split, ctx.autocast
        wholes = [
            split.gather(each) if is_part else each.detach().requires_grad_(shared)
            for each, is_part, shared in zip(ctx.saved_tensors, ctx.is_own, ctx.is_shared, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(device, dtype, enabled):
            result = ctx.call(*wholes)
        shared = [each for each in wholes if each.requires_grad]
        found = iter(torch.autograd.grad(result, shared, split.gather(gradients[0])))
        return None, None, None, None, gradients[0], *(next(found) if each else None for each in ctx.is_shared)


def _refuse_second_gradient() -> None:
    """Raise ConfigError in a backward pass that is differentiated again."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "a gradient is differentiated again (create_graph=True), which is not supported for parts of the tokens. "
            f"{_REMEDY}"
        )


def _list_getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


_METADATA = frozenset(
    (
        *_list_getters(
            "shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf", "grad_fn", "is_sparse"
        ),
        *_list_getters("is_cuda", "is_cpu", "is_meta", "is_quantized", "is_nested", "itemsize", "nbytes"),
        *(
            Tensor.size,
            Tensor.dim,
            Tensor.numel,
            torch.numel,
            Tensor.nelement,
            Tensor.__len__,
            Tensor.is_floating_point,
        ),
        *(torch.is_floating_point, torch.is_tensor, Tensor.is_complex, torch.is_complex, Tensor.element_size),
        *(Tensor.get_device, Tensor.is_contiguous, Tensor.__hash__),
    )
)
_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    F.dropout: _drop,
    F.cross_entropy: _compute_cross_entropy,
    Tensor.register_hook: lambda shard, hook: shard.own.register_hook(hook),  # FSDP awaits the backward pass with it
    **{func: partial(_reshape, func) for func in (torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape)},
}
_REFUSED = frozenset((Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.backward))
_IN_PLACE = frozenset(
    (
        *(Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_),
        *(Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__),
    )
)
_OPERATORS = [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")]
_POWERS = frozenset((torch.pow, Tensor.pow, Tensor.__pow__))
_ELEMENTWISE = frozenset(  # exact, so that vector and scalar instructions agree
    (
        *(getattr(kind, name) for kind in (torch, Tensor) for name in ("add", "sub", "mul", "div", "neg", "square")),
        *(getattr(Tensor, f"__{name}__") for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg")),
        *(Tensor.to, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.double, Tensor.type_as, Tensor.contiguous),
        *(Tensor.clone, torch.clone, Tensor.detach, torch.rsqrt, Tensor.rsqrt, torch.sqrt, Tensor.sqrt),
        *(*_POWERS, *_IN_PLACE),
    )
)
_MEANS = frozenset((torch.mean, Tensor.mean))
_NORMS = frozenset((F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm))
