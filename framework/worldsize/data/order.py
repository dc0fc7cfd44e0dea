"""Order of training samples, determined only by the seed, the step and the logical rank.

The position in the data is therefore a single integer, the step. :class:`Balanced` regroups the samples of a window of
steps by length, so that all ranks take about equally long.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from worldsize.core import ConfigError, Dealing
from worldsize.data.batches import is_iterable
from worldsize.data.permutation import Shuffle
from worldsize.data.skips import NOTHING_SKIPPED, SkippedSamples
from worldsize.data.source import Transformed
from worldsize.seeds import derive_seed


class OwnOrder(ABC):
    """Base class of data sets that define the order of their samples, such as mixtures."""

    @property
    @abstractmethod
    def epoch_length(self) -> int:
        """Number of samples in an epoch; some samples may occur more than once or not at all."""

    @abstractmethod
    def indices_at(self, seed: int, places: range, shuffle: Shuffle) -> Tensor:
        """Return the sample indices, int64 [places], at positions of the endless sample sequence.

        Args:
            seed: the run's seed.
            places: consecutive positions, counted from 0 over all epochs.
            shuffle: how to permute the samples, except where the data set itself defines their order.
        """


def own_order(dataset: Any) -> OwnOrder | None:
    """Return ``dataset`` without transforms if it is an :class:`OwnOrder`, otherwise None."""
    while isinstance(dataset, Transformed):
        dataset = dataset.source
    return dataset if isinstance(dataset, OwnOrder) else None


@final
@dataclass(frozen=True)
class Order:
    """Order of training samples: one permutation per epoch, split by step and logical rank.

    Batches may span two epochs, so every sample is used exactly once per epoch at any batch size. Samples at the
    ``skipped`` positions are passed over, so later samples move to earlier steps.
    """

    seed: int
    batch_size: int  # samples per step, over all logical ranks
    logical_ranks: int
    mine: tuple[int, ...]  # logical ranks of this process
    balanced: bool = False  # whether to regroup samples by length (see Balanced)
    shuffle: Shuffle = field(default_factory=Shuffle)
    skipped: SkippedSamples = NOTHING_SKIPPED

    @property
    def micro_batch_size(self) -> int:
        """Samples per step and logical rank."""
        return self.batch_size // self.logical_ranks

    def positions(self, step: int, logical_rank: int) -> list[range]:
        """Return a logical rank's positions in the endless sample sequence for ``step`` (from 1), in order.

        They are consecutive, except where samples are skipped.
        """
        first = (step - 1) * self.batch_size + logical_rank * self.micro_batch_size
        return self.skipped.find_positions(range(first, first + self.micro_batch_size))

    def indices_in(self, dataset: Any, step: int, logical_rank: int) -> Tensor:
        """Return one logical rank's sample indices in ``step``: int64 [micro_batch_size]."""
        if (own := own_order(dataset)) is not None:
            positions = self.positions(step, logical_rank)
            return _join([own.indices_at(self.seed, places, self.shuffle) for places in positions])
        return self.compute_indices(step, logical_rank, len(dataset))

    def compute_indices(self, step: int, logical_rank: int, length: int) -> Tensor:
        """Return one logical rank's indices in ``step``, int64 [micro_batch_size].

        ``length``: number of samples.

        Raises:
            ConfigError: ``length`` is 0.
        """
        _refuse_empty(length)
        parts = []
        for positions in self.positions(step, logical_rank):
            while positions:
                epoch, offset = divmod(positions.start, length)
                taken = min(len(positions), length - offset)
                seed = derive_seed(self.seed, "order", epoch)
                parts.append(self.shuffle.permute_span(seed, length, range(offset, offset + taken)))
                positions = positions[taken:]
        return _join(parts)

    def step_seed(self, step: int, logical_rank: int) -> int:
        """Return the 63-bit random seed of one logical rank in ``step``."""
        return step_seed(self.seed, step, logical_rank)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def epoch_length(dataset: Any) -> int:
    """Return the number of samples in an epoch of ``dataset``.

    Raises:
        ConfigError: ``dataset`` is empty.
    """
    own = own_order(dataset)
    length = len(dataset) if own is None else own.epoch_length
    _refuse_empty(length)
    return length


