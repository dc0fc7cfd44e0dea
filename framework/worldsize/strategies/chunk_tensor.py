"""Context parallelism over chunks of sequences.

Results can have the same bits at every ``strategy.context``. All chunks have the same length. Operations of the model
run on one chunk at a time. Only attention combines tokens (:mod:`worldsize.strategies.chunk_attention`). With
``logical_context=C``, each of C chunks is computed separately on any rank, and gradients of weights are summed over
chunks in one fixed tree; the results have the same bits at each number of ranks that divides C. Otherwise, a rank
computes all its tokens at once, and gradients are summed as over data-parallel ranks.

Under a causal mask, the last chunk attends to C times as many keys as the first. A rank therefore holds chunks from
both ends: consecutive elements of the tree's order 0, C-1, 1, C-2, ...

The model runs unchanged: each operation sees chunks instead of whole sequences. Operations whose result would
depend on the division of chunks over ranks are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node
from torch.utils.hooks import RemovableHandle

from worldsize.collectives.group import start_collective
from worldsize.collectives.slice_sums import scatter_slices, sum_slices
from worldsize.core import ConfigError, Loss, LossOutput, MicroBatch, Recipe
from worldsize.seeds import get_generator_state, set_generator_state

_Metrics = Mapping[str, tuple[Tensor | float, ...]]
_T = TypeVar("_T", bound=Tensor)


@final
@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """The chunks of each sequence that this rank computes.

    Attributes:
        chunks: Number of chunks, a power of two.
        size: Number of ranks that share a sequence.
        rank: Index of this rank among them.
        group: Their process group; None if there is only one.
        is_ordered: Whether each chunk is computed by itself, with sums in the fixed tree. Otherwise, this rank's chunks
            are one tensor.
        is_complete: Whether gradients, losses and metrics are summed over the ranks. Otherwise, they cover only this
            rank's tokens, and the strategy sums them as over data-parallel ranks.
    """

    chunks: int
    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None
    is_ordered: bool = True
    is_complete: bool = True

    @cached_property
    def parts(self) -> Sequence[Sequence[int]]:
        """Indices of the chunks in each tensor of this rank."""
        return self._list_parts(self.rank)

    def _list_parts(self, rank: int) -> Sequence[Sequence[int]]:
        """Return the chunks in each tensor of ``rank``; ranks hold equal runs in tree order."""
        held = self.chunks // self.size
        places = range(rank * held, (rank + 1) * held)
        own = [self.chunks - 1 - place // 2 if place % 2 else place // 2 for place in places]
        return [[place] for place in own] if self.is_ordered else [sorted(own)]

    def cut(self, whole: Tensor, dim: int) -> Chunks:
        """Return this rank's chunks of ``whole`` along ``dim``.

        Raises:
            ConfigError: the length is not divisible by the number of chunks.
        """
        length = whole.shape[dim]
        if length % self.chunks:
            raise create_length_error(length, self.chunks, self.name_key())
        pieces = whole.chunk(self.chunks, dim)
        return Chunks([torch.cat([pieces[place] for place in part], dim) for part in self.parts], self)

    def name_key(self) -> str:
        """Return the name of the key that determines the number of chunks."""
        return "logical_context" if self.is_ordered else "strategy.context"

    def wrap(self, joined: Tensor, dim: int) -> Chunks:
        """Split the result of :meth:`Chunks.join` into chunks again."""
        return Chunks([each.contiguous() for each in joined.chunk(len(self.parts), dim)], self)

    def gather(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return whole sequences from the ``parts`` of all ranks, without gradients."""
        own = torch.stack([piece for part in parts for piece in part.chunk(self.chunks_per_part, dim)])
        gathered = own
        if self.group is not None:
            gathered = own.new_empty(self.size * len(own), *own.shape[1:])
            start_collective(dist.all_gather_into_tensor, gathered, own, group=self.group).wait()
        pieces = dict(zip(self._gathered_order, gathered.unbind(), strict=True))
        return torch.cat([pieces[place] for place in range(self.chunks)], dim)

    def scatter_sum(self, wholes: Iterable[Tensor], dim: int) -> list[Tensor]:
        """Return this rank's parts of the sum of ``wholes``.

        Every part of every rank contributes one tensor.
        """
        rows = (
            torch.stack([pieces[place] for place in self._gathered_order])
            for pieces in (each.chunk(self.chunks, dim) for each in wholes)
        )
        own = scatter_slices(rows, len(self.parts), self.group)
        return [torch.cat(part.unbind(), dim) for part in torch.split(own, self.chunks_per_part)]

    @property
    def chunks_per_part(self) -> int:
        """Number of chunks in each tensor of this rank."""
        return len(self.parts[0])

    @cached_property
    def _gathered_order(self) -> Sequence[int]:
        """Indices of the chunks of all ranks, in rank order."""
        return [place for rank in range(self.size) for part in self._list_parts(rank) for place in part]

    def reduce_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of ``parts`` on this rank, or over all ranks if ``is_complete``."""
        group = self.group if self.is_complete else None
        return sum_slices(parts, len(parts), group, is_ordered=self.is_ordered)

    @property
    def _all_parts(self) -> int:
        """Number of parts that a sum covers: those of this rank, or of all ranks if ``is_complete``."""
        return len(self.parts) * (self.size if self.is_complete else 1)

    def compute_loss(self, recipe: Recipe, model: Any, batch: MicroBatch) -> Loss:
        """Return the loss of a micro-batch, computed in chunks."""
        data = recipe.cut_sequences(batch.data, self.cut)
        return self.sum_loss(recipe.micro_batch_loss(model, replace(batch, data=data)))

    def evaluate(self, recipe: Recipe, model: Any, data: Any) -> _Metrics:
        """Return the metrics of a batch, computed in chunks."""
        return self.sum_metrics(recipe.evaluate(model, recipe.cut_sequences(data, self.cut)))

    def sum_loss(self, own: Loss) -> Loss:
        """Return the loss of whole sequences from the recipe's loss of chunks."""
        output = LossOutput.from_loss(own)
        metrics: Any = self.sum_metrics(output.metrics)
        if isinstance(output.loss, tuple):
            total, weight = output.loss
            loss: Any = (self._sum_value(total), self._sum_value(weight))
        elif isinstance(output.loss, Chunks):
            loss = self._sum_value(output.loss) / self._all_parts
        else:
            loss = output.loss
        return LossOutput(loss, metrics) if metrics else loss

    def sum_metrics(self, own: _Metrics) -> _Metrics:
        """Return the metrics of whole sequences from the recipe's metrics of chunks."""
        return {name: tuple(map(self._sum_value, pair)) for name, pair in own.items()}

    def _sum_value(self, value: Any) -> Any:
        if isinstance(value, Chunks):
            return value.parts[0] if self._all_parts == 1 else _ChunkSum.apply(self, *value.parts)
        return value * self._all_parts  # the same number for each part


