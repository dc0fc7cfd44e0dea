"""Splits a source, such as a mixture, into training and held-out samples, by the number of a sample alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldsize.core import ConfigError, Range
from worldsize.data.mixture import Mixture
from worldsize.data.order import own_order
from worldsize.data.permutation import shuffled
from worldsize.data.source import LookedUpLengths, Source, with_stand_ins
from worldsize.record.determinism import stream


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


_GROUP = 1000  # samples, of each of which the same share is held out


@final
@dataclass(frozen=True)
class HeldOut(Source):
    """One side of a split: of each 1,000 samples that follow each other, a hash chooses those that are held out.

    A sample's side depends on its number alone, neither on the run's seed nor on how many samples there are, but for
    those of the last, incomplete thousand. So it stays where it is when data are appended.

    Args:
        source: what is split.
        share: share that is held out, in thousandths.
        held_out: whether this is the side that is held out, or that which is learned.
    """

    source: Source
    share: Annotated[float, Range(least=0, most=1)]
    held_out: bool

    def __post_init__(self) -> None:
        if own_order(self.source) is not None:
            raise ConfigError(
                f"{type(self.source).__name__} has an order of its own, which a split of it would lose. Split it with "
                "split_source of worldsize.data.splits."
            )

    def __len__(self) -> int:
        groups, rest = divmod(len(self.source), _GROUP)
        return groups * self._taken(_GROUP) + self._taken(rest)

    def _taken(self, size: int) -> int:
        """Count the samples of this side in a group of ``size``."""
        out = round(self.share * size)
        return out if self.held_out else size - out

    def source_index(self, index: int) -> int:
        """Return the number in ``source`` of sample ``index`` of this side."""
        groups, rest = divmod(len(self.source), _GROUP)
        taken = self._taken(_GROUP)
        group, place = (groups, index) if taken == 0 else divmod(index, taken)
        if group >= groups:
            group, place = groups, index - groups * taken
        chosen = _chosen(group, rest if group == groups else _GROUP, self.share, self.held_out)
        return group * _GROUP + int(chosen[place])

    def _first_from(self, number: int) -> int:
        """Return which sample is the first of this side among those of ``source`` from ``number`` on."""
        groups, rest = divmod(len(self.source), _GROUP)
        group, place = divmod(number, _GROUP)
        chosen = _chosen(group, rest if group == groups else _GROUP, self.share, self.held_out)
        return group * self._taken(_GROUP) + int(numpy.searchsorted(chosen, place))

    def __getitem__(self, index: int) -> Any:
        return with_stand_ins(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return with_stand_ins(self, indices)

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        return self.source.read_each([self.source_index(index) for index in indices])

    def bad_with(self, index: int) -> range:
        bad = self.source.bad_with(self.source_index(index))
        return range(self._first_from(bad.start), self._first_from(bad.stop))

    @property
    def lengths(self) -> Any:
        """The lengths of this side's samples; None: ``source`` does not say them."""
        if (lengths := getattr(self.source, "lengths", None)) is None:
            return None
        return LookedUpLengths(lambda indices: numpy.asarray(lengths[self._source_indices(indices)]))

    def _source_indices(self, indices: NDArray[numpy.int64]) -> Tensor:
        return torch.tensor([self.source_index(index) for index in indices.tolist()], dtype=torch.int64)

    def fingerprint(self) -> Mapping[str, Any]:
        return self.source.fingerprint()


@lru_cache(256)
def _chosen(group: int, size: int, share: float, held_out: bool) -> NDArray[numpy.int64]:
    """Return which of a group's samples are on one side, in ascending order: int64 [taken]."""
    order = shuffled(stream(0, "held_out", group), size).numpy()
    out = round(share * size)
    return numpy.sort(order[:out] if held_out else order[out:])
