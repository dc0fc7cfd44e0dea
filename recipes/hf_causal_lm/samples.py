"""Turns samples of token sources into inputs and targets of a causal language model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, Subset

from worldsize.core import ConfigError
from worldsize.data.mixture import Mixture
from worldsize.data.source import Source
from worldsize.data.sources.documents import next_tokens
from worldsize.data.sources.tokens import TokenFiles
from worldsize.data.splits import split_source


class LanguageBatch(NamedTuple):
    """Inputs of a language model, and the tokens that follow each: int64 [batch, context] both.

    Positions count from the beginning of each document, so that attention stays within it; None: from that of the
    window.
    """

    inputs_bt: Tensor
    targets_bt: Tensor
    positions_bt: Tensor | None = None


def language_batch(batch: Any) -> LanguageBatch:
    """Return a batch of windows with their targets, of tokens [batch, context + 1], or of packed documents."""
    if isinstance(batch, Tensor):
        return LanguageBatch(batch[:, :-1], batch[:, 1:])
    if isinstance(batch, Mapping):
        return LanguageBatch(*next_tokens(batch))
    inputs_bt, targets_bt = batch
    return LanguageBatch(inputs_bt, targets_bt)


def check_source(source: Source, context: int) -> None:
    """Raise ConfigError unless ``source`` has windows of ``context`` tokens."""
    makers: dict[str, str] = {}
    for part in _parts(source):
        if not isinstance(part, TokenFiles):
            raise ConfigError(
                f"a language model learns from tokens, and data reads {type(part).__name__}. Prepare tokens with "
                "worldsize prepare, and choose data=tokens, documents or packed."
            )
        if part.length != context:
            raise ConfigError(
                f"recipe.context={context}, and the data have samples of length={part.length}. Set both alike, "
                "e.g. data.length='${recipe.context}'."
            )
        makers |= {each.tokenizer["sha256"]: each.tokenizer["name"] for each in part.prepared}
    if len(makers) > 1:
        raise ConfigError(
            f"the data were prepared with different tokenizers: {', '.join(map(str, makers.values()))}. Prepare all "
            "with one."
        )


def vocabulary_of(source: Source, given: int | None) -> int:
    """Return how many different tokens a model of ``source`` knows.

    Args:
        given: number of tokens that the recipe or its tokenizer has; None: that of the data counts.

    Raises:
        ConfigError: neither says how many there are, or the data have more.
    """
    known = [part.vocabulary for part in _parts(source) if isinstance(part, TokenFiles)]
    most = max((number for number in known if number is not None), default=None)
    if given is None and (most is None or None in known):
        raise ConfigError(
            "the data do not say how many different tokens there are. Set recipe.tokenizer to the one that they were "
            "prepared with, or recipe.config.vocab_size."
        )
    if given is not None and most is not None and given < most:
        raise ConfigError(
            f"the model knows {given:,} different tokens, and the data were prepared with {most:,}. Set "
            "recipe.tokenizer or recipe.config.vocab_size to those of the data."
        )
    return given if given is not None else most or 0


def _parts(source: Source) -> list[Source]:
    return [part.source for part in source.sources.values()] if isinstance(source, Mixture) else [source]


def source_split(source: Source, split: str, *, share: float, tokens: int | None, context: int) -> Dataset[Any]:
    """Return the samples of a split, "train" or "test"; those of the test have at most ``tokens`` tokens."""
    side = split_source(source, split, share=share)
    if split == "train" or tokens is None:
        return side
    return Subset(side, _evenly_chosen(side, max(1, tokens // context)))


def _evenly_chosen(side: Source, count: int) -> list[int]:
    """Return the indices of about ``count`` samples, evenly spread over ``side``; of a mixture, in its shares."""
    if not isinstance(side, Mixture):
        taken = min(count, len(side))
        return [number * len(side) // taken for number in range(taken)]
    indices, first = [], 0
    for name, part in side.sources.items():
        own = math.ceil(count * side.shares[name])
        indices += [first + index for index in _evenly_chosen(part.source, own)] if own else []
        first += len(part.source)
    return indices