def create_length_error(tokens: int, chunks: int, key: str) -> ConfigError:
    """Return the error for a length of ``tokens`` not divisible by ``chunks``.

    ``key``: the configuration key that sets ``chunks``.
    """
    return ConfigError(
        f"a sequence of {tokens} tokens cannot be cut into {chunks} chunks of equal length. Use sequences with a "
        f"multiple of {chunks} tokens, or set {key} to a smaller number."
    )


@final
class Chunks(Tensor):
    """This rank's chunks of a tensor; torch operations run on each part separately.

    The shape is that of one part.

    Attributes:
        parts: The tensors, as listed by ``chunk_layout.parts``.
        chunk_layout: The chunks of this rank.
        is_ragged: Whether the shapes of parts may differ, since they depend on values.
    """

    parts: Sequence[Tensor]
    chunk_layout: ChunkLayout
    is_ragged: bool

    def __new__(cls, parts: Sequence[Tensor], layout: ChunkLayout, *, is_ragged: bool = False) -> Chunks:
        first = parts[0]
        made: Any = Tensor._make_wrapper_subclass(
            cls, first.shape, dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )
        made.parts, made.chunk_layout, made.is_ragged = parts, layout, is_ragged
        return made  # type: ignore[no-any-return]

    def join(self, dim: int) -> Tensor:
        """Return the chunks of this rank as one tensor, for messages between stages."""
        return torch.cat(list(self.parts), dim)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _Call(func, args, kwargs or {}).run()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _create_function_error(str(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Chunks({list(self.parts)})"


register_pytree_node(  # FSDP and activation checkpointing look for tensors in arguments
    Chunks,
    lambda chunks: (list(chunks.parts), chunks.chunk_layout),
    lambda parts, layout: Chunks(list(parts), layout),
)


def call_by_part(function: Callable[..., Any], inputs: Tensor, *weights: Tensor | None) -> Any:
    """Call ``function`` with ``inputs`` and ``weights``, once per part if inputs are chunks."""
    return _Call(function, (inputs, *weights), {}).call() if isinstance(inputs, Chunks) else function(inputs, *weights)


@final
class _Call:
    """A call of ``func`` with chunks among its arguments."""

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._chunks = list(find_tensors((args, kwargs), Chunks))
        self._layout = self._chunks[0].chunk_layout
        self._is_ragged = func in _RAGGED or any(each.is_ragged for each in self._chunks)

    def run(self) -> Any:
        """Return the result: chunks, or a value that is equal for all chunks, such as a shape.

        Raises:
            ConfigError: the result would depend on the chunks of this rank.
        """
        if handler := _HANDLERS.get(self._func):
            return handler(self._layout, *self._args, **self._kwargs)
        self._is_ragged = self._is_ragged or self._selects_by_value()
        if self._is_ragged and self._func in _SHAPES:
            raise self._create_refusal("reads a shape that depends on values")
        self._refuse_write()
        return self._draw() if self._func in _DRAWING else self.call()

    def call(self) -> Any:
        """Call the function for each part."""
        count = len(self._layout.parts)
        args, kwargs = (_select_parts(each, count, self._layout) for each in (self._args, self._kwargs))
        return self._join([self._func(*own, **named) for own, named in zip(args, kwargs, strict=True)])

    def _selects_by_value(self) -> bool:
        """Return whether a mask selects elements, so that the shape of the result depends on values."""
        if self._func in (torch.where, Tensor.where):
            return len(self._args) + len(self._kwargs) == 1
        indices = self._args[1] if self._func is Tensor.__getitem__ else ()
        items = indices if isinstance(indices, tuple) else (indices,)
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in items)

    def _draw(self) -> Any:
        """Call the function for each part with its own stream, seeded from the current one."""
        device, count = self._chunks[0].parts[0].device, len(self._layout.parts)
        seed = int(torch.randint(2**62, (), device="cpu"))
        state, results = get_generator_state(device), []
        args, kwargs = (_select_parts(each, count, self._layout) for each in (self._args, self._kwargs))
        try:
            for (place, *_), own, named in zip(self._layout.parts, args, kwargs, strict=True):
                _seed_generator(seed + place, device)
                results.append(self._func(*own, **named))
        finally:
            set_generator_state(state, device)
        return self._join(results)

    def _join(self, results: Sequence[Any]) -> Any:
        first = results[0]
        if isinstance(first, Tensor):
            return Chunks(results, self._layout, is_ragged=self._is_ragged and first.ndim > 0)
        if isinstance(first, tuple | list) and _has_tensor(first):
            joined = [self._join(column) for column in zip(*results, strict=True)]
            return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
        if isinstance(first, RemovableHandle):
            return _Handles(results)
        if isinstance(first, int | float | tuple) and any(each != first for each in results):
            raise self._create_refusal("reads a shape or a value that differs between chunks")
        return first

    def _refuse_write(self) -> None:
        """Refuse writing chunks into a tensor that is not cut."""
        name = getattr(self._func, "__name__", "")
        targets = [*(self._args[:1] if writes_in_place(self._func) else ()), self._kwargs.get("out")]
        is_alone = len(self._layout.parts) == 1 and not self._layout.is_complete
        if not is_alone and any(isinstance(each, Tensor) and not isinstance(each, Chunks) for each in targets):
            raise ConfigError(
                f"{name} writes chunks of a sequence into a tensor that is not cut into chunks. Create that tensor "
                f"from one in chunks, with torch.zeros_like, or set {self._layout.name_key()}=1."
            )

    def _create_refusal(self, what: str) -> ConfigError:
        name = getattr(self._func, "__name__", str(self._func))
        return ConfigError(
            f"not supported with sequences in chunks: the model {what} ({name}). Set {self._layout.name_key()}=1."
        )


def writes_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a torch function modifies its first argument in place."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def find_tensors(node: Any, kind: type[_T]) -> Iterator[_T]:
    """Iterate over the tensors of a class in tuples, lists and mappings of arguments."""
    if isinstance(node, kind):
        yield node
    elif isinstance(node, tuple | list):
        for each in node:
            yield from find_tensors(each, kind)
    elif isinstance(node, Mapping):
        for each in node.values():
            yield from find_tensors(each, kind)


def _select_parts(node: Any, count: int, layout: ChunkLayout) -> list[Any]:
    """Return ``node`` for each part.

    Chunks are replaced with the part. Other tensors are shared, with gradients summed over parts.
    """
    if isinstance(node, Chunks):
        _check_own(node)
        return list(node.parts)
    if isinstance(node, Tensor):
        if layout.is_complete and node.requires_grad and torch.is_grad_enabled():
            return list(_Share.apply(layout, node))
        return [node] * count
    if type(node) in (tuple, list):
        columns = [_select_parts(each, count, layout) for each in node]
        return [type(node)(column[place] for column in columns) for place in range(count)]
    if isinstance(node, Mapping):
        named = {key: _select_parts(value, count, layout) for key, value in node.items()}
        return [{key: column[place] for key, column in named.items()} for place in range(count)]
    return [node] * count


def _check_own(chunks: Chunks) -> None:
    """Raise ConfigError if a custom autograd function returned ``chunks``.

    Gradients would not reach the parts.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if chunks.grad_fn is not None:
            raise _create_function_error("a custom autograd function")


def _create_function_error(what: str) -> ConfigError:
    return ConfigError(f"{what} is not supported on sequences in chunks. Set strategy.context=1 and logical_context=1.")


def _has_tensor(node: Any) -> bool:
    return isinstance(node, Tensor) or (isinstance(node, tuple | list) and any(map(_has_tensor, node)))


class _ChunkSum(torch.autograd.Function):
    """Sums a value over the chunks of all ranks; each chunk gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, layout: ChunkLayout, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return layout.reduce_parts(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients * ctx.count


class _Share(torch.autograd.Function):
    """Gives each part a view of a tensor, whose gradient is summed in the tree over ranks."""

    @staticmethod
    def forward(ctx: Any, layout: ChunkLayout, shared: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return tuple(shared.view_as(shared) for _ in layout.parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        layout: ChunkLayout = ctx.layout
        _refuse_second_gradient(layout)
        return None, layout.reduce_parts(gradients)


def _refuse_second_gradient(layout: ChunkLayout) -> None:
    """Raise ConfigError in a backward pass with ``create_graph=True`` (double backward)."""
    if torch.is_grad_enabled():
        raise ConfigError(
            f"double backward (create_graph=True) is not supported with sequences in chunks. Set {layout.name_key()}=1."
        )


def _seed_generator(seed: int, device: torch.device) -> None:
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


_attention: list[Callable[..., Tensor]] = []  # one function, set by the module that imports this one


def set_attention(attend: Callable[..., Tensor]) -> None:
    """Set the function that computes ``scaled_dot_product_attention`` of chunks.

    ``attend``: takes the layout of the chunks as its first argument.
    """
    _attention[:] = [attend]


def _call_attention(*args: Any, **kwargs: Any) -> Tensor:
    (attend,) = _attention
    return attend(*args, **kwargs)


def _iterate(_: ChunkLayout, chunks: Tensor) -> Iterator[Tensor]:
    return iter(torch.unbind(chunks, 0))


def _refuse(why: str) -> Callable[..., Any]:
    def refuse(layout: ChunkLayout, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"not supported with sequences in chunks: the model {why}. Set {layout.name_key()}=1.")

    return refuse


def _encode_classes(_: ChunkLayout, tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise ConfigError("torch.nn.functional.one_hot of a sequence in chunks requires num_classes. Pass num_classes.")
    encoded: Tensor = call_by_part(partial(F.one_hot, num_classes=num_classes), tensor)
    return encoded


@final
class _Handles:
    """The handles of a hook on each part."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hook from all parts."""
        for each in self._handles:
            each.remove()


_READS_VALUES = (
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__, Tensor.__contains__),
    *(Tensor.__array__, Tensor.__dlpack__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.item, Tensor.tolist),
    *(Tensor.numpy, Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.allclose, Tensor.equal, Tensor.allclose),
)
_COMBINES_TOKENS = (
    *(F.multi_head_attention_forward, F.batch_norm, F.instance_norm, F.group_norm, F.conv1d, F.conv2d, F.conv3d),
    *(torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.logcumsumexp, Tensor.logcumsumexp),
    *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    *(F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d, F.interpolate, torch.bincount, Tensor.bincount),
)
_RAGGED = frozenset(  # shapes of results depend on values
    (
        *(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select),
        *(torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive),
        *(torch.repeat_interleave, Tensor.repeat_interleave),
    )
)
_SHAPE: Any = Tensor.shape
_SHAPES = frozenset((_SHAPE.__get__, Tensor.size, Tensor.numel, torch.numel, Tensor.nelement, Tensor.__len__))
_WRITING = frozenset(
    (
        "__setitem__",
        *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "and", "or", "xor")),
    )
)
_DRAWING = frozenset(
    (
        *(getattr(F, each) for each in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "rrelu")),
        *(F.feature_alpha_dropout, F.gumbel_softmax, F.fractional_max_pool2d),
        *(getattr(torch, f"{each}{end}") for each in ("dropout", "alpha_dropout", "rrelu") for end in ("", "_")),
        *(getattr(torch, f"feature_{each}{end}") for each in ("dropout", "alpha_dropout") for end in ("", "_")),
        *(getattr(torch, each) for each in ("native_dropout", "bernoulli", "multinomial", "normal", "poisson")),
        *(getattr(torch, each) for each in ("binomial", "_standard_gamma", "_sample_dirichlet")),
        *(getattr(torch, f"{each}_like") for each in ("rand", "randn", "randint")),
        *(getattr(Tensor, each) for each in ("bernoulli", "bernoulli_", "multinomial", "uniform_", "normal_")),
        *(getattr(Tensor, each) for each in ("log_normal_", "exponential_", "random_", "geometric_", "cauchy_")),
    )
)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _call_attention,
    F.one_hot: _encode_classes,
    Tensor.__iter__: _iterate,
    **dict.fromkeys(_READS_VALUES, _refuse("reads values")),
    **dict.fromkeys(_COMBINES_TOKENS, _refuse("combines the tokens (other than with scaled_dot_product_attention)")),
}
