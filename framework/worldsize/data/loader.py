"""Loads the batches of each step: in this process, or ahead of it in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from worldsize.core import Batch, ConfigError, MicroBatch
from worldsize.data.balanced import Balanced
from worldsize.data.fetch import Collate, fetch, is_iterable, to_device
from worldsize.data.order import Order
from worldsize.data.reader_process import begin_worker
from worldsize.data.streams import TrainingStream
from worldsize.reproducibility.seeds import seed_generators, stream

_CPU = torch.device("cpu")


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
        workers: processes that load map-style data ahead, of which a stream takes one; 0 loads in this process.
        collate: makes a batch of a list of samples.
    """
    if order.balanced and is_iterable(dataset):
        raise ConfigError("length_balanced=true changes the order of samples, which a stream does not let it do.")
    if is_iterable(dataset):
        source = dataset if isinstance(dataset, TrainingStream) else TrainingStream(dataset)
        pinned = device.type == "cuda"
        batches: Iterable[Batch] = source.batches(order, first, collate, workers=workers, pinned=pinned)
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
        worker_init_fn=partial(begin_worker, os.getpid()),
        pin_memory=device.type == "cuda",
    )
    return loader


def _as_it_is(batch: Batch) -> Batch:
    return batch
