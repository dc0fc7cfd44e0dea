"""Functions for models whose sequences may be cut into chunks, and checks of their recipes.

Use them instead of ``torch.arange`` and causal masks; without chunks, they are equivalent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError, FeatureRecipe, Recipe
from worldsize.strategies.chunk_attention import attend_by_chunk
from worldsize.strategies.chunk_tensor import Chunks, create_length_error, set_attention

set_attention(attend_by_chunk)


def check_sequences(recipe: Recipe, model: nn.Module, chunks: int, *, key: str) -> None:
    """Raise ConfigError unless ``recipe`` supports sequences in ``chunks``.

    ``key``: the configuration key that sets ``chunks``, for messages.
    """
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
        raise create_length_error(tokens, chunks, key)


def sequence_positions(tokens: Tensor, dim: int = 1) -> Tensor:
    """Return the positions of ``tokens`` in their sequence, int64 (time,), from 0.

    ``dim``: the dimension of time. Use this function for rotary or learned position embeddings, instead of
    ``torch.arange``, so that the model can be trained with ``strategy.context`` or ``logical_context``, where a process
    computes chunks of a sequence.
    """
    if not isinstance(tokens, Chunks):
        return torch.arange(tokens.shape[dim], device=tokens.device)
    layout = tokens.chunk_layout
    length = tokens.parts[0].shape[dim] // layout.chunks_per_part
    own = torch.arange(length, device=tokens.device)
    return Chunks([torch.cat([own + place * length for place in part]) for part in layout.parts], layout)


def gather_sequence(tokens: Tensor, dim: int = 1) -> Tensor:
    """Return whole sequences of ``tokens`` along ``dim`` on each process, without gradients."""
    if not isinstance(tokens, Chunks):
        return tokens
    return tokens.chunk_layout.gather([part.detach() for part in tokens.parts], dim)


def document_mask(documents_bt: Tensor) -> Tensor:
    """Return the causal mask within documents, for ``scaled_dot_product_attention``.

    The mask is bool (batch, 1, time, keys).

    ``documents_bt``: document index of each token, (batch, time). The mask has a row for each of these tokens, and
    a column for each token of the whole sequence.
    """
    whole_bk = gather_sequence(documents_bt)
    rows_t = sequence_positions(documents_bt)
    is_past_tk = rows_t[:, None] >= torch.arange(whole_bk.shape[1], device=whole_bk.device)
    same_btk = documents_bt[:, :, None] == whole_bk[:, None, :]
    return (same_btk & is_past_tk)[:, None]
