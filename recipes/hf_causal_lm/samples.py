"""Convert samples of token sources to inputs and targets of a causal language model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, Subset

from worldsize.core import ConfigError
from worldsize.data.mixture import Mixture
from worldsize.data.source import Source
from worldsize.data.sources.documents import DocumentFiles, next_tokens
from worldsize.data.sources.tokens import TokenFiles
from worldsize.data.splits import split_source


class LanguageBatch(NamedTuple):
    """Input tokens and the next token of each, both int64 (batch, context).

    Positions restart at each document, which keeps attention within it. None if they count from the start of the
    window. ``mask``: attention mask of a chunk of the sequence, if it has documents.
    """

    inputs_bt: Tensor
    targets_bt: Tensor
    positions_bt: Tensor | None = None
    mask: Tensor | None = None


def language_batch(batch: Any) -> LanguageBatch:
    """Convert windows (batch, context + 1), packed documents or (inputs, targets); return a LanguageBatch as is."""
    if isinstance(batch, LanguageBatch):
        return batch
    if isinstance(batch, Tensor):
        return LanguageBatch(batch[:, :-1], batch[:, 1:])
    if isinstance(batch, Mapping):
        return LanguageBatch(*next_tokens(batch))
    inputs_bt, targets_bt = batch
    return LanguageBatch(inputs_bt, targets_bt)


def check_source(source: Source, context: int) -> None:
    """Raise ConfigError unless the samples of ``source`` are windows of ``context`` tokens."""
    makers: dict[str, str] = {}
    for part in _list_parts(source):
        if not isinstance(part, TokenFiles):
            raise ConfigError(
                f"a language model requires token data, got {type(part).__name__}. Prepare tokens with worldsize "
                "prepare, and set data=tokens, documents or packed."
            )
        if part.length != context:
            raise ConfigError(
                f"recipe.context={context} does not match length={part.length} of the data. Set both to the same "
                "value, e.g. data.length='${recipe.context}'."
            )
        makers |= {each.tokenizer["sha256"]: each.tokenizer["name"] for each in part.prepared}
    if len(makers) > 1:
        raise ConfigError(
            f"the data were prepared with different tokenizers: {', '.join(map(str, makers.values()))}. Use the same "
            "tokenizer for all data."
        )


def has_documents(source: Source) -> bool:
    """Return whether samples of ``source`` have several documents."""
    return any(isinstance(part, DocumentFiles) for part in _list_parts(source))


def find_vocabulary_size(source: Source, given: int | None) -> int:
    """Return the vocabulary size of a model to train on ``source``.

    Args:
        given: vocabulary size of the recipe or its tokenizer. None to use the data's size.

    Raises:
        ConfigError: neither size is known, or the data's vocabulary is larger.
    """
    known = [part.vocabulary for part in _list_parts(source) if isinstance(part, TokenFiles)]
    most = max((number for number in known if number is not None), default=None)
    if given is None and (most is None or None in known):
        raise ConfigError(
            "the vocabulary size of the data is unknown. Set recipe.tokenizer to the tokenizer of the data, or set "
            "recipe.config.vocab_size."
        )
    if given is not None and most is not None and given < most:
        raise ConfigError(
            f"vocabulary mismatch: the model has {given:,} tokens, the data {most:,}. Set "
            "recipe.tokenizer or recipe.config.vocab_size to match the data."
        )
    return given if given is not None else most or 0


def _list_parts(source: Source) -> list[Source]:
    return [part.source for part in source.sources.values()] if isinstance(source, Mixture) else [source]


def source_split(source: Source, split: str, *, share: float, tokens: int | None, context: int) -> Dataset[Any]:
    """Return a split, "train" or "test", with at most ``tokens`` tokens for testing."""
    side = split_source(source, split, share=share)
    if split == "train" or tokens is None:
        return side
    return Subset(side, _evenly_chosen(side, max(1, tokens // context)))


def _evenly_chosen(side: Source, count: int) -> list[int]:
    """Return the indices of about ``count`` evenly spaced samples; preserves the proportions of a mixture."""
    if not isinstance(side, Mixture):
        taken = min(count, len(side))
        return [number * len(side) // taken for number in range(taken)]
    indices, first = [], 0
    for name, part in side.sources.items():
        own = math.ceil(count * side.shares[name])
        indices += [first + index for index in _evenly_chosen(part.source, own)] if own else []
        first += len(part.source)
    return indices
