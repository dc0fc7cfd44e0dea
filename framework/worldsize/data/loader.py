"""Decides which samples a step sees, by seed, step and logical rank alone, and loads them.

So the position in the data is one number, the step.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from worldsize.core import Batch, ConfigError, Dealing, EvaluationBatch, MicroBatch, Recipe, World
from worldsize.data.balanced import Balanced
from worldsize.data.permutation import permuted
from worldsize.reproducibility.seeds import seed_generators, stream
from worldsize.world.parent import die_with_parent
from worldsize.world.preemption import SIGNALS

_CPU = torch.device("cpu")


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
    balanced: bool = False  # samples change places with those of neighbouring steps: data/balanced.py

    @property
    def micro_batch_size(self) -> int:
        """Samples of one logical rank in a step."""
        return self.batch_size // self.logical_ranks

    def positions(self, step: int, logical_rank: int) -> range:
        """Return the places that ``logical_rank`` takes in the endless stream of samples in ``step`` (from 1)."""
        first = (step - 1) * self.batch_size + logical_rank * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def indices(self, step: int, logical_rank: int, length: int) -> Tensor:
        """Return dataset indices, int64 [micro_batch_size], for a data set of ``length`` samples."""
        positions = self.positions(step, logical_rank)
        parts = []
        while positions:
            epoch, offset = divmod(positions.start, length)
            taken = min(len(positions), length - offset)
            parts.append(permuted(stream(self.seed, "order", epoch), length, range(offset, offset + taken)))
            positions = positions[taken:]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def step_seed(self, step: int, logical_rank: int) -> int:
        """Return the 63-bit seed of what one logical rank draws while it computes ``step``."""
        return stream(self.seed, "step", step, logical_rank)


def logical_ranks_of(rank: int, size: int, total: int, dealing: Dealing = "cyclic") -> tuple[int, ...]:
    """Return the logical ranks of process ``rank`` of ``size``, of ``total`` that are dealt."""
    if dealing == "block":
        return tuple(range(rank * total // size, (rank + 1) * total // size))
    return tuple(range(rank, total, size))


Collate = Callable[[list[Any]], Batch]


def collate_of(recipe: Recipe) -> Collate:
    """Return how ``recipe`` makes batches of samples: torch's own way, which data sets may shorten, unless it says."""
    return default_collate if type(recipe).collate is Recipe.collate else recipe.collate


def fetch(dataset: Any, indices: Tensor, collate: Collate = default_collate) -> Batch:
    """Load one batch by the widest access that the data set offers.

    It may load whole batches (``load_batch``), lists of samples (``__getitems__``) or single ones (``__getitem__``);
    ``collate`` makes a batch of samples.
    """
    if hasattr(dataset, "load_batch"):
        return dataset.load_batch(indices)
    if isinstance(dataset, torch.utils.data.TensorDataset) and collate is default_collate:
        return tuple(tensor[indices] for tensor in dataset.tensors)
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(indices.tolist()))
    return collate([dataset[index] for index in indices.tolist()])


class _Request(NamedTuple):
    step: int
    logical_rank: int


def _requests(order: Order, first: int) -> Iterator[_Request]:
    return (_Request(step, rank) for step in count(first + 1) for rank in order.mine)


@final
class _Fetcher(Dataset[Batch]):
    """Loads the batch of a request, in this process or in a data worker."""

    def __init__(self, dataset: Any, order: Order, collate: Collate) -> None:
        self.dataset = dataset
        self.order = order
        self._collate = collate
        self._balanced = _balanced(dataset, order) if order.balanced else None

    def __getitems__(self, request: _Request) -> Batch:
        seed_generators(stream(self.order.seed, "data", *request), _CPU)
        if self._balanced:
            return fetch(self.dataset, self._balanced.indices(*request), self._collate)
        return fetch(self.dataset, self.order.indices(*request, len(self.dataset)), self._collate)


def _balanced(dataset: Any, order: Order) -> Balanced:
    lengths = getattr(dataset, "lengths", None)
    if lengths is None:
        raise ConfigError(
            f"length_balanced=true needs to know how long samples are, and {type(dataset).__name__} has no attribute "
            "lengths, a tensor [samples]. Add it to the recipe's data set, or set length_balanced=false."
        )
    whole = replace(order, logical_ranks=1)

    def plain(step: int) -> Tensor:
        return whole.indices(step, 0, len(dataset))

    return Balanced(plain, torch.as_tensor(lengths), seed=order.seed, logical_ranks=order.logical_ranks)


def micro_batches(
    dataset: Any,
    order: Order,
    device: torch.device,
    *,
    first: int = 0,
    workers: int = 0,
    collate: Collate = default_collate,
) -> Iterator[list[MicroBatch]]:
    """Yield this process's micro-batches of step ``first + 1`` and of every later one, without end.

    Args:
        workers: processes that load map-style data ahead; 0 loads in this process.
        collate: makes a batch of a list of samples.
    """
    if order.balanced and is_iterable(dataset):
        raise ConfigError("length_balanced=true changes the order of samples, which a stream does not let it do.")
    if is_iterable(dataset):
        batches: Iterable[Batch] = _streamed(dataset, order, first, collate)
    else:
        batches = _drawn(_Fetcher(dataset, order, collate), first, device, workers)
    tagged = (
        MicroBatch(to_device(batch, device), order.step_seed(*request), request.step)
        for batch, request in zip(batches, _requests(order, first), strict=False)
    )
    while step := list(islice(tagged, len(order.mine))):
        yield step


