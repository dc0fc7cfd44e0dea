"""Keyed permutations of an epoch's samples, individually or in blocks (for slow storage).

Up to 2²² samples are permuted by ``torch.randperm``; every process then stores the permutation (at most 32 MiB).

For more samples, each index is computed independently by a block cipher on b-bit integers, with the smallest b that
covers all indices. Results beyond the last index are enciphered again (cycle-walking; Black and Rogaway, Ciphers with
Arbitrary Finite Domains, CT-RSA 2002, section 3). The cipher is a Feistel network (Luby and Rackoff 1988) with halves
of b/2 bits (rounded up and down if b is odd). Its round function is the finalizer of SplitMix64 (Steele, Lea and Flood,
OOPSLA 2014, figure 16).
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
from worldsize.seeds import derive_seed

ORDER = 3
"""Version of the sample order, recorded with each run: under a new version, a seed yields a different order."""

_WHOLE = 1 << 22  # maximum number of samples for torch.randperm in permute_range
_SMALL = 1 << 12  # maximum number of samples for torch.randperm in permute_positions
_ROUNDS = 8
_Words = NDArray[numpy.uint64]


def permute_range(seed: int, length: int, places: range) -> Tensor:
    """Return the values at ``places`` of a permutation of ``range(length)``: int64 [places].

    Memory is proportional to ``places`` if ``length`` is above 2²².

    Args:
        seed: Key of the permutation.
        length: Number of indices, at most 2⁶².
        places: Consecutive positions below ``length``.
    """
    if length <= _SMALL:
        return _small(seed, length)[places.start : places.stop]
    if length <= _WHOLE:
        return _whole(seed, length)[places.start : places.stop]
    return torch.from_numpy(encipher_numbers(seed, length, numpy.arange(places.start, places.stop, dtype=numpy.uint64)))


def permute_positions(seed: int, length: int, places: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Return a permutation of ``range(length)`` at arbitrary ``places``, int64 [places].

    Lengths up to 4,096 use ``torch.randperm``, since the cipher is biased on short ranges. Above that, memory is
    proportional to ``places``. Between 4,096 and 2²², the permutation is not the one of :func:`permute_range`.
    """
    if length <= _SMALL:
        return _small(seed, length).numpy()[places]
    return encipher_numbers(seed, length, places.astype(numpy.uint64))


def create_permutation(seed: int, length: int) -> Tensor:
    """Return a full permutation of ``range(length)``, int64 [length]."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


_small, _whole = lru_cache(maxsize=256)(create_permutation), lru_cache(maxsize=2)(create_permutation)


def encipher_numbers(seed: int, length: int, numbers: _Words) -> NDArray[numpy.int64]:
    """Return a cipher-based permutation of ``range(length)`` at positions ``numbers``."""
    bits = max(2, (length - 1).bit_length())
    keys = _derive_keys(seed)
    indices = _apply_cipher(numbers, keys, bits)
    while (outside := numpy.flatnonzero(indices >= length)).size:
        indices[outside] = _apply_cipher(indices[outside], keys, bits)
    return indices.astype(numpy.int64)


@lru_cache(maxsize=2)
def _derive_keys(seed: int) -> list[numpy.uint64]:
    return [numpy.uint64(derive_seed(seed, "round", number)) for number in range(_ROUNDS)]


def _apply_cipher(numbers: _Words, keys: list[numpy.uint64], bits: int) -> _Words:
    """Encipher integers below ``2**bits``."""
    low_bits = numpy.uint64(bits // 2)
    low_mask = numpy.uint64((1 << (bits // 2)) - 1)
    high_mask = numpy.uint64((1 << (bits - bits // 2)) - 1)
    high, low = numbers >> low_bits, numbers & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_mix_words(high ^ key) & low_mask)
        else:
            high = high ^ (_mix_words(low ^ key) & high_mask)
    return (high << low_bits) | low


def _mix_words(words: _Words) -> _Words:
    words = (words ^ (words >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return words ^ (words >> numpy.uint64(31))


Numbers = NDArray[numpy.int64]


@final
@dataclass(frozen=True)
class Shuffle(ShuffleConfig):
    """Shuffling policy within an epoch: none, by sample, or in blocks for sequential reads.

    In blocks, the storage is read in runs of ``block`` samples, from ``window`` blocks at a time: the blocks are
    permuted, then the samples within each window of blocks. The blocks start at a different offset in each epoch. Any
    position can be computed independently of the others.
    """

    def permute_span(self, seed: int, length: int, places: range) -> Tensor:
        """Return the sample indices, int64 [places], at consecutive positions of an epoch.

        Args:
            seed: determines this epoch's permutation.
        """
        if self.enabled and self.block == 1:
            return permute_range(seed, length, places)
        return torch.from_numpy(
            self.permute_places(seed, length, numpy.arange(places.start, places.stop, dtype=numpy.int64))
        )

    def permute_places(self, seed: int, length: int, places: Numbers) -> Numbers:
        """Return the sample indices, int64 [places], at arbitrary positions of an epoch.

        The order may differ from :meth:`permute_span`, which stores the permutation of a data set of up to 2²² samples.
        """
        if not self.enabled:
            return places
        if self.block == 1 or length <= self.block:
            return permute_positions(seed, length, places)
        return self._permute_blocks(seed, length, places)

    def _permute_blocks(self, seed: int, length: int, places: Numbers) -> Numbers:
        """Permute blocks, and samples within windows; rotate by a random offset.

        An incomplete block stays last.
        """
        blocks, size = length // self.block, self.window * self.block
        order = numpy.empty_like(places)
        for window in numpy.unique(places // size).tolist():
            chosen = places // size == window
            first = window * size
            mixed = permute_positions(
                derive_seed(seed, "window", window), min(size, length - first), places[chosen] - first
            )
            order[chosen] = first + mixed
        number, within = order // self.block, order % self.block
        full = number < blocks
        number[full] = permute_positions(derive_seed(seed, "block"), blocks, number[full])
        return (derive_seed(seed, "rotation") + number * self.block + within) % length
