"""Sequences that are cut into chunks, for context parallelism and for the same bits at each ``strategy.context``.

A sequence is cut into a fixed number of chunks of equal length. Every operation of the model runs on a chunk at a time,
except attention, which is the only one that combines tokens (:mod:`worldsize.strategies.chunk_attention`). With
``logical_context=C``, each of C chunks has computations of its own, wherever they run, and gradients of weights are
summed over chunks in one fixed tree; the results have the same bits at each number of ranks that divides C. Otherwise,
a rank computes all its tokens at once, and the strategy sums gradients as over data-parallel ranks.

Under a causal mask, the last chunk attends to C times as many keys as the first. A rank therefore holds chunks from
both ends: the order of the tree is 0, C-1, 1, C-2, ..., of which a rank has consecutive elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

from worldsize.collectives.group import start_collective
from worldsize.collectives.slice_sums import scatter_slices, sum_slices
from worldsize.core import ConfigError, FeatureRecipe, Loss, LossOutput, MicroBatch, Recipe
from worldsize.seeds import get_generator_state, set_generator_state

_Metrics = Mapping[str, tuple[Tensor | float, ...]]


@final
@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """The chunks of each sequence that this rank computes.

    Attributes:
        chunks: Number of chunks, a power of two.
        size: Number of ranks that share a sequence.
        rank: This rank among them.
        group: These ranks; None if there is only one.
        is_ordered: Whether each chunk is computed by itself, with sums in the fixed tree. Otherwise, this rank's chunks
            are one tensor.
        is_complete: Whether gradients, losses and metrics are summed over the ranks. Otherwise, they are those of this
            rank's tokens, and the strategy sums them as over data-parallel ranks.
    """

    chunks: int
    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None
    is_ordered: bool = True
    is_complete: bool = True

    @cached_property
    def order(self) -> Sequence[int]:
        """All chunks in the order of the tree; each rank has as many consecutive ones."""
        return [place // 2 if place % 2 == 0 else self.chunks - 1 - place // 2 for place in range(self.chunks)]

    @property
    def held(self) -> int:
        """Number of chunks of this rank."""
        return self.chunks // self.size

    @cached_property
    def parts(self) -> Sequence[Sequence[int]]:
        """The chunks in each tensor of this rank."""
        own = self.order[self.rank * self.held : (self.rank + 1) * self.held]
        return [[place] for place in own] if self.is_ordered else [sorted(own)]

    def cut(self, whole: Tensor, dim: int) -> Chunks:
        """Return this rank's chunks of ``whole`` along ``dim``.

        Raises:
            ConfigError: the length is not divisible by the number of chunks.
        """
        length = whole.shape[dim]
        if length % self.chunks:
            raise _create_length_error(length, self.chunks, self.name_key())
        pieces = whole.chunk(self.chunks, dim)
        return Chunks([torch.cat([pieces[place] for place in part], dim) for part in self.parts], self)

    def name_key(self) -> str:
        """Return the name of the key that determines the number of chunks."""
        return "logical_context" if self.is_ordered else "strategy.context"

    def wrap(self, joined: Tensor, dim: int) -> Chunks:
        """Return the chunks in the result of :meth:`Chunks.join`."""
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
        """Return this rank's parts of the sum of ``wholes``, one for each part of each rank."""
        rows = (
            torch.stack([pieces[place] for place in self._gathered_order])
            for pieces in (each.chunk(self.chunks, dim) for each in wholes)
        )
        own = scatter_slices(rows, len(self.parts), self.group)
        return [torch.cat(part.unbind(), dim) for part in torch.split(own, self.chunks_per_part)]

    @property
    def chunks_per_part(self) -> int:
        """Number of chunks in each tensor of this rank."""
        return 1 if self.is_ordered else self.held

    @cached_property
    def _gathered_order(self) -> Sequence[int]:
        if self.is_ordered:
            return self.order
        ranks = range(self.size)
        return [place for rank in ranks for place in sorted(self.order[rank * self.held : (rank + 1) * self.held])]

    def reduce_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of ``parts``, one for each tensor of this rank; if complete, over all ranks."""
        group = self.group if self.is_complete else None
        return sum_slices(parts, len(parts), group, is_ordered=self.is_ordered)

    @property
    def _all_parts(self) -> int:
        """Number of parts of which values are summed."""
        return len(self.parts) * (self.size if self.is_complete else 1)

    def compute_loss(self, recipe: Recipe, model: Any, batch: MicroBatch) -> Loss:
        """Return the loss of a micro-batch from that of each chunk."""
        data = recipe.cut_sequences(batch.data, self.cut)
        own = recipe.micro_batch_loss(model, MicroBatch(data, batch.seed, batch.step, batch.logical_rank))
        output = LossOutput.from_loss(own)
        metrics = {name: self._sum_pair(pair) for name, pair in output.metrics.items()}
        if isinstance(output.loss, tuple):
            total, weight = output.loss
            loss: Any = (self._sum_value(total), self._sum_value(weight))
        elif isinstance(output.loss, Chunks):
            loss = self._sum_value(output.loss) / self._all_parts
        else:
            loss = output.loss
        return LossOutput(loss, metrics) if metrics else loss

    def evaluate(self, recipe: Recipe, model: Any, data: Any) -> _Metrics:
        """Return the metrics of a batch from those of each chunk."""
        found = recipe.evaluate(model, recipe.cut_sequences(data, self.cut))
        return {name: self._sum_pair(pair) for name, pair in found.items()}

    def _sum_pair(self, pair: Sequence[Any]) -> Any:
        return tuple(self._sum_value(value) for value in pair)

    def _sum_value(self, value: Any) -> Any:
        if isinstance(value, Chunks):
            return value.parts[0] if self._all_parts == 1 else _Sum.apply(self, *value.parts)
        return value * self._all_parts  # the same number for each part


def check_sequences(recipe: Recipe, model: nn.Module, chunks: int, *, key: str) -> None:
    """Raise ConfigError unless ``recipe`` can be trained with sequences in ``chunks``, which ``key`` determines."""
    kind = type(recipe).__name__
    if type(recipe).cut_sequences is Recipe.cut_sequences:
        raise ConfigError(f"{kind} does not cut its sequences. Define Recipe.cut_sequences, or set {key}=1.")
    unsupported = {
        "has several updates per step": recipe.has_several_updates,
        "computes features of all logical ranks (FeatureRecipe)": isinstance(recipe, FeatureRecipe),
        "has metrics that are not a ratio of sums (Recipe.metrics)": bool(recipe.metrics()),
        "has buffers that its loss modifies (Recipe.buffers)": bool(recipe.buffers(model)),
    }
    for fact in (fact for fact, is_so in unsupported.items() if is_so):
        raise ConfigError(f"{kind} {fact}, which is not supported with sequences in chunks. Set {key}=1.")
    if (tokens := recipe.tokens_per_sample()) and tokens % chunks:
        raise _create_length_error(tokens, chunks, key)


def _create_length_error(tokens: int, chunks: int, key: str) -> ConfigError:
    return ConfigError(
        f"a sequence of {tokens} tokens cannot be cut into {chunks} chunks of equal length. Use sequences with a "
        f"multiple of {chunks} tokens, or set {key} to a smaller number."
    )


@final
class Chunks(Tensor):
    """The chunks of a tensor on this rank, on which operations run one by one.

    It has the shape of one part, and can be used like it. ``parts``: the tensors, as listed by ``chunk_layout.parts``.
    """

    parts: Sequence[Tensor]
    chunk_layout: ChunkLayout

    def __new__(cls, parts: Sequence[Tensor], layout: ChunkLayout) -> Chunks:
        first = parts[0]
        made: Any = Tensor._make_wrapper_subclass(
            cls, first.shape, dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )
        made.parts, made.chunk_layout = parts, layout
        return made  # type: ignore[no-any-return]

    def join(self, dim: int) -> Tensor:
        """Return the chunks of this rank as one tensor, for messages between stages."""
        return torch.cat(list(self.parts), dim)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        layout = next(_find_chunks((args, kwargs))).chunk_layout
        if handler := _HANDLERS.get(func):
            return handler(layout, *args, **(kwargs or {}))
        if func in _DRAWING:
            return _draw_by_part(layout, func, args, kwargs or {})
        return _call_by_part(layout, func, args, kwargs or {})

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


def _find_chunks(node: Any) -> Iterator[Chunks]:
    if isinstance(node, Chunks):
        yield node
    elif isinstance(node, tuple | list):
        for each in node:
            yield from _find_chunks(each)
    elif isinstance(node, Mapping):
        for each in node.values():
            yield from _find_chunks(each)


def _call_by_part(layout: ChunkLayout, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``func`` for each part; a result without tensors must be the same for each chunk, such as a shape."""
    count = len(layout.parts)
    first_args, *other_args = _select_parts(args, count, layout)
    first_kwargs, *other_kwargs = _select_parts(kwargs, count, layout)
    first = func(*first_args, **first_kwargs)
    if first is not None and not _has_tensor(first):
        return first
    others = [func(*each, **named) for each, named in zip(other_args, other_kwargs, strict=True)]
    return _join_results([first, *others], layout)


