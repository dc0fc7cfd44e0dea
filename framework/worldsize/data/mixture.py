"""Mixture of data sets by weight; a sample depends only on the seed and its position."""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Annotated, Any, final

import numpy
import torch
from numpy.typing import NDArray

from worldsize.core import ConfigError, Range
from worldsize.data.order import OwnOrder, own_order
from worldsize.data.permutation import Shuffle, encipher_numbers
from worldsize.data.source import LookedUpLengths, Source
from worldsize.errors import neighbours
from worldsize.seeds import derive_seed

_BLOCK = 1 << 16  # positions per block; each source has the same number of positions in every block
Numbers = NDArray[numpy.int64]


@final
@dataclass(frozen=True)
class Part:
    """One source of a mixture, with its weight or number of epochs.

    Args:
        source: the source.
        weight: share of the samples, relative to the weights of the other parts.
        epochs: alternative to ``weight``: number of times that each sample occurs in one epoch of the mixture.
    """

    source: Source
    weight: Annotated[float | None, Range(least=0)] = None
    epochs: Annotated[float | None, Range(least=0)] = None


@final
@dataclass(frozen=True)
class Mixture(Source, OwnOrder):
    """Several sources in fixed shares, each shuffled separately and repeated as needed.

    The endless sequence of samples is divided into blocks of 65,536 positions. In each block, every source has the same
    rounded share of positions, chosen by a keyed permutation. Each source is read in the order of its own epochs.
    A block is computed on first access, in a few milliseconds, and takes 640 KiB.

    Args:
        sources: the parts by name; all with a weight, or all with epochs.

    Raises:
        ConfigError: there are no parts, only some have a weight or epochs, or a share rounds to 0 positions per block.
    """

    sources: Mapping[str, Part]

    def __post_init__(self) -> None:
        parts = self.sources.values()
        by_weight = [part.weight is not None for part in parts]
        by_epochs = [part.epochs is not None for part in parts]
        if not parts:
            raise ConfigError(
                "a mixture requires at least one source. Add a source, e.g. data.sources.books.source=..."
            )
        if not ((all(by_weight) and not any(by_epochs)) or (all(by_epochs) and not any(by_weight))):
            raise ConfigError(
                "a mixture requires weight for all sources, or epochs for all sources. Set the same key for each."
            )
        if any(own_order(part.source) is not None for part in parts):
            raise ConfigError(
                "nested mixtures are not supported. List the sources of the inner mixture in the outer mixture."
            )
        amounts = [each for part in parts for each in (part.weight, part.epochs) if each is not None]
        if not all(isinstance(each, int | float) and 0 <= each < math.inf for each in amounts):
            raise ConfigError("weight and epochs of a source in a mixture must be finite and at least 0.")
        if not any(part.weight or part.epochs for part in parts):
            raise ConfigError(
                "all sources of the mixture have a share of 0. Increase weight or epochs for at least one source."
            )
        if all(by_weight):
            # raises if a share is too small; with epochs, fingerprint() does, since shares depend on the lengths
            _compute_quotas(tuple(self.shares.items()))

    @cached_property
    def _lengths(self) -> list[int]:
        lengths = {name: len(part.source) for name, part in self.sources.items()}
        if empty := [name for name, length in lengths.items() if not length and self.shares[name]]:
            raise ConfigError(f"source {empty[0]!r} of the mixture is empty. Check its path, or remove it.")
        return list(lengths.values())

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self._lengths))

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """Share of each source in the samples, by name; the sum is 1."""
        parts = self.sources.items()
        amounts = {name: part.weight if part.epochs is None else part.epochs * len(part.source) for name, part in parts}
        total = sum(amount or 0.0 for amount in amounts.values())
        return {name: (amount or 0.0) / total for name, amount in amounts.items()}

    def __len__(self) -> int:
        """Return the total number of samples in all sources."""
        return self._ends[-1]

    @property
    def epoch_length(self) -> int:
        """Samples per epoch: the sum of the sources' lengths, multiplied by their epochs if given."""
        if all(part.epochs is not None for part in self.sources.values()):
            return round(sum((part.epochs or 0) * len(part.source) for part in self.sources.values()))
        return len(self)

    def indices_at(self, seed: int, places: range, shuffle: Shuffle) -> torch.Tensor:
        """Return the samples at ``places`` as indices into the concatenated sources: int64 [places]."""
        indices = numpy.empty(len(places), dtype=numpy.int64)
        done, quotas = 0, _compute_quotas(tuple(self.shares.items()))
        while places:
            block, offset = divmod(places.start, _BLOCK)
            taken = min(len(places), _BLOCK - offset)
            owners, turns = (each[offset : offset + taken] for each in _assign_sources(seed, block, quotas))
            for part in numpy.unique(owners).tolist():
                mine, length = owners == part, self._lengths[part]
                drawn = block * quotas[part] + turns[mine]
                own = self._ends[part] - length + _own_order(seed, part, length, drawn, shuffle)
                indices[done : done + taken][mine] = own
            places, done = places[taken:], done + taken
        return torch.from_numpy(indices)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return self._read_parts(indices, lambda source, own: source.__getitems__(own))

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        return self._read_parts(indices, lambda source, own: source.read_each(own))

    def _read_parts(self, indices: Sequence[int], read: Callable[[Source, Sequence[int]], list[Any]]) -> list[Any]:
        samples: dict[int, Any] = {}
        owners = [bisect.bisect_right(self._ends, index) for index in indices]
        for number, part in enumerate(self.sources.values()):
            mine = [place for place, owner in enumerate(owners) if owner == number]
            first = self._ends[number] - self._lengths[number]
            if mine:
                own = read(part.source, [indices[place] - first for place in mine])
                samples |= zip(mine, own, strict=True)
        return [samples[place] for place in range(len(indices))]

    @property
    def lengths(self) -> Any:
        """Length of each sample, or None if a source does not provide lengths."""
        lengths = [getattr(part.source, "lengths", None) for part in self.sources.values()]
        if any(each is None for each in lengths):
            return None
        return LookedUpLengths(partial(_gather_lengths, lengths, numpy.array([0, *self._ends])))

    def fingerprint(self) -> Mapping[str, Any]:
        parts = {name: part.source.fingerprint() for name, part in self.sources.items()}
        digests = {name: [part["sha256"], self.shares[name]] for name, part in parts.items()}
        total = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
        _compute_quotas(tuple(self.shares.items()))  # raises if a share is too small
        facts = {"size": sum(part["size"] for part in parts.values()), "sha256": total, "shares": dict(self.shares)}
        tokenizers = {name: part["tokenizers"] for name, part in parts.items() if "tokenizers" in part}
        return {**facts, "tokenizers": tokenizers} if tokenizers else facts


