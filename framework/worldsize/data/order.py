"""Decides which samples a step sees, by the seed, the step and the logical rank alone.

So the position in the data is one number, the step. :class:`Balanced` deals the samples of some steps anew by their
length, so that all ranks compute equally long.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from worldsize.core import ConfigError, Dealing
from worldsize.data.batches import is_iterable
from worldsize.data.permutation import Shuffle
from worldsize.data.source import Transformed
from worldsize.record.determinism import stream


class OwnOrder(ABC):
    """A data set that decides the order of its samples itself, such as a mixture of several."""

    @property
    @abstractmethod
    def epoch_length(self) -> int:
        """The number of samples that are an epoch; some may be drawn more than once, or not at all."""

    @abstractmethod
    def indices_at(self, seed: int, places: range, shuffle: Shuffle) -> Tensor:
        """Return the indices, int64 [places], of the samples that stand at ``places`` of the endless stream of samples.

        Args:
            seed: that of the run.
            places: neighbours, from 0; they may be far beyond the first epoch.
            shuffle: how samples are permuted where the data set has no better way.
        """


def own_order(dataset: Any) -> OwnOrder | None:
    """Return the object that orders the samples of ``dataset``, transformed ones too; None: a permutation does."""
    while isinstance(dataset, Transformed):
        dataset = dataset.source
    return dataset if isinstance(dataset, OwnOrder) else None


@final
@dataclass(frozen=True)
class Order:
    """The order of training samples: one permutation an epoch, cut into steps, then into logical ranks.

    Batches may straddle epochs, so every sample is drawn exactly once an epoch whatever the batch size.
    """

    seed: int
    batch_size: int  # samples of a step, over all logical ranks
    logical_ranks: int
    mine: tuple[int, ...]  # the logical ranks that this process carries
    balanced: bool = False  # samples change places with those of neighbouring steps: data/order.py
    shuffle: Shuffle = field(default_factory=Shuffle)

    @property
    def micro_batch_size(self) -> int:
        """The number of samples of one logical rank in a step."""
        return self.batch_size // self.logical_ranks

    def positions(self, step: int, logical_rank: int) -> range:
        """Return the places that ``logical_rank`` takes in the endless stream of samples in ``step`` (from 1)."""
        first = (step - 1) * self.batch_size + logical_rank * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def indices_in(self, dataset: Any, step: int, logical_rank: int) -> Tensor:
        """Return the indices, int64 [micro_batch_size], of the samples of ``dataset`` that one logical rank takes."""
        if (own := own_order(dataset)) is not None:
            return own.indices_at(self.seed, self.positions(step, logical_rank), self.shuffle)
        return self.indices(step, logical_rank, len(dataset))

    def indices(self, step: int, logical_rank: int, length: int) -> Tensor:
        """Return which of ``length`` samples one logical rank takes: indices, int64 [micro_batch_size].

        Raises:
            ConfigError: there is no sample.
        """
        _refuse_empty(length)
        positions = self.positions(step, logical_rank)
        parts = []
        while positions:
            epoch, offset = divmod(positions.start, length)
            taken = min(len(positions), length - offset)
            parts.append(self.shuffle.span(stream(self.seed, "order", epoch), length, range(offset, offset + taken)))
            positions = positions[taken:]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def step_seed(self, step: int, logical_rank: int) -> int:
        """Return the 63-bit seed of what one logical rank draws while it computes ``step``."""
        return stream(self.seed, "step", step, logical_rank)


def epoch_length(dataset: Any) -> int:
    """Return how many samples of ``dataset`` are an epoch.

    Raises:
        ConfigError: there is none.
    """
    own = own_order(dataset)
    length = len(dataset) if own is None else own.epoch_length
    _refuse_empty(length)
    return length


def _refuse_empty(length: int) -> None:
    if length == 0:
        raise ConfigError("the data have no samples. Check the path of the data, and what is held out of them.")


def logical_ranks_of(rank: int, size: int, total: int, dealing: Dealing = "cyclic") -> tuple[int, ...]:
    """Return the logical ranks of process ``rank`` of ``size``, of ``total`` that are dealt."""
    if dealing == "block":
        return tuple(range(rank * total // size, (rank + 1) * total // size))
    return tuple(range(rank, total, size))


def steps_of(epochs: float, length: int, batch_size: int) -> int:
    """Return the steps that draw every sample ``epochs`` times, rounded up."""
    return math.ceil(epochs * length / batch_size)


Lengths = Any  # a tensor or an array [samples], or whatever has the lengths of chosen ones when it is indexed with them
_POOL = 32  # steps whose samples are dealt together


@final
class Balanced:
    """Batches of samples of similar length.

    The samples of 32 steps are sorted by length and cut into steps, which come in an order that ``seed`` decides. Where
    an epoch ends within them, the samples before its end are sorted by themselves, so that none comes late or early. In
    a step the longest go to one logical rank each, the next ones the other way round, and so on. All of it follows from
    the step and the logical rank alone, so it is the same at any world size and after any resume.

    Args:
        plain: returns the samples of a step [batch], as they come without balancing.
        lengths_n: how long each sample of the data set is; only those of the samples of 32 steps are asked for.
        epoch: samples of an epoch, in each of which every sample comes once; None: there are no such epochs.
    """

    def __init__(
        self, plain: Callable[[int], Tensor], lengths_n: Lengths, *, seed: int, logical_ranks: int, epoch: int | None
    ) -> None:
        self._plain, self._lengths_n = plain, lengths_n
        self._seed, self._logical_ranks, self._epoch = seed, logical_ranks, epoch
        self._pool = lru_cache(maxsize=1)(self._sorted)

    def indices(self, step: int, logical_rank: int) -> Tensor:
        """Return the indices of the samples of ``logical_rank`` in ``step`` (from 1), the longest first."""
        pool, place = divmod(step - 1, _POOL)
        rows_ml = self._pool(pool)[place].view(-1, self._logical_ranks).clone()
        rows_ml[1::2] = rows_ml[1::2].flip(1)
        return rows_ml[:, logical_rank]

    def _sorted(self, pool: int) -> Tensor:
        """Return the pool's samples [steps, batch], each step's from the longest to the shortest."""
        samples = torch.cat([self._plain(pool * _POOL + step) for step in range(1, _POOL + 1)])
        lengths = torch.as_tensor(self._lengths_n[samples])
        random = torch.Generator().manual_seed(stream(self._seed, "balance", pool))
        batch_size = len(samples) // _POOL
        order = torch.cat([_by_length(lengths, part, batch_size, random) for part in self._epochs(pool, len(samples))])
        order_sb = order.view(_POOL, -1)
        return samples[order_sb.gather(1, lengths[order_sb].argsort(dim=1, descending=True, stable=True))]

    def _epochs(self, pool: int, size: int) -> list[range]:
        """Return the places of a pool that are of the same epoch, one epoch after the other."""
        epoch = self._epoch or (pool + 1) * size
        ends = range(epoch - pool * size % epoch, size, epoch)
        return [range(first, last) for first, last in pairwise([0, *ends, size])]


def _by_length(lengths: Tensor, places: range, batch_size: int, random: torch.Generator) -> Tensor:
    """Return ``places`` of a pool, dealt to the steps that they are of, whole or in part, by length."""
    steps = torch.arange(places.start, places.stop) // batch_size - places.start // batch_size
    sizes = steps.bincount()
    order = places.start + lengths[places.start : places.stop].argsort(descending=True, stable=True)
    turns = torch.randperm(len(sizes), generator=random)  # which of the cuts, from the longest on, each step has
    chosen = turns.argsort()
    cuts = order.tensor_split(sizes[chosen].cumsum(0)[:-1])
    return torch.cat([cuts[turn] for turn in turns.tolist()])


def sample_lengths(dataset: Any) -> Lengths:
    """Return the length of each sample of ``dataset``, whose batches are to be balanced.

    Raises:
        ConfigError: it has none, or is a stream.
    """
    if is_iterable(dataset):
        raise ConfigError("length_balanced=true changes the order of samples, which a stream does not let it do.")
    lengths: Lengths | None = getattr(dataset, "lengths", None)
    if lengths is None:
        raise ConfigError(
            f"length_balanced=true needs to know how long samples are, and {type(dataset).__name__} has no attribute "
            "lengths, a tensor [samples]. Add it to the recipe's data set, name the column of a table that has them "
            "(data.length_column), or set length_balanced=false."
        )
    return lengths


def balanced(dataset: Any, order: Order) -> Balanced:
    """Return the batches of ``dataset`` by length.

    Raises:
        ConfigError: the length of its samples is unknown.
    """
    lengths = sample_lengths(dataset)
    all_ranks = replace(order, logical_ranks=1)

    def plain(step: int) -> Tensor:
        return all_ranks.indices_in(dataset, step, 0)

    epoch = len(dataset) if own_order(dataset) is None else None
    return Balanced(plain, lengths, seed=order.seed, logical_ranks=order.logical_ranks, epoch=epoch)
