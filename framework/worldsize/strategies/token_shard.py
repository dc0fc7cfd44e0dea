"""Sequence and loss parallelism: a rank holds only some tokens outside of divided layers.

Otherwise, tensor-parallel ranks repeat norms, dropout and residual connections, and keep their inputs for the backward
pass. Here, a column layer gathers its inputs, and a row layer scatters the sum of its outputs (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2). Both together send as much as an all-reduce.

The model runs unchanged. A :class:`TokenShard` has the shape of the whole tensor. Operations that are independent for
each token run on the rank's tokens; any other operation gathers the tensor first. The gradient of a norm's weight
is summed over the ranks. With ``is_ordered``, it is computed from all tokens instead, in one sum as in one process, so
the bits do not depend on the number of ranks. Dropout draws the numbers of all tokens, and each rank uses its own.

In loss parallelism, ranks exchange the outputs of a "gathered" head. Each rank then has all classes of its tokens, and
computes their cross entropy. Unlike with outputs divided by classes, this is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node, tree_map_only

from worldsize.collectives.group import start_collective
from worldsize.collectives.slice_sums import scatter_slices, sum_slices
from worldsize.core import ConfigError, Recipe
from worldsize.strategies.chunk_tensor import call_by_part, find_tensors, writes_in_place

_TOKEN_DIMS = 2  # batch and time, the first dimensions


@final
@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The division of each sequence over tensor-parallel ranks, in order.

    Attributes:
        group: The tensor-parallel ranks.
        is_ordered: Whether sums over tokens have the same order as in one process.
        key: Name of the key that divides the tokens, for messages.
    """

    group: ProcessGroup
    is_ordered: bool
    key: str

    def cut(self, whole: Tensor) -> TokenShard:
        """Return this rank's part of ``whole`` (batch, time, ...); all ranks have the same tensor.

        Raises:
            ConfigError: the length is not divisible by the number of ranks.
        """
        return TokenShard(_MovedTokens.apply(self.take_own, self.gather, whole), self)

    def can_divide(self, whole: Tensor) -> bool:
        """Return whether ``whole`` is (batch, time, features), with ``time`` divisible by the group's size."""
        return whole.ndim == 3 and whole.shape[1] % self.group.size() == 0

    def take_own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of ``whole`` along dimension ``dim``."""
        size = self._count_own(whole.shape[dim])
        return whole.narrow(dim, self.group.rank() * size, size).contiguous()

    def gather(self, own: Tensor) -> Tensor:
        """Gather a whole tensor (batch, time, ...) from the parts of all ranks, without a gradient."""
        batch, time, *rest = own.shape
        gathered = own.new_empty(self.group.size() * batch, time, *rest)
        start_collective(dist.all_gather_into_tensor, gathered, own.contiguous(), group=self.group).wait()
        return gathered.view(-1, *own.shape).transpose(0, 1).reshape(batch, -1, *rest)

    def scatter_sum(self, parts: Iterable[Tensor], count: int, *, in_tree: bool) -> Tensor:
        """Return this rank's tokens of the sum of ``parts`` over all ranks.

        Each rank has ``count`` parts (batch, time, features), one for each of its slices. ``in_tree``: sum in the fixed
        tree; otherwise, each rank has one part.
        """
        rows = (self._group_by_rank(part) for part in parts)
        if in_tree:
            return scatter_slices(rows, count, self.group)[0]
        (total,) = rows
        own = total.new_empty(total.shape[1:])
        start_collective(dist.reduce_scatter_tensor, own, total.flatten(0, 1), group=self.group).wait()
        return own

    def sum_gradient(self, gradient: Tensor) -> Tensor:
        """Return the sum of ``gradient`` over all ranks, in the order of the backend."""
        return sum_slices([gradient], 1, self.group, is_ordered=False)

    def exchange(self, parts: Tensor) -> Tensor:
        """Return this rank's tokens with all features, from (batch, time, features / ranks)."""
        return self._exchange(self._group_by_rank(parts)).movedim(0, 2).flatten(2)

    def exchange_back(self, own: Tensor) -> Tensor:
        """Return this rank's features of all tokens, from (batch, time / ranks, features)."""
        return self._exchange(torch.stack(own.chunk(self.group.size(), dim=2))).transpose(0, 1).flatten(1, 2)

    def _exchange(self, mine: Tensor) -> Tensor:
        theirs = torch.empty_like(mine)
        start_collective(dist.all_to_all_single, theirs, mine, group=self.group).wait()
        return theirs

    def _group_by_rank(self, whole: Tensor) -> Tensor:
        """Reorder (batch, time, features) to contiguous (ranks, batch, time / ranks, features)."""
        batch, time, features = whole.shape
        return whole.view(batch, -1, self._count_own(time), features).transpose(0, 1).contiguous()

    def _count_own(self, length: int) -> int:
        """Return the number of this rank's tokens in a sequence of ``length`` tokens."""
        own, rest = divmod(length, self.group.size())
        if rest:
            size = self.group.size()
            raise ConfigError(
                f"a sequence of {length} tokens cannot be divided over strategy.tensor={size} ranks. Use sequences "
                f"with a multiple of {size} tokens, or set {self.key}=false."
            )
        return own


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
            f"strategy.sequence_parallel=true divides the inputs of blocks, but {type(recipe).__name__} does not "
            "define Recipe.blocks. Define Recipe.blocks, or set strategy.sequence_parallel=false."
        )
    return blocks