def drawn(
    dataset: Any, order: Order, device: torch.device, step: int, logical_rank: int, collate: Collate = default_collate
) -> MicroBatch:
    """Load one micro-batch of any step, from a data set with an index."""
    batch = _Fetcher(dataset, order, collate).__getitems__(_Request(step, logical_rank))
    return MicroBatch(to_device(batch, device), order.step_seed(step, logical_rank), step)


def _drawn(fetcher: _Fetcher, first: int, device: torch.device, workers: int) -> Iterable[Batch]:
    requests = _requests(fetcher.order, first)
    if workers == 0:
        return map(fetcher.__getitems__, requests)
    loader: DataLoader[Batch] = DataLoader(
        fetcher,
        batch_sampler=requests,  # type: ignore[arg-type]  # a request stands for its list of indices
        collate_fn=_as_it_is,
        num_workers=workers,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        pin_memory=device.type == "cuda",
    )
    return loader


def _begin_worker(parent: int, _: int) -> None:
    die_with_parent(parent)
    for number in SIGNALS:  # they may reach every process; this one is needed until the training process ends
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _streamed(dataset: Iterable[Any], order: Order, first: int, collate: Collate) -> Iterator[Batch]:
    """Read the whole stream in every process, again and again, and yield what is of its logical ranks."""
    endless = chain.from_iterable(map(_nonempty, repeat(dataset)))
    samples = islice(endless, first * order.batch_size, None)
    while True:
        whole = list(islice(samples, order.batch_size))
        for rank in order.mine:
            begin = rank * order.micro_batch_size
            yield collate(whole[begin : begin + order.micro_batch_size])


def _nonempty(dataset: Iterable[Any]) -> Iterator[Any]:
    empty = True
    for sample in dataset:
        empty = False
        yield sample
    if empty:
        raise ConfigError("the training stream is empty. Check the data path of the recipe.")


def is_iterable(dataset: Any) -> bool:
    """Tell whether a data set is a stream: it has no length and no index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a nested batch to ``device``; for the CPU return the batch as it is."""
    if device.type == "cpu":
        return batch
    return apply_to_collection(batch, Tensor, lambda tensor: tensor.to(device, non_blocking=True))


def evaluation_batches(
    dataset: Any,
    world: World,
    *,
    batch_size: int,
    collate: Collate = default_collate,
    drawn: int | None = None,
    seed: int = 0,
) -> Iterator[EvaluationBatch]:
    """Yield this rank's share of the evaluation set, which is cut into the same batches at every world size.

    Batch b goes to rank b mod size. All ranks yield equally many: one that is short repeats its last batch, or takes
    the set's first, with ``counted=False``. With ``drawn``, that many batches of samples drawn with replacement make up
    the evaluation, not the whole set. These, and what a batch's evaluation draws, follow from ``seed`` and the batch's
    number.
    """
    if drawn is not None:
        numbered = _random(dataset, batch_size, collate, drawn, seed)
    else:
        numbered = (_cut_stream if is_iterable(dataset) else _cut)(dataset, batch_size, collate)
    spare, index = None, -1
    for index, load in numbered:
        if index % world.size == world.rank:
            yield EvaluationBatch(index, to_device(load(), world.device), seed=stream(seed, "evaluation", index))
            spare = load
        spare = spare or load
    if spare is None:
        raise ConfigError("the evaluation set is empty. Check the data path of the recipe.")
    if index % world.size < world.rank:
        yield EvaluationBatch(index, to_device(spare(), world.device), counted=False)


def _random(
    dataset: Any, batch_size: int, collate: Collate, count: int, seed: int
) -> Iterator[tuple[int, Callable[[], Batch]]]:
    if is_iterable(dataset):
        raise ConfigError(
            "evaluation.batches draws samples by index, which a stream does not have. Set evaluation.batches=null."
        )
    if len(dataset) == 0:
        return
    for index in range(count):
        generator = torch.Generator().manual_seed(stream(seed, "batch", index))
        indices = torch.randint(len(dataset), (batch_size,), generator=generator)
        yield index, partial(fetch, dataset, indices, collate)


def _cut(dataset: Any, batch_size: int, collate: Collate) -> Iterator[tuple[int, Callable[[], Batch]]]:
    length = len(dataset)
    for index, first in enumerate(range(0, length, batch_size)):
        yield index, partial(_fetch_range, dataset, range(first, min(first + batch_size, length)), collate)


def _fetch_range(dataset: Any, indices: range, collate: Collate) -> Batch:
    return fetch(dataset, torch.arange(indices.start, indices.stop), collate)


def _cut_stream(dataset: Iterable[Any], batch_size: int, collate: Collate) -> Iterator[tuple[int, Callable[[], Batch]]]:
    samples = iter(dataset)
    parts = iter(lambda: list(islice(samples, batch_size)), [])
    for index, part in enumerate(parts):
        yield index, partial(collate, part)


def steps_of(epochs: float, length: int, batch_size: int) -> int:
    """Return the steps that draw every sample ``epochs`` times, rounded up."""
    return math.ceil(epochs * length / batch_size)
