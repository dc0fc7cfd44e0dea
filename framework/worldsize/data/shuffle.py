"""Permutes the samples of an epoch: each by itself, or in blocks for data on slow storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldsize.core import Range
from worldsize.data.permutation import permuted, permuted_at
from worldsize.record.seeds import stream

Numbers = NDArray[numpy.int64]


@final
@dataclass(frozen=True)
class Shuffle:
    """Decides how far a sample may move from its neighbours, in one epoch.

    With blocks, an epoch reads the storage in runs of ``block`` samples, from ``window`` places at a time: blocks are
    permuted, then the samples within each window of blocks. Where blocks begin is drawn anew for each epoch. Any place
    is computed by itself, with no memory for the others.

    Args:
        enabled: whether samples are permuted at all; they keep the order of the data otherwise.
        block: samples that are neighbours in the data and stay close; 1: each sample goes anywhere.
        window: blocks whose samples are mixed.
    """

    enabled: bool = True
    block: Annotated[int, Range(least=1)] = 1
    window: Annotated[int, Range(least=1)] = 64

    def span(self, seed: int, length: int, places: range) -> Tensor:
        """Return the indices, int64 [places], that stand at neighbouring ``places`` of an epoch of ``length`` samples.

        Args:
            seed: decides this epoch's permutation.
        """
        if self.enabled and self.block == 1:
            return permuted(seed, length, places)
        return torch.from_numpy(self.at(seed, length, numpy.arange(places.start, places.stop, dtype=numpy.int64)))

    def at(self, seed: int, length: int, places: Numbers) -> Numbers:
        """Return the indices, int64 [places], that stand at any ``places`` of an epoch, without memory for the rest.

        It is not the permutation of :meth:`span`, which keeps that of a small data set in memory.
        """
        if not self.enabled:
            return places
        if self.block == 1 or length <= self.block:
            return permuted_at(seed, length, places)
        return self._in_blocks(seed, length, places)

    def _in_blocks(self, seed: int, length: int, places: Numbers) -> Numbers:
        """Permute a ring of samples that begins anywhere; what does not fill a block comes last."""
        blocks, size = length // self.block, self.window * self.block
        order = numpy.empty_like(places)
        for window in numpy.unique(places // size).tolist():
            chosen = places // size == window
            first = window * size
            mixed = permuted_at(stream(seed, "window", window), min(size, length - first), places[chosen] - first)
            order[chosen] = first + mixed
        number, within = order // self.block, order % self.block
        full = number < blocks
        number[full] = permuted_at(stream(seed, "block"), blocks, number[full])
        return (stream(seed, "rotation") + number * self.block + within) % length
