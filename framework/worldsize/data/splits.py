"""Splits any source, a mixture among them, into what is learned and what is held out."""

from __future__ import annotations

from dataclasses import replace

from worldsize.core import ConfigError
from worldsize.data.held_out import HeldOut
from worldsize.data.mixture import Mixture
from worldsize.data.source import Source


def split_source(source: Source, split: str, *, share: float) -> Source:
    """Return what ``source`` holds for ``split``; of a mixture, each source is split by itself.

    Args:
        source: all of the data.
        split: "train", or any other name for what is held out.
        share: share of the samples that is held out.

    Raises:
        ConfigError: the split has no samples.
    """
    if isinstance(source, Mixture):
        parts = source.sources.items()
        return Mixture(
            {name: replace(part, source=split_source(part.source, split, share=share)) for name, part in parts}
        )
    side = HeldOut(source, share, held_out=split != "train")
    if not len(side):
        raise ConfigError(
            f"of {len(source)} samples, none are left for {split!r} if a share of {share} is held out. "
            "Give more data, or another share."
        )
    return side
