"""Splits of a source into training and held-out samples, determined by the sample index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, final

import numpy
import torch
from numpy.typing import NDArray

from worldsize.core import ConfigError, Range
from worldsize.data.mixture import Mixture
from worldsize.data.order import own_order
from worldsize.data.permutation import create_permutation
from worldsize.data.source import LookedUpLengths, Source, read_with_replacements
from worldsize.seeds import derive_seed


def split_source(source: Source, split: str, *, share: float) -> Source:
    """Return the training or held-out samples; sources of a mixture are split separately.

    Args:
        source: the full data.
        split: "train", or any other name for the held-out samples.
        share: fraction of the samples to hold out.

    Raises:
        ConfigError: the split is empty.
    """
    if isinstance(source, Mixture):
        parts = source.sources.items()
        return Mixture(
            {name: replace(part, source=split_source(part.source, split, share=share)) for name, part in parts}
        )
    side = HeldOut(source, share, held_out=split != "train")
    if not len(side):
        raise ConfigError(
            f"split {split!r} is empty: the data have {len(source)} samples, with a held-out share of {share}. "
            "Provide more data, or choose a different share."
        )
    return side


_GROUP = 1000  # samples per group; the same share of each group is held out


@final
@dataclass(frozen=True)
class HeldOut(Source):
    """One side of a split that chooses held-out samples by hash in each group of 1,000.

    A sample's side depends only on its index and the share, not on the run's seed. It stays the same when data are
    appended, except for samples in the last, incomplete group.

    Args:
        source: the source to split.
        share: fraction to hold out, rounded to thousandths.
        held_out: whether this is the held-out side (True) or the training side (False).
    """

    source: Source
    share: Annotated[float, Range(least=0, most=1)]
    held_out: bool

    def __post_init__(self) -> None:
        if own_order(self.source) is not None:
            raise ConfigError(
                f"HeldOut does not preserve the sample order of {type(self.source).__name__}. Use split_source from "
                "worldsize.data.splits instead."
            )

    def __len__(self) -> int:
        groups, rest = divmod(len(self.source), _GROUP)
        return groups * self._count_samples(_GROUP) + self._count_samples(rest)

    def _count_samples(self, size: int) -> int:
        """Return the number of samples on this side in a group of ``size`` samples."""
        out = round(self.share * size)
        return out if self.held_out else size - out

    def source_index(self, index: int) -> int:
        """Map an index on this side to the index in ``source``."""
        groups, rest = divmod(len(self.source), _GROUP)
        taken = self._count_samples(_GROUP)
        group, place = (groups, index) if taken == 0 else divmod(index, taken)
        if group >= groups:
            group, place = groups, index - groups * taken
        chosen = _select_offsets(group, rest if group == groups else _GROUP, self.share, self.held_out)
        return group * _GROUP + int(chosen[place])

    def _first_from(self, number: int) -> int:
        """Return this side's index of its first sample at or after ``number`` in ``source``."""
        groups, rest = divmod(len(self.source), _GROUP)
        group, place = divmod(number, _GROUP)
        chosen = _select_offsets(group, rest if group == groups else _GROUP, self.share, self.held_out)
        return group * self._count_samples(_GROUP) + int(numpy.searchsorted(chosen, place))

    def __getitem__(self, index: int) -> Any:
        return read_with_replacements(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return read_with_replacements(self, indices)

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        return self.source.read_each([self.source_index(index) for index in indices])

    def find_bad_range(self, index: int) -> range:
        bad = self.source.find_bad_range(self.source_index(index))
        return range(self._first_from(bad.start), self._first_from(bad.stop))

    @property
    def lengths(self) -> Any:
        """Lengths of the samples on this side, or None if ``source`` does not provide lengths."""
        if (lengths := getattr(self.source, "lengths", None)) is None:
            return None
        return LookedUpLengths(lambda indices: numpy.asarray(lengths[self._source_indices(indices)]))

    def _source_indices(self, indices: NDArray[numpy.int64]) -> torch.Tensor:
        return torch.tensor([self.source_index(index) for index in indices.tolist()], dtype=torch.int64)

    def fingerprint(self) -> Mapping[str, Any]:
        return self.source.fingerprint()


@lru_cache(256)
def _select_offsets(group: int, size: int, share: float, held_out: bool) -> NDArray[numpy.int64]:
    """Return the ascending offsets of a group's held-out or training samples: int64 (samples,)."""
    order = create_permutation(derive_seed(0, "held_out", group), size).numpy()
    out = round(share * size)
    return numpy.sort(order[:out] if held_out else order[out:])
