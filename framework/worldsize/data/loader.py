"""Loads the batches of each training step and of each evaluation.

Training batches arrive on the device. An evaluation set is cut into the same batches at every world size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import default_collate

from worldsize.core import Batch, ConfigError, EvaluationBatch, MicroBatch, World
from worldsize.data.batches import Collate, SideStream, copied_ahead, fetch, is_iterable, to_device
from worldsize.data.data_wait import DataWait, Patience
from worldsize.data.order import Order, balanced, sample_lengths
from worldsize.data.source import Source, count_skipped
from worldsize.data.storage.byte_files import SampleError
from worldsize.data.streams import TrainingStream
from worldsize.data.worker_loader import AutoWorkers, Request, WorkerLoader, loaded, loaded_by
from worldsize.record.determinism import seed_generators, stream

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


class _Loaded(NamedTuple):
    """A batch, and whether it is part of the evaluation."""

    data: Batch
    counted: bool = True


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

    A batch lacks the samples that cannot be read and are skipped. One that would have none is of others, with
    ``counted=False``.
    """
    if drawn is not None:
        numbered = _random(dataset, batch_size, collate, drawn, seed)
    else:
        numbered = (_cut_stream if is_iterable(dataset) else _cut)(dataset, batch_size, collate)
    spare, index = None, -1
    for index, load in numbered:
        if index % world.size == world.rank:
            loaded = load()
            data, draws = to_device(loaded.data, world.device), stream(seed, "evaluation", index)
            yield EvaluationBatch(index, data, loaded.counted, draws)
            spare = load
        spare = spare or load
    if spare is None:
        raise ConfigError("the evaluation set is empty. Check the data path of the recipe.")
    if index % world.size < world.rank:
        yield EvaluationBatch(index, to_device(spare().data, world.device), counted=False)


def _random(
    dataset: Any, batch_size: int, collate: Collate, count: int, seed: int
) -> Iterator[tuple[int, Callable[[], _Loaded]]]:
    if is_iterable(dataset):
        raise ConfigError(
            "evaluation.batches draws samples by index, which a stream does not have. Set evaluation.batches=null."
        )
    if len(dataset) == 0:
        return
    for index in range(count):
        generator = torch.Generator().manual_seed(stream(seed, "batch", index))
        indices = torch.randint(len(dataset), (batch_size,), generator=generator)
        yield index, partial(_load, dataset, indices, collate)


def _cut(dataset: Any, batch_size: int, collate: Collate) -> Iterator[tuple[int, Callable[[], _Loaded]]]:
    length = len(dataset)
    for index, first in enumerate(range(0, length, batch_size)):
        yield index, partial(_load_range, dataset, range(first, min(first + batch_size, length)), collate)


def _load_range(dataset: Any, indices: range, collate: Collate) -> _Loaded:
    return _load(dataset, torch.arange(indices.start, indices.stop), collate)


def _load(dataset: Any, indices: Tensor, collate: Collate) -> _Loaded:
    if not isinstance(dataset, Source) or hasattr(dataset, "load_batch"):
        return _Loaded(fetch(dataset, indices, collate))
    good = []
    for index, sample in zip(indices.tolist(), dataset.read_each(indices.tolist()), strict=True):
        if isinstance(sample, SampleError):
            count_skipped(index, sample)
        else:
            good.append(sample)
    return _Loaded(collate(good)) if good else _Loaded(fetch(dataset, indices, collate), counted=False)


def _cut_stream(
    dataset: Iterable[Any], batch_size: int, collate: Collate
) -> Iterator[tuple[int, Callable[[], _Loaded]]]:
    samples = iter(dataset)
    parts = iter(lambda: list(islice(samples, batch_size)), [])
    for index, part in enumerate(parts):
        yield index, partial(_load_samples, part, collate)


def _load_samples(samples: list[Any], collate: Collate) -> _Loaded:
    return _Loaded(collate(samples))
