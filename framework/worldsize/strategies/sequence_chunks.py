"""Context parallelism: sequences are cut into chunks, with the same bits at each ``strategy.context``.

All chunks have the same length. Operations of the model run on one chunk at a time. Only attention combines tokens
(:mod:`worldsize.strategies.chunk_attention`). With ``logical_context=C``, each of C chunks is computed separately on
any rank, and gradients of weights are summed over chunks in one fixed tree; the results have the same bits at each
number of ranks that divides C. Otherwise, a rank computes all its tokens at once, and gradients are summed as over
data-parallel ranks.

Under a causal mask, the last chunk attends to C times as many keys as the first. A rank therefore holds chunks from
both ends: consecutive elements of the tree's order 0, C-1, 1, C-2, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from worldsize.collectives.group import start_collective
from worldsize.collectives.slice_sums import scatter_slices, sum_slices
from worldsize.core import ConfigError, FeatureRecipe, Loss, LossOutput, MicroBatch, Recipe
from worldsize.strategies.chunk_tensor import Chunks

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
        """Number of summed values."""
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


def check_sequences(recipe: Recipe, model: nn.Module, chunks: int, *, key: str) -> None:
    """Raise ConfigError unless ``recipe`` supports sequences in ``chunks``; ``key`` determines their number."""
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


class _ChunkSum(torch.autograd.Function):
    """Sums a value over the chunks of all ranks; each chunk gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, layout: ChunkLayout, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return layout.reduce_parts(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients * ctx.count


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
