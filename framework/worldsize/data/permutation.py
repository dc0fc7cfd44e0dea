"""Permutes the samples of an epoch by a key: each by itself, or in blocks for data on slow storage.

Each index of a permutation is computed by itself, whatever the number of samples.

A data set of at most 2²² samples is permuted whole by ``torch.randperm``, which every process then holds (32 MiB). A
larger one is permuted by a block cipher on the smallest domain of 2ᵇ numbers that holds all indices, with cycle-walking
(Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, section 3): a number that is enciphered to one
beyond the last index is enciphered again. The cipher is a Feistel network (Luby and Rackoff 1988) with halves of b/2
bits, or of b/2 ± ½, whose round function is the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014,
figure 16).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldsize.core.sections import ShuffleConfig
from worldsize.record.determinism import stream

ORDER = 3
"""The version of the order of samples, which a seed alone decides; another one draws other samples."""

_WHOLE = 1 << 22  # samples
_SMALL = 1 << 12
_ROUNDS = 8
_Words = NDArray[numpy.uint64]


def permuted(seed: int, length: int, places: range) -> Tensor:
    """Return the indices, int64 [places], that stand at ``places`` of the permutation of ``range(length)``.

    It takes memory for ``places`` alone if ``length`` is above 2²².

    Args:
        seed: Key of the permutation.
        length: How many indices there are, at most 2⁶².
        places: Places below ``length``.
    """
    if length <= _SMALL:
        return _small(seed, length)[places.start : places.stop]
    if length <= _WHOLE:
        return _whole(seed, length)[places.start : places.stop]
    return torch.from_numpy(enciphered(seed, length, numpy.arange(places.start, places.stop, dtype=numpy.uint64)))


def permuted_at(seed: int, length: int, places: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Return the indices, int64 [places], that stand at any ``places`` of a permutation of ``range(length)``.

    It takes memory for ``places`` alone if ``length`` is above 4,096, and is another permutation than that of
    :func:`permuted` then. Fewer are permuted by ``torch.randperm``: the cipher favours some orders of a few numbers.
    """
    if length <= _SMALL:
        return _small(seed, length).numpy()[places]
    return enciphered(seed, length, places.astype(numpy.uint64))


def shuffled(seed: int, length: int) -> Tensor:
    """Return all of a permutation of ``range(length)``, int64 [length]."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


_small, _whole = lru_cache(maxsize=256)(shuffled), lru_cache(maxsize=2)(shuffled)


def enciphered(seed: int, length: int, numbers: _Words) -> NDArray[numpy.int64]:
    """Return a permutation of ``range(length)`` at ``numbers``, which are below it."""
    bits = max(2, (length - 1).bit_length())
    keys = _keys(seed)
    indices = _cipher(numbers, keys, bits)
    while (outside := numpy.flatnonzero(indices >= length)).size:
        indices[outside] = _cipher(indices[outside], keys, bits)
    return indices.astype(numpy.int64)


@lru_cache(maxsize=2)
def _keys(seed: int) -> list[numpy.uint64]:
    return [numpy.uint64(stream(seed, "round", number)) for number in range(_ROUNDS)]


def _cipher(numbers: _Words, keys: list[numpy.uint64], bits: int) -> _Words:
    """Permute numbers below 2 to the power of ``bits``."""
    low_bits = numpy.uint64(bits // 2)
    low_mask = numpy.uint64((1 << (bits // 2)) - 1)
    high_mask = numpy.uint64((1 << (bits - bits // 2)) - 1)
    high, low = numbers >> low_bits, numbers & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_mixed(high ^ key) & low_mask)
        else:
            high = high ^ (_mixed(low ^ key) & high_mask)
    return (high << low_bits) | low


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return words ^ (words >> numpy.uint64(31))


Numbers = NDArray[numpy.int64]


@final
@dataclass(frozen=True)
class Shuffle(ShuffleConfig):
    """Decides how far a sample may move from its neighbours, in one epoch.

    With blocks, an epoch reads the storage in runs of ``block`` samples, from ``window`` places at a time: blocks are
    permuted, then the samples within each window of blocks. Where blocks begin is drawn anew for each epoch. Any place
    is computed by itself, with no memory for the others.
    """

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