@final
@dataclass(frozen=True)
class _DividedInput:
    """Divides the tokens of the first floating-point tensor in a block's arguments."""

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

    def _divide(self, hidden: Tensor) -> Tensor:
        is_whole = not torch.is_grad_enabled() and not self.split.can_divide(hidden)  # any length may be evaluated
        return hidden if is_whole or isinstance(hidden, TokenShard) else self.split.cut(hidden)


@final
class TokenShard(Tensor):
    """This rank's tokens of a tensor, with the shape of the whole tensor.

    The shape is (batch, time, ...), or (batch * time, ...) if flat. The autograd graph belongs to ``own``, not to the
    shard itself.

    Attributes:
        own: The tokens of this rank, (batch, time / ranks, ...), contiguous.
        token_split: The division of tokens.
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
        if own.requires_grad and not torch.compiler.is_compiling():
            with DisableTorchFunctionSubclass():
                made.register_hook(partial(_refuse_gradient, split.key))
        return made  # type: ignore[no-any-return]

    def gather_all(self) -> Tensor:
        """Return the whole tensor; the gradient of this rank's tokens must be complete on this rank."""
        (whole,) = self.gather_copies(1)
        return whole

    def gather_copies(self, count: int) -> list[Tensor]:
        """Return the whole tensor ``count`` times, with separate gradients."""
        wholes: Any = _CopyOfTokens.apply(self.token_split, *[self.own] * count)
        return [whole.flatten(0, 1) if self.is_flat else whole for whole in wholes]

    def take_own(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens of ``whole``, a plain tensor with the same batch and tokens."""
        return self.token_split.take_own(whole.reshape(len(self.own), -1, *whole.shape[1:]) if self.is_flat else whole)

    @staticmethod
    def exchange(parts: Tensor, split: TokenSplit) -> TokenShard:
        """Return this rank's tokens with all features, from (batch, time, features / ranks)."""
        return TokenShard(_MovedTokens.apply(split.exchange, split.exchange_back, parts), split)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (first, *_) = find_tensors((args, kwargs or {}), TokenShard)
        raise _create_refusal(str(func), first.token_split.key)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TokenShard({self.own})"


def _unflatten(parts: Iterable[Any], context: tuple[TokenSplit, bool]) -> TokenShard:
    split, is_flat = context
    (own,) = parts
    if not isinstance(own, Tensor):
        raise _create_refusal("a transform such as torch.vmap", split.key)
    return TokenShard(own, split, is_flat=is_flat)


register_pytree_node(  # FSDP and activation checkpointing look for tensors in arguments
    TokenShard, lambda shard: ([shard.own], (shard.token_split, shard.is_flat)), _unflatten
)


def _gather_arguments(func: Callable[..., Any], arguments: Any) -> Any:
    """Return ``arguments`` of ``func`` with whole tensors instead of shards.

    A shard that occurs several times is gathered once. Its gradients are added one by one, as in one process.
    """
    shards, copies = list(find_tensors(arguments, TokenShard)), dict[int, list[Tensor]]()
    for shard in shards:
        if id(shard) not in copies:
            uses = sum(each is shard for each in shards)
            copies[id(shard)] = shard.gather_copies(1 if func in _COMPARING else uses)

    def take(shard: TokenShard) -> Tensor:
        left = copies[id(shard)]
        return left[0] if func in _COMPARING else left.pop(0)

    return tree_map_only(TokenShard, take, arguments, is_leaf=lambda node: isinstance(node, TokenShard))


def _create_refusal(what: str, key: str) -> ConfigError:
    return ConfigError(
        f"the model calls {what} on a tensor whose tokens are divided over ranks, which is not supported. Set "
        f"{key}=false."
    )


def _refuse_gradient(key: str, _: Tensor) -> None:
    """Raise ConfigError: the gradient would not reach ``TokenShard.own``."""
    raise _create_refusal("a custom autograd function, or registers a backward hook of a module,", key)


def _refuse_second_gradient() -> None:
    """Raise ConfigError in a backward pass with ``create_graph=True`` (double backward)."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "double backward (create_graph=True) is not supported if tokens are divided over ranks. Set "
            "strategy.sequence_parallel=false and strategy.loss_parallel=false."
        )


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` on this rank's tokens if it computes each independently.

    Otherwise, call it on whole tensors.

    Raises:
        ConfigError: the call would change a whole tensor in place, or needs the gradient of a shard.
    """
    with DisableTorchFunctionSubclass():
        if func in _METADATA:
            return func(*args, **kwargs)
        shards = list(find_tensors((args, kwargs), TokenShard))
        key = shards[0].token_split.key
        if any(shard.grad_fn is not None for shard in shards):
            _refuse_gradient(key, shards[0])
    if func in _REFUSED or kwargs.get("out") is not None:
        raise _create_refusal(getattr(func, "__name__", str(func)), key)
    handler = _HANDLERS.get(func)
    result = _TokenCall(func, args, kwargs).run() if handler is None else handler(*args, **kwargs)
    if result is not NotImplemented:
        return result
    if writes_in_place(func) or kwargs.get("inplace"):
        raise _create_refusal(getattr(func, "__name__", str(func)), key)
    whole_args, whole_kwargs = _gather_arguments(func, (args, kwargs))
    return func(*whole_args, **whole_kwargs)


@final
class _TokenCall:
    """A call of ``func`` with shards, which may compute each token independently.

    It keeps no tensors for the backward pass.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        self._func, self._names, self._count = func, list(kwargs), len(args)
        self._values = [None if isinstance(each, Tensor) else each for each in given]
        self._places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]
        self._tensors: list[Tensor] = [given[place] for place in self._places]

    def call(self, tensors: Iterable[Tensor]) -> Tensor:
        """Call the function with ``tensors`` in place of its own."""
        values = list(self._values)
        for place, each in zip(self._places, tensors, strict=True):
            values[place] = each
        result: Tensor = self._func(
            *values[: self._count], **dict(zip(self._names, values[self._count :], strict=True))
        )
        return result

    def run(self) -> Any:
        """Return a shard of the result, or NotImplemented if the function needs whole tensors."""
        tensors, self._tensors = self._tensors, []
        shards = [each for each in tensors if isinstance(each, TokenShard)]
        if (
            self._func not in _BY_TOKEN
            or not shards
            or len({(each.is_flat, each.own.shape[:_TOKEN_DIMS]) for each in shards}) > 1
        ):
            return NotImplemented
        like = shards[0]
        if not self._is_by_token(tensors, like):
            return NotImplemented
        split = like.token_split
        aligned = [split.cut(each) if _has_all_tokens(each, like) else each for each in tensors]
        is_own = [isinstance(each, TokenShard) for each in aligned]
        is_shared = [torch.is_grad_enabled() and each.requires_grad for each in aligned]
        is_shared = [shared and not own for shared, own in zip(is_shared, is_own, strict=True)]
        pairs = zip(aligned, is_shared, strict=True)
        result = self.call(self._take_own(each, like, is_shared=shared) for each, shared in pairs)
        if split.is_ordered and any(is_shared):
            inputs = [each.own.detach() if isinstance(each, TokenShard) else each for each in aligned]
            result = _FromWhole.apply(split, self, is_own, is_shared, result, *inputs)
        return TokenShard(result, split, is_flat=like.is_flat)

    def _take_own(self, tensor: Tensor, like: TokenShard, *, is_shared: bool) -> Tensor:
        """Return this rank's tokens, or a shared tensor.

        Unless sums are ordered, the gradient of a shared tensor is summed over ranks.
        """
        if isinstance(tensor, TokenShard):
            return tensor.own
        split, from_end = like.token_split, like.own.ndim - 1  # whole.shape[-from_end] is the time
        if is_shared:
            tensor = tensor.detach() if split.is_ordered else _MovedTokens.apply(_view, split.sum_gradient, tensor)
        has_tokens = tensor.ndim >= from_end and tensor.shape[-from_end] == like.own.shape[1] * split.group.size()
        return split.take_own(tensor, tensor.ndim - from_end) if has_tokens else tensor

    def _is_by_token(self, tensors: Sequence[Tensor], like: TokenShard) -> bool:
        """Return whether tokens are computed independently, with the bits of whole tensors."""
        func, others = self._func, [each for each in tensors if not isinstance(each, TokenShard)]
        if like.is_flat and len(tensors) > 1:
            return False
        if any(each.ndim > 1 and not each.is_contiguous() for each in others):
            return False  # on whole tensors, the result would have different strides, and later sums a different order
        features = like.own.ndim - _TOKEN_DIMS
        is_first = isinstance(tensors[0], TokenShard) and self._places[0] == 0
        if func in _NORMS:
            shape = self._get_argument(1, "normalized_shape")
            return is_first and isinstance(shape, Sequence) and 0 < len(shape) <= features
        if func in _MEANS:  # over the features
            dims = self._get_argument(1, "dim")
            last = dims[0] if isinstance(dims, tuple | list) and len(dims) == 1 else dims
            return features > 0 and (last == -1 or (last == like.ndim - 1 and not like.is_flat))
        if func in _POWERS:
            return is_first and len(tensors) == 1 and self._get_argument(1, "exponent") == 2
        if like.dtype in (torch.bfloat16, torch.float16) and (func in _ROOTS or "alpha" in self._names):
            return False  # in half precision, vector and scalar instructions round differently
        if func in _IN_PLACE:  # the gradient of a shared tensor may need what the call overwrites
            return is_first and not any(each.requires_grad and not _has_all_tokens(each, like) for each in others)
        most = max(each.ndim for each in tensors)
        return all(each.ndim == most for each in tensors if isinstance(each, TokenShard))

    def _get_argument(self, place: int, name: str) -> Any:
        if place < self._count:
            return self._values[place]
        return self._values[self._count + self._names.index(name)] if name in self._names else None


def _has_all_tokens(tensor: Tensor, like: TokenShard) -> bool:
    """Return whether a plain tensor can be cut: it has the batch and tokens of ``like``."""
    is_plain = not isinstance(tensor, TokenShard) and not like.is_flat
    return is_plain and tensor.ndim == like.own.ndim and tensor.shape[:_TOKEN_DIMS] == like.shape[:_TOKEN_DIMS]


def _convert(func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Convert ``tensor`` to a dtype or device, given directly or by a second tensor."""
    others = [each.own if isinstance(each, TokenShard) else each for each in args]
    named = {name: each.own if isinstance(each, TokenShard) else each for name, each in kwargs.items()}
    if not isinstance(tensor, TokenShard):
        return func(tensor, *others, **named)
    return TokenShard(func(tensor.own, *others, **named), tensor.token_split, is_flat=tensor.is_flat)


def _drop(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Apply dropout with the numbers that one process would draw for all tokens."""
    if not training or p == 0.0:
        return input
    with torch.no_grad():
        own = input.take_own(F.dropout(torch.ones(input.shape, dtype=input.dtype, device=input.device), p))
    dropped = input.own.mul_(own) if inplace else input.own * own
    return TokenShard(dropped, input.token_split, is_flat=input.is_flat)


def _reshape(func: Callable[..., Tensor], input: Any, *args: Any, **kwargs: Any) -> Any:
    """Merge batch and time; return NotImplemented for other shapes or dtypes."""
    viewed = func(torch.empty(input.shape, dtype=input.dtype, device="meta"), *args, **kwargs)
    flat = (len(input.own) * input.own.shape[1] * input.token_split.group.size(), *input.own.shape[_TOKEN_DIMS:])
    is_merged = viewed.shape == flat and viewed.dtype == input.dtype
    return TokenShard(input.own, input.token_split, is_flat=True) if is_merged else NotImplemented


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
    """Compute this rank's cross entropy by token; sum all tokens in one process's order."""
    is_usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not (is_usual and isinstance(input, TokenShard) and input.is_flat and input.ndim == 2 and target.ndim == 1):
        return NotImplemented
    own = input.take_own(target).flatten()
    losses = F.cross_entropy(input.own.flatten(0, 1), own, ignore_index=ignore_index, reduction="none")
    whole = TokenShard(losses.view(len(input.own), -1), input.token_split).gather_all().flatten()
    if reduction == "none":
        return whole
    classes = torch.where(target == ignore_index, -100, 0)  # one class: the loss is its negative score
    return F.nll_loss(-whole[:, None], classes, reduction=reduction)


def _register_hook(shard: TokenShard, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a gradient hook; FSDP's hooks, which only await it, get this rank's tokens."""
    register: Any = shard.own.register_hook
    if str(getattr(hook, "__module__", "")).startswith("torch.distributed"):
        return register(hook)
    split, is_flat, shape = shard.token_split, shard.is_flat, shard.own.shape

    def call_with_whole(gradient: Tensor) -> Tensor | None:
        whole = split.gather(gradient)
        changed = hook(whole.flatten(0, 1) if is_flat else whole)
        return None if changed is None else split.take_own(changed.reshape(shape[0], -1, *shape[_TOKEN_DIMS:]))

    return register(call_with_whole)


class _MovedTokens(torch.autograd.Function):
    """Calls ``move`` with a tensor, and ``move_back`` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, move: Callable[[Tensor], Tensor], move_back: Callable[[Tensor], Tensor], tensor: Tensor
    ) -> Tensor:
        ctx.move_back = move_back
        return move(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        _refuse_second_gradient()
        return None, None, ctx.move_back(gradients[0])


def _view(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


class _CopyOfTokens(torch.autograd.Function):
    """Gathers tokens once, and returns one copy per argument.

    The backward pass takes this rank's part of each gradient. The copies are views, so that autograd refuses to change
    a copy, or a view of it, in place.
    """

    @staticmethod
    def forward(ctx: Any, split: TokenSplit, *owns: Tensor) -> tuple[Tensor, ...]:
        ctx.split = split
        ctx.set_materialize_grads(False)
        whole = split.gather(owns[0])
        return tuple(whole.view_as(whole) for _ in owns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_gradient()
        split: TokenSplit = ctx.split
        for each in gradients:
            if split.is_ordered and each is not None and _is_transposed(each):
                raise ConfigError(
                    "a tensor whose tokens are divided over ranks is transposed, so its gradient has different "
                    "strides, and sums over tokens would be computed in a different order than in a single process. "
                    f"Transpose the output of a layer instead, or set {split.key}=false."
                )
        return None, *(None if each is None else split.take_own(each) for each in gradients)


def _is_transposed(tensor: Tensor) -> bool:
    """Return whether dimensions have a different order in memory than in the shape."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride > 0]
    return strides != sorted(strides, reverse=True)


class _FromWhole(torch.autograd.Function):
    """Returns ``result``, computed from this rank's tokens.

    The backward pass recomputes it from all tokens. Gradients of shared tensors are sums over tokens, which thus have
    the bits of one process. ``is_own``: whether an argument is this rank's part of a tensor. ``is_shared``: whether it
    is a shared tensor that needs a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        split: TokenSplit,
        call: _TokenCall,
        is_own: Sequence[bool],
        is_shared: Sequence[bool],
        result: Tensor,
        *arguments: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*arguments)
        ctx.split, ctx.call, ctx.is_own, ctx.is_shared = split, call, is_own, is_shared
        device = result.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.mark_dirty(result)  # returned itself, not as a view, so that the model may change it in place
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
            result = ctx.call.call(wholes)
        shared = [each for each in wholes if each.requires_grad]
        found = iter(torch.autograd.grad(result, shared, split.gather(gradients[0])))
        return None, None, None, None, gradients[0], *(next(found) if each else None for each in ctx.is_shared)


_METADATA = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")),
        *(
            getattr(Tensor, name).__get__
            for name in ("is_leaf", "grad_fn", "is_sparse", "is_cuda", "is_cpu", "is_meta")
        ),
        *(getattr(Tensor, name).__get__ for name in ("is_quantized", "is_nested", "itemsize", "nbytes", "_base")),
        *(Tensor.size, Tensor.dim, Tensor.numel, torch.numel, Tensor.nelement, Tensor.__len__, Tensor.element_size),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.is_tensor),
        *(Tensor.get_device, Tensor.is_contiguous, Tensor.__hash__),
    )
)
_COMPARING = frozenset((F.multi_head_attention_forward,))  # it compares its arguments by identity
_CONVERSIONS = (Tensor.to, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)
_RESHAPING = (torch.flatten, Tensor.flatten, Tensor.view, torch.reshape, Tensor.reshape)
_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    F.dropout: _drop,
    F.cross_entropy: _compute_cross_entropy,
    Tensor.register_hook: _register_hook,
    **{func: partial(_convert, func) for func in _CONVERSIONS},
    **{func: partial(_reshape, func) for func in _RESHAPING},
}
_REFUSED = frozenset(
    (
        *(Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.backward, torch.autograd.grad),
        *(Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
    )
)
_IN_PLACE = frozenset(
    (
        *(Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_),
        *(Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__),
    )
)
_POWERS = frozenset((torch.pow, Tensor.pow, Tensor.__pow__))
_ROOTS = frozenset((torch.rsqrt, Tensor.rsqrt))
_MEANS = frozenset((torch.mean, Tensor.mean))
_NORMS = frozenset((F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm))
_ELEMENTWISE = frozenset(  # vector and scalar instructions round these equally, unlike exp, for example
    (
        *(getattr(kind, name) for kind in (torch, Tensor) for name in ("add", "sub", "mul", "div", "neg", "square")),
        *(getattr(Tensor, f"__{name}__") for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg")),
        *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.sqrt, Tensor.sqrt, *_ROOTS),
    )
)
_BY_TOKEN = _ELEMENTWISE | _IN_PLACE | _POWERS | _MEANS | _NORMS