def mixture(sources: Mapping[str, Mapping[str, Any]]) -> Mixture:
    """Create a mixture from a configuration.

    Args:
        sources: arguments of :class:`Part`, by name: ``source``, and ``weight`` or ``epochs``.

    Raises:
        ConfigError: a part lacks a source, or has an unknown key.
    """
    known = [field.name for field in fields(Part)]
    for name, part in sources.items():
        if isinstance(part.get("source", {}), Mapping):  # options, but the kind of source was not chosen
            others = [other for other in sources if isinstance(sources[other].get("source"), Source)]
            guess = neighbours(name, others) if others else "."
            raise ConfigError(
                f"data.sources.{name}.source is not set{guess} Set it, e.g. +data@data.sources.{name}.source=tokens"
            )
        if strange := [key for key in part if key not in known]:
            raise ConfigError(f"unknown key {strange[0]!r} in data.sources.{name}{neighbours(strange[0], known)}")
        if not isinstance(part["source"], Source):
            raise ConfigError(f"data.sources.{name}.source: expected a Source, got {type(part['source']).__name__}.")
    return Mixture({name: Part(**part) for name, part in sources.items()})


@lru_cache(16)
def _compute_quotas(shares: tuple[tuple[str, float], ...]) -> tuple[int, ...]:
    """Return the number of positions per source in a block.

    Numbers are rounded by the largest-remainder method.

    Raises:
        ConfigError: a positive share rounds to 0 positions.
    """
    exact = [share * _BLOCK for _, share in shares]
    quotas = [int(each) for each in exact]
    remainders = sorted(range(len(exact)), key=lambda part: (quotas[part] - exact[part], part))
    for part in remainders[: _BLOCK - sum(quotas)]:
        quotas[part] += 1
    for (name, share), quota in zip(shares, quotas, strict=True):
        if share > 0 and quota == 0:
            raise ConfigError(
                f"source {name!r} has a share of {share:.1e} of the mixture, which rounds to 0 of {_BLOCK:,} samples. "
                f"Increase the share to at least {1 / _BLOCK:.1e}, or remove the source."
            )
    return tuple(quotas)


def _gather_lengths(lengths: Sequence[Any], bounds: Numbers, indices: Numbers) -> Numbers:
    """Return sample lengths by index into the concatenated sources, which start at ``bounds``."""
    owners = numpy.searchsorted(bounds, indices, side="right") - 1
    joined = numpy.empty(len(indices), dtype=numpy.int64)
    for owner in numpy.unique(owners).tolist():
        chosen = owners == owner
        joined[chosen] = numpy.asarray(lengths[owner][torch.from_numpy(indices[chosen] - bounds[owner])])
    return joined


@lru_cache(4)
def _assign_sources(seed: int, block: int, quotas: tuple[int, ...]) -> tuple[NDArray[numpy.uint16], Numbers]:
    """Return the source index of each position in a block.

    Also returns the number of earlier positions with the same source.
    """
    slots = encipher_numbers(derive_seed(seed, "mixture", block), _BLOCK, numpy.arange(_BLOCK, dtype=numpy.uint64))
    owners = numpy.searchsorted(numpy.cumsum(quotas), slots, side="right").astype(numpy.uint16)
    turns = numpy.empty(_BLOCK, dtype=numpy.int64)
    turns[numpy.argsort(owners, kind="stable")] = numpy.concatenate([numpy.arange(quota) for quota in quotas])
    return owners, turns


def _own_order(seed: int, part: int, length: int, drawn: Numbers, shuffle: Shuffle) -> Numbers:
    """Return sample indices of a source, int64 [drawn].

    ``drawn``: positions in the source's endless sequence.
    """
    epochs, places = drawn // length, drawn % length
    order = numpy.empty_like(drawn)
    for epoch in numpy.unique(epochs).tolist():
        chosen = epochs == epoch
        order[chosen] = shuffle.permute_places(derive_seed(seed, "order", part, epoch), length, places[chosen])
    return order
