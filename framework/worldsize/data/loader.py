"""Loads the batches of each step, and brings them to the device."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import count, islice
from typing import Any, final

import torch
from torch.utils.data import default_collate

from worldsize.core import Batch, MicroBatch
from worldsize.data.auto_workers import AutoWorkers
from worldsize.data.balanced import balanced, sample_lengths
from worldsize.data.batches import to_device
from worldsize.data.copies import SideStream, copied_ahead
from worldsize.data.data_wait import DataWait, Patience
from worldsize.data.fetch import Collate, fetch, is_iterable
from worldsize.data.order import Order
from worldsize.data.streams import TrainingStream
from worldsize.data.worker_loader import Request, WorkerLoader, loaded, loaded_by
from worldsize.record.seeds import seed_generators, stream

_CPU = torch.device("cpu")


@final
class _Fetcher:
    """Loads the batch of a request, in this process or in a data worker."""

    def __init__(self, dataset: Any, order: Order, collate: Collate) -> None:
        self._dataset, self._order, self._collate = dataset, order, collate
        self._balanced = balanced(dataset, order) if order.balanced else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out how batches are balanced, which a worker that is not forked computes anew."""
        return _Fetcher, (self._dataset, self._order, self._collate)

    def __getitems__(self, request: Request) -> Batch:
        seed_generators(stream(self._order.seed, "data", *request), _CPU)
        if self._balanced:
            return fetch(self._dataset, self._balanced.indices(*request), self._collate)
        return fetch(self._dataset, self._order.indices_in(self._dataset, *request), self._collate)


def micro_batches(
    dataset: Any,
    order: Order,
    device: torch.device,
    *,
    first: int = 0,
    workers: int | AutoWorkers = 0,
    collate: Collate = default_collate,
    patience: Patience | None = None,
) -> Generator[list[MicroBatch]]:
    """Yield this process's micro-batches of step ``first + 1`` and of every later one, without end.

    If the data have an index, the micro-batches of the next step are copied to a GPU while a step computes.

    Args:
        dataset: the training data: a map-style data set or a stream.
        order: decides which samples each step and each logical rank takes.
        device: where the batches are to be.
        first: number of the last step that is not loaded.
        workers: processes that load map-style data ahead, of which a stream takes one; 0 loads in this process,
            as a stream does where the number is decided automatically.
        collate: makes a batch of a list of samples.
        patience: the limits of each wait for data; None: there are none.
    """
    wait = DataWait(patience or Patience())
    with wait.watched():
        yield from _micro_batches(dataset, order, device, wait, first=first, workers=workers, collate=collate)


def _micro_batches(
    dataset: Any,
    order: Order,
    device: torch.device,
    wait: DataWait,
    *,
    first: int,
    workers: int | AutoWorkers,
    collate: Collate,
) -> Iterator[list[MicroBatch]]:
    if is_iterable(dataset):
        if order.balanced:
            sample_lengths(dataset)  # refuses a stream
        source = dataset if isinstance(dataset, TrainingStream) else TrainingStream(dataset)
        processes = workers if isinstance(workers, int) else 0  # whose place in a stream changes with each sample
        batches = source.batches(order, first, collate, workers=processes, pinned=device.type == "cuda", wait=wait)
        yield from _tagged((list(islice(batches, len(order.mine))) for _ in count()), order, first, device)
    else:
        steps = _drawn(_Fetcher(dataset, order, collate), order, device, wait, first=first, workers=workers)
        if device.type == "cuda":
            yield from copied_ahead(_tagged(steps, order, first, _CPU), SideStream(device))
        else:
            yield from _tagged(steps, order, first, device)


def _drawn(
    fetcher: _Fetcher,
    order: Order,
    device: torch.device,
    wait: DataWait,
    *,
    first: int,
    workers: int | AutoWorkers,
) -> Iterator[list[Batch]]:
    if isinstance(workers, int):
        return loaded(fetcher, order.mine, device, first=first, workers=workers, wait=wait)

    def make(first: int, processes: int) -> WorkerLoader:
        return WorkerLoader(fetcher, first, order.mine, device, processes)

    return loaded_by(workers, make, first=first, batches=len(order.mine), wait=wait)


def _tagged(steps: Iterator[list[Batch]], order: Order, first: int, device: torch.device) -> Iterator[list[MicroBatch]]:
    for step, batches in enumerate(steps, first + 1):
        ranked = zip(order.mine, batches, strict=True)
        yield [MicroBatch(to_device(batch, device), order.step_seed(step, rank), step, rank) for rank, batch in ranked]


def drawn(
    dataset: Any, order: Order, device: torch.device, step: int, logical_rank: int, collate: Collate = default_collate
) -> MicroBatch:
    """Load one micro-batch of any step, from a data set with an index."""
    batch = _Fetcher(dataset, order, collate).__getitems__((step, logical_rank))
    return MicroBatch(to_device(batch, device), order.step_seed(step, logical_rank), step, logical_rank)
