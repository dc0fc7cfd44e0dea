"""Lengths of a schedule that are written in epochs, samples or tokens, as numbers of steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from worldsize.config.settings import Settings
from worldsize.data.fetch import is_iterable
from worldsize.data.order import steps_of
from worldsize.errors import ConfigError

_LENGTH = re.compile(r"(\d+(?:\.\d+)?) ?([kMG]?) ?(step|epoch|sample|token)s?")
_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def written_lengths(node: Any, key: str = "schedule") -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each value below ``node`` that is a length, such as "2 epochs" or "10M tokens"."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from written_lengths(child, f"{key}.{name}")
    if isinstance(node, str) and _LENGTH.fullmatch(node.strip()):
        yield key, node.strip()


def length_in_steps(text: str, settings: Settings, *, key: str) -> int:
    """Return the steps, rounded up, of a length that is the value of ``key``.

    Raises:
        ConfigError: the data are a stream without a length, or the recipe does not say how many tokens a sample has.
    """
    match = _LENGTH.fullmatch(text)
    assert match is not None, text
    number, scale, unit = match.groups()
    count, batch_size = float(number) * _SCALES[scale], settings.training.batch_size
    if unit == "epoch":
        dataset = settings.recipe.data("train")
        if is_iterable(dataset):
            raise ConfigError(f"{key}={text}: the data are a stream, of which no length is known. Give steps instead.")
        return steps_of(count, len(dataset), batch_size)
    if unit == "token":
        tokens = settings.recipe.tokens_per_sample()
        if tokens is None:
            raise ConfigError(
                f"{key}={text}: {type(settings.recipe).__name__} does not say how many tokens a sample has. "
                "Define Recipe.tokens_per_sample, or give steps, samples or epochs."
            )
        return math.ceil(count / (batch_size * tokens))
    return math.ceil(count / batch_size) if unit == "sample" else math.ceil(count)
