"""Attention over sequences in chunks.

Keys and values are gathered; queries stay on their rank. The queries of a chunk attend to the keys before the chunk
and, under a causal mask, to those in it up to their own positions. These two results are merged by their log-sum-exp
(Dao et al. 2022, arXiv 2205.14135, section 3.1), so no mask is created. Keys and values are gathered again in the
backward pass instead of being kept, as in Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2); a rank keeps
only its own chunks. Their gradients are summed over the chunks of queries in the tree of the layout.

On CPUs, both passes use torch's flash kernels. On other devices, and for masks, the backward pass recomputes the
attention of a chunk, with the kernels that torch selects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from worldsize.core import ConfigError
from worldsize.strategies.chunk_tensor import ChunkLayout, Chunks
from worldsize.strategies.tensor_layers import VECTOR

_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
_flash, _flash_backward = (getattr(torch.ops.aten, name) for name in (_KERNEL, f"{_KERNEL}_backward"))


@final
@dataclass(frozen=True)
class _Options:
    is_causal: bool
    scale: float | None
    masks: Sequence[Tensor | None]  # for each part, broadcastable to (its queries, all keys)

    def uses_flash(self, query: Tensor, value: Tensor) -> bool:
        """Return whether to use torch's flash kernels for CPUs, since they return the log-sum-exp."""
        return self.masks[0] is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def attend_by_chunk(
    layout: ChunkLayout,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``scaled_dot_product_attention`` for sequences in chunks.

    Queries, keys and values are chunks (batch, heads, time, features). A mask needs a column for each token of the
    whole sequence, as from :func:`~worldsize.strategies.sequence_chunks.document_mask`.

    Raises:
        ConfigError: an argument is not supported, such as dropout, a mask over one chunk's keys, or unchunked tensors.
    """
    if dropout_p:
        raise ConfigError(
            f"dropout_p={dropout_p} of scaled_dot_product_attention is not supported for sequences in chunks. Set the "
            f"attention dropout to 0, or {layout.name_key()}=1."
        )
    if not all(isinstance(each, Chunks) and each.ndim == 4 for each in (query, key, value)):
        raise ConfigError(
            "with sequences in chunks, scaled_dot_product_attention requires query, key and value in chunks, each of "
            f"shape (batch, heads, time, features). Set {layout.name_key()}=1."
        )
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise ConfigError(
            f"attention has {query.shape[1]} query heads but {key.shape[1]} key heads. Set enable_gqa=True."
        )
    if is_causal and key.shape[-2] != query.shape[-2]:
        raise ConfigError(
            f"causal attention from {query.shape[-2]} queries to {key.shape[-2]} keys is not supported in chunks. Use "
            f"a mask, or set {layout.name_key()}=1."
        )
    if attn_mask is not None and is_causal:
        raise ConfigError("an attention mask and is_causal=True are mutually exclusive; pass one of them.")
    options = _Options(is_causal, scale, _list_masks(layout, attn_mask, key))
    tensors = [*query.parts, *key.parts, *value.parts]
    if torch.is_autocast_enabled(query.device.type):
        tensors = [each.to(torch.get_autocast_dtype(query.device.type)) for each in tensors]
    parts = _Attention.apply(layout, options, *tensors)
    return Chunks(list(parts), layout)


def _list_masks(layout: ChunkLayout, mask: Tensor | None, key: Chunks) -> Sequence[Tensor | None]:
    if mask is None:
        return [None] * len(layout.parts)
    keys = key.parts[0].shape[-2] // layout.chunks_per_part * layout.chunks
    if mask.shape[-1] not in (1, keys) or (not isinstance(mask, Chunks) and mask.shape[-2] != 1):
        raise ConfigError(
            f"an attention mask of shape {list(mask.shape)} does not have a column for each of the {keys} tokens of "
            "the sequence. Create it with document_mask, or use is_causal=True."
        )
    if mask.requires_grad:
        raise ConfigError(f"a trained attention bias is not supported in chunks. Set {layout.name_key()}=1.")
    return mask.parts if isinstance(mask, Chunks) else [mask] * len(layout.parts)


class _Attention(torch.autograd.Function):
    """Attention over gathered keys and values, with one output per part of the queries."""

    @staticmethod
    def forward(ctx: Any, layout: ChunkLayout, options: _Options, *tensors: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values = _split_thirds(tensors)
        whole_k, whole_v = _gather_pairs(layout, keys, values)
        ctx.layout, ctx.options, uses_flash = layout, options, options.uses_flash(queries[0], values[0])
        outputs, sums = [], []
        all_blocks = _list_blocks(layout, queries[0], whole_k, options)
        for query, mask, blocks in zip(queries, options.masks, all_blocks, strict=True):
            if not uses_flash:
                outputs.append(_attend(query, whole_k, whole_v, mask, blocks, options.scale))
                continue
            merged = [_merge_blocks(query, whole_k, whole_v, each, options.scale) for each in blocks]
            outputs.append(torch.cat([output for output, _ in merged], -2))
            sums.append(torch.cat([total for _, total in merged], -1))
        ctx.save_for_backward(*tensors, *(outputs if uses_flash else ()), *sums)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layout, options, count = ctx.layout, ctx.options, len(gradients)
        saved = list(ctx.saved_tensors)
        queries, keys, values = _split_thirds(saved[: 3 * count])
        outputs, sums = saved[3 * count : 4 * count], saved[4 * count :]
        whole_k, whole_v = _gather_pairs(layout, keys, values)
        of_queries: list[Tensor] = []

        def differentiate() -> Iterator[Tensor]:
            """Yield each query part's contribution to the gradients of all keys and values."""
            for index, blocks in enumerate(_list_blocks(layout, queries[0], whole_k, options)):
                if sums:
                    known = (outputs[index], sums[index], gradients[index])
                    own, of_keys, of_values = _differentiate_blocks(
                        queries[index], whole_k, whole_v, known, blocks, options.scale
                    )
                else:
                    own, of_keys, of_values = _differentiate_again(
                        queries[index], whole_k, whole_v, gradients[index], options.masks[index], blocks, options.scale
                    )
                of_queries.append(own)
                yield torch.cat((of_keys, of_values), -1)

        totals = layout.scatter_sum(differentiate(), dim=-2)
        features = keys[0].shape[-1]
        of_keys = [each[..., :features] for each in totals]
        of_values = [each[..., features:] for each in totals]
        return None, None, *of_queries, *of_keys, *of_values


def _split_thirds(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    count = len(tensors) // 3
    return tensors[:count], tensors[count : 2 * count], tensors[2 * count :]


def _gather_pairs(layout: ChunkLayout, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gather all keys and values, contiguous (batch, heads, time, features), at once."""
    pairs = [torch.cat(pair, -1) for pair in zip(keys, values, strict=True)]
    whole = layout.gather(pairs, dim=-2)
    features = keys[0].shape[-1]
    return whole[..., :features].contiguous(), whole[..., features:].contiguous()


@final
@dataclass(frozen=True)
class _Span:
    """Queries [first, last) of a part.

    All attend to keys [0, past), and causally to keys [past, end).
    """

    first: int
    last: int
    past: int
    end: int


def _list_blocks(layout: ChunkLayout, query: Tensor, keys: Tensor, options: _Options) -> Iterator[list[_Span]]:
    """Yield the blocks of each part: one per chunk if attention is causal, otherwise one."""
    length = query.shape[-2] // layout.chunks_per_part
    for part in layout.parts:
        if options.is_causal:
            yield [
                _Span(index * length, (index + 1) * length, place * length, (place + 1) * length)
                for index, place in enumerate(part)
            ]
        else:
            yield [_Span(0, query.shape[-2], keys.shape[-2], keys.shape[-2])]


def _repeat_heads(query: Tensor, shared: Tensor) -> Tensor:
    """Repeat heads of ``shared`` to match ``query``, both (batch, heads, time, features)."""
    groups = query.shape[1] // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, 1)


def _sum_heads(query: Tensor, shared: Tensor, gradient: Tensor) -> Tensor:
    groups = query.shape[1] // shared.shape[1]
    return gradient if groups == 1 else torch.unflatten(gradient, 1, (shared.shape[1], groups)).sum(2)


def _merge_blocks(
    query: Tensor, keys: Tensor, values: Tensor, block: _Span, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return a block's output and log-sum-exp.

    Shapes: (batch, heads, queries, features) and (batch, heads, queries).
    """
    own = query[..., block.first : block.last, :].contiguous()
    results = []
    for first, last, is_causal in ((0, block.past, False), (block.past, block.end, True)):
        if last > first:
            pair = [_repeat_heads(query, each[..., first:last, :]) for each in (keys, values)]
            results.append(_flash(own, *pair, 0.0, is_causal, scale=scale))
    if len(results) == 1:
        ((output, total),) = results
        return output, total.contiguous()
    (past, past_sum), (present, present_sum) = results
    total, *shares = _merge_sums(past_sum, present_sum)
    output = (past * shares[0].unsqueeze(-1) + present * shares[1].unsqueeze(-1)).to(query.dtype)
    return output, total


def _merge_sums(past: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the combined log-sum-exp, and the weight of each input in it.

    All are (batch, heads, queries). Kernels round the last elements of a tensor differently. Padding makes the bits of
    a head independent of the number of heads on a rank.
    """
    flat = [F.pad(each.flatten(), (0, -each.numel() % VECTOR)) for each in (past, present)]
    total = torch.logaddexp(*flat)
    shares = [(each - total).exp() for each in flat]
    first, second, third = (each[: past.numel()].view(past.shape) for each in (total, *shares))
    return first, second, third


def _differentiate_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    blocks: Sequence[_Span],
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a part's queries, and contributions to those of keys and values.

    ``known``: the part's output, its log-sum-exp, and the gradient of the output.
    """
    of_queries = []
    of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
    for block in blocks:
        rows = slice(block.first, block.last)
        output, gradient = (each[..., rows, :].contiguous() for each in (known[0], known[2]))
        own, total = query[..., rows, :].contiguous(), known[1][..., rows].contiguous()
        of_block: Tensor | None = None
        for first, last, is_causal in ((0, block.past, False), (block.past, block.end, True)):
            if last == first:
                continue
            span = slice(first, last)
            pair = [_repeat_heads(query, each[..., span, :]) for each in (keys, values)]
            found = _flash_backward(gradient, own, *pair, output, total, 0.0, is_causal, scale=scale)
            of_block = found[0] if of_block is None else of_block + found[0]
            of_keys[..., span, :] += _sum_heads(query, keys, found[1])
            of_values[..., span, :] += _sum_heads(query, values, found[2])
        assert of_block is not None
        of_queries.append(of_block)
    return torch.cat(of_queries, -2), of_keys, of_values


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, blocks: Sequence[_Span], scale: float | None
) -> Tensor:
    """Return the output of a part of queries with the kernels that torch selects."""
    shares_heads = keys.shape[1] != query.shape[1]
    attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=shares_heads)
    outputs = []
    for block in blocks:
        own, length = query[..., block.first : block.last, :], block.last - block.first
        bias: Any = causal_lower_right(length, block.end) if block.end > block.past else mask
        outputs.append(attend(own, keys[..., : block.end, :], values[..., : block.end, :], attn_mask=bias))
    return torch.cat(outputs, -2)


def _differentiate_again(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    gradient: Tensor,
    mask: Tensor | None,
    blocks: Sequence[_Span],
    scale: float | None,
) -> Sequence[Tensor]:
    """Return gradients of a part's queries and all keys and values, by recomputation."""
    leaves = [each.detach().requires_grad_() for each in (query, keys, values)]
    with torch.enable_grad():
        output = _attend(leaves[0], leaves[1], leaves[2], mask, blocks, scale)
    found = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
    return [torch.zeros_like(each) if own is None else own for own, each in zip(found, leaves, strict=True)]