def _refuse_empty(length: int) -> None:
    if length == 0:
        raise ConfigError("the data set is empty. Check the data path and the held-out share.")


def step_seed(seed: int, step: int, logical_rank: int) -> int:
    """Derive the 63-bit random seed of a logical rank in ``step`` from the run's ``seed``."""
    return derive_seed(seed, "step", step, logical_rank)


def assign_logical_ranks(rank: int, size: int, total: int, dealing: Dealing = "cyclic") -> tuple[int, ...]:
    """Return the logical ranks, out of ``total``, of process ``rank`` among ``size`` processes.

    With "cyclic" dealing, these are every ``size``-th logical rank; with "block", a contiguous range.
    """
    if dealing == "block":
        return tuple(range(rank * total // size, (rank + 1) * total // size))
    return tuple(range(rank, total, size))


def count_epoch_steps(epochs: float, length: int, batch_size: int) -> int:
    """Return the number of steps in ``epochs`` epochs of ``length`` samples, rounded up."""
    return math.ceil(epochs * length / batch_size)


Lengths = Any  # tensor or array [samples], or an object that returns lengths when indexed with sample indices
_POOL = 32  # number of steps whose samples are sorted together


@final
class Balanced:
    """Batches of samples of similar length.

    The samples of 32 steps are sorted by length and divided into batches in an order that depends on ``seed``. If an
    epoch ends within the 32 steps, the samples before and after its end are sorted separately, so that each stays in
    its epoch. Within a step, samples are dealt to logical ranks in snake order, from longest to shortest. The result
    depends only on the step and the logical rank, so it is the same at any world size and after any resume.

    Args:
        plain: returns the indices of a step's samples [batch] without balancing.
        lengths_n: length of each sample of the data set; looked up for the samples of 32 steps at a time.
        epoch: samples per epoch if every sample occurs once per epoch; None otherwise.
        skipped: positions to skip in the sequence of balanced batches, so that earlier batches do not change.
    """

    def __init__(
        self,
        plain: Callable[[int], Tensor],
        lengths_n: Lengths,
        *,
        seed: int,
        logical_ranks: int,
        epoch: int | None,
        skipped: SkippedSamples = NOTHING_SKIPPED,
    ) -> None:
        self._plain, self._lengths_n = plain, lengths_n
        self._seed, self._logical_ranks, self._epoch, self._skipped = seed, logical_ranks, epoch, skipped
        self._pool = lru_cache(maxsize=2)(self._sort_pool)  # a step with skipped samples may need two pools

    def compute_rank_indices(self, step: int, logical_rank: int) -> Tensor:
        """Return the sample indices of ``logical_rank`` in ``step`` (from 1), longest sample first."""
        rows_ml = self._compute_step(step).view(-1, self._logical_ranks).clone()
        rows_ml[1::2] = rows_ml[1::2].flip(1)
        return rows_ml[:, logical_rank]

    def _compute_step(self, step: int) -> Tensor:
        """Return the sample indices of ``step`` [batch], longest sample first."""
        if not self._skipped.ranges:
            pool, place = divmod(step - 1, _POOL)
            return self._pool(pool)[place]
        size = self._batch_size
        places = self._skipped.find_positions(range((step - 1) * size, step * size))
        samples = _join([part for each in places for part in self._read_pools(each)])
        if len(places) == 1 and places[0].start % size == 0:
            return samples
        return samples[torch.as_tensor(self._lengths_n[samples]).argsort(descending=True, stable=True)]

    @cached_property
    def _batch_size(self) -> int:
        return len(self._plain(1))

    def _read_pools(self, places: range) -> Iterator[Tensor]:
        """Yield the sample indices at consecutive positions of the sequence of balanced batches."""
        while places:
            pool, offset = divmod(places.start, _POOL * self._batch_size)
            part = self._pool(pool).flatten()[offset : offset + len(places)]
            yield part
            places = places[len(part) :]

    def _sort_pool(self, pool: int) -> Tensor:
        """Return a pool's sample indices [steps, batch], rows sorted from longest to shortest."""
        samples = torch.cat([self._plain(pool * _POOL + step) for step in range(1, _POOL + 1)])
        lengths = torch.as_tensor(self._lengths_n[samples])
        random = torch.Generator().manual_seed(derive_seed(self._seed, "balance", pool))
        batch_size = len(samples) // _POOL
        order = torch.cat(
            [_sort_by_length(lengths, part, batch_size, random) for part in self._split_epochs(pool, len(samples))]
        )
        order_sb = order.view(_POOL, -1)
        return samples[order_sb.gather(1, lengths[order_sb].argsort(dim=1, descending=True, stable=True))]

    def _split_epochs(self, pool: int, size: int) -> list[range]:
        """Split the positions of a pool at the ends of epochs."""
        epoch = self._epoch or (pool + 1) * size
        ends = range(epoch - pool * size % epoch, size, epoch)
        return [range(first, last) for first, last in pairwise([0, *ends, size])]


def _sort_by_length(lengths: Tensor, places: range, batch_size: int, random: torch.Generator) -> Tensor:
    """Sort positions of a pool by length, and divide them among their steps in random order."""
    steps = torch.arange(places.start, places.stop) // batch_size - places.start // batch_size
    sizes = steps.bincount()
    order = places.start + lengths[places.start : places.stop].argsort(descending=True, stable=True)
    turns = torch.randperm(len(sizes), generator=random)  # index of each step's group; group 0 has the longest samples
    chosen = turns.argsort()
    cuts = order.tensor_split(sizes[chosen].cumsum(0)[:-1])
    return torch.cat([cuts[turn] for turn in turns.tolist()])


def refuse_skips(dataset: Any) -> None:
    """Raise ConfigError if samples of ``dataset`` cannot be skipped, because they have no positions."""
    if is_iterable(dataset):
        raise ConfigError(
            "skip_samples and spike.on_spike=rewind require an indexable data set, but the data are a stream, whose "
            "samples have no positions. Return an indexable data set, or remove these options."
        )


@final
class SampleDigest:
    """Digests of the sample indices of an ``order``, over all logical ranks, for a map-style ``dataset``."""

    def __init__(self, dataset: Any, order: Order) -> None:
        self._dataset, self._order = dataset, replace(order, logical_ranks=1)
        self._balanced = create_balanced_order(dataset, order) if order.balanced else None
        self._ranks = range(order.logical_ranks)

    def digest_steps(self, steps: range) -> str:
        """Return the SHA-256 of the indices of ``steps``, as little-endian int64, by step and logical rank."""
        digest = hashlib.sha256()
        for step in steps:
            digest.update(self._compute_indices(step).numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def _compute_indices(self, step: int) -> Tensor:
        if self._balanced is None:
            return self._order.indices_in(self._dataset, step, 0)  # logical ranks have consecutive parts of a step
        return torch.cat([self._balanced.compute_rank_indices(step, rank) for rank in self._ranks])


def sample_lengths(dataset: Any) -> Lengths:
    """Return the sample lengths of ``dataset``, for length balancing.

    Raises:
        ConfigError: the data set does not provide lengths, or is a stream.
    """
    if is_iterable(dataset):
        raise ConfigError(
            "length_balanced=true requires an indexable data set, but the data are a stream. Set length_balanced=false."
        )
    lengths: Lengths | None = getattr(dataset, "lengths", None)
    if lengths is None:
        raise ConfigError(
            f"length_balanced=true requires sample lengths, but {type(dataset).__name__} does not have the attribute "
            "lengths (a tensor of shape [samples]). Add the attribute to the recipe's data set, set "
            "data.length_column to the table column with the lengths, or set length_balanced=false."
        )
    return lengths


def create_balanced_order(dataset: Any, order: Order) -> Balanced:
    """Create the length-balanced order of ``dataset``.

    Raises:
        ConfigError: the data set does not provide lengths, or is a stream.
    """
    lengths = sample_lengths(dataset)
    all_ranks = replace(order, logical_ranks=1, skipped=NOTHING_SKIPPED)

    def compute_plain_indices(step: int) -> Tensor:
        return all_ranks.indices_in(dataset, step, 0)

    epoch = len(dataset) if own_order(dataset) is None else None
    return Balanced(
        compute_plain_indices,
        lengths,
        seed=order.seed,
        logical_ranks=order.logical_ranks,
        epoch=epoch,
        skipped=order.skipped,
    )