def _select_parts(node: Any, count: int, layout: ChunkLayout) -> list[Any]:
    """Return ``node`` for each part; tensors without chunks are shared, with gradients summed over chunks."""
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
    """Raise ConfigError if a custom autograd function returned ``chunks``, of which it differentiates no part."""
    with torch._C.DisableTorchFunctionSubclass():
        if chunks.grad_fn is not None:
            raise _create_function_error("a custom autograd function")


def _create_function_error(what: str) -> ConfigError:
    return ConfigError(
        f"{what} was called on a sequence that is cut into chunks, which is not supported. Set strategy.context=1 and "
        "logical_context=1."
    )


def _has_tensor(node: Any) -> bool:
    return isinstance(node, Tensor) or (isinstance(node, tuple | list) and any(map(_has_tensor, node)))


def _join_results(results: Sequence[Any], layout: ChunkLayout) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        return Chunks(results, layout)
    if isinstance(first, tuple | list):
        joined = [_join_results(column, layout) for column in zip(*results, strict=True)]
        return first._make(joined) if hasattr(first, "_make") else type(first)(joined)
    return first


def _draw_by_part(layout: ChunkLayout, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``func`` for each part with a random stream of its own, derived from one number of the current stream."""
    device = next(_find_chunks((args, kwargs))).parts[0].device
    seed = int(torch.randint(2**62, (), device="cpu"))
    state, count = get_generator_state(device), len(layout.parts)
    results = []
    try:
        pairs = zip(_select_parts(args, count, layout), _select_parts(kwargs, count, layout), strict=True)
        for (place, *_), (own, named) in zip(layout.parts, pairs, strict=True):
            _seed_generator(seed + place, device)
            results.append(func(*own, **named))
    finally:
        set_generator_state(state, device)
    return _join_results(results, layout)


def call_by_part(function: Callable[..., Any], inputs: Tensor, *weights: Tensor | None) -> Any:
    """Call ``function`` with ``inputs`` and ``weights``: once, or if inputs are chunks, once for each part."""
    if isinstance(inputs, Chunks):
        return _call_by_part(inputs.chunk_layout, function, (inputs, *weights), {})
    return function(inputs, *weights)


class _Share(torch.autograd.Function):
    """Gives each part its own use of a tensor, so that gradients are summed in the tree, over all ranks."""

    @staticmethod
    def forward(ctx: Any, layout: ChunkLayout, shared: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return tuple(shared.view_as(shared) for _ in layout.parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        layout: ChunkLayout = ctx.layout
        refuse_second_gradient(layout)
        return None, layout.reduce_parts(gradients)


class _Sum(torch.autograd.Function):
    """Sums a value over the chunks of all ranks; each chunk gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, layout: ChunkLayout, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return layout.reduce_parts(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients * ctx.count


def refuse_second_gradient(layout: ChunkLayout) -> None:
    """Raise ConfigError in a backward pass that is differentiated again."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "a gradient over a sequence in chunks is differentiated again (create_graph=True), which is not "
            f"supported. Set {layout.name_key()}=1."
        )


def sequence_positions(tokens: Tensor, dim: int = 1) -> Tensor:
    """Return the positions of ``tokens`` along dimension ``dim`` in their sequence, int64 (time,), counted from 0.

    Use it for rotary or learned position embeddings, instead of ``torch.arange``, so that the model can be trained with
    ``strategy.context`` or ``logical_context``, where a process computes chunks of a sequence.
    """
    if not isinstance(tokens, Chunks):
        return torch.arange(tokens.shape[dim], device=tokens.device)
    layout = tokens.chunk_layout
    length = tokens.parts[0].shape[dim] // layout.chunks_per_part
    own = torch.arange(length, device=tokens.device)
    return Chunks([torch.cat([own + place * length for place in part]) for part in layout.parts], layout)


def gather_sequence(tokens: Tensor, dim: int = 1) -> Tensor:
    """Return the whole sequences of ``tokens`` along dimension ``dim``, without gradients, on each process."""
    if not isinstance(tokens, Chunks):
        return tokens
    return tokens.chunk_layout.gather([part.detach() for part in tokens.parts], dim)


def document_mask(documents_bt: Tensor) -> Tensor:
    """Return the causal mask within documents, bool (batch, 1, time, keys), for ``scaled_dot_product_attention``.

    ``documents_bt``: the number of each token's document, (batch, time). The mask has a row for each of its tokens, and
    a column for each token of the whole sequence.
    """
    whole_bk = gather_sequence(documents_bt)
    rows_t = sequence_positions(documents_bt)
    is_past_tk = rows_t[:, None] >= torch.arange(whole_bk.shape[1], device=whole_bk.device)
    same_btk = documents_bt[:, :, None] == whole_bk[:, None, :]
    return (same_btk & is_past_tk)[:, None]


def _seed_generator(seed: int, device: torch.device) -> None:
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    from worldsize.strategies.chunk_attention import attend_by_chunk  # which imports this module

    return attend_by_chunk(*args, **kwargs)


def _iterate(_: ChunkLayout, chunks: Tensor) -> Iterator[Tensor]:
    return iter(torch.unbind(chunks, 0))


def _refuse(why: str) -> Callable[..., Any]:
    def refuse(layout: ChunkLayout, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"the model {why} of sequences that are cut into chunks. Set {layout.name_key()}=1.")

    return refuse


_READS_VALUES = (
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist, Tensor.numpy),
    *(Tensor.__array__, Tensor.__contains__, torch.equal, torch.allclose, Tensor.equal, Tensor.allclose),
)
_COMBINES_TOKENS = (
    *(F.multi_head_attention_forward, F.batch_norm, F.instance_norm, F.group_norm, F.conv1d, F.conv2d, F.conv3d),
    *(torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh),
    *(F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d, F.interpolate),
)
_DRAWING = frozenset(
    (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(F.gumbel_softmax, F.rrelu, torch.dropout, torch.bernoulli, torch.multinomial, torch.normal, torch.poisson),
        *(
            torch.rand_like,
            torch.randn_like,
            torch.randint_like,
            Tensor.bernoulli,
            Tensor.bernoulli_,
            Tensor.multinomial,
        ),
        *(Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_, Tensor.geometric_, Tensor.cauchy_),
    )
)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attend,
    Tensor.__iter__: _iterate,
    **dict.fromkeys(_READS_VALUES, _refuse("reads values")),
    **dict.fromkeys(_COMBINES_TOKENS, _refuse("combines the tokens, other than by scaled_dot_product_attention,")),
}
