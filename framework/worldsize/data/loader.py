"""Load batches for training and evaluation, and move them to the device.

An evaluation set is split into the same batches at every world size.
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
from worldsize.data.batches import Collate, SideStream, fetch_batch, is_iterable, prefetch_copies, to_device
from worldsize.data.data_wait import DataWait, Patience
from worldsize.data.order import Order, create_balanced_order, sample_lengths
from worldsize.data.source import Source, count_skipped
from worldsize.data.storage.byte_files import SampleError
from worldsize.data.streams import TrainingStream
from worldsize.data.worker_loader import AutoWorkers, Request, WorkerLoader, load_batches, load_with_auto_workers
from worldsize.seeds import derive_seed, seed_generators

_CPU = torch.device("cpu")


@final
class _Fetcher:
    """Loads the batch for a request, in this process or in a data worker."""

    def __init__(self, dataset: Any, order: Order, collate: Collate) -> None:
        self._dataset, self._order, self._collate = dataset, order, collate
        self._balanced = create_balanced_order(dataset, order) if order.balanced else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the length balancing, which a spawned worker recomputes."""
        return _Fetcher, (self._dataset, self._order, self._collate)

    def __getitems__(self, request: Request) -> Batch:
        seed_generators(derive_seed(self._order.seed, "data", *request), _CPU)
        if self._balanced:
            return fetch_batch(self._dataset, self._balanced.compute_rank_indices(*request), self._collate)
        return fetch_batch(self._dataset, self._order.indices_in(self._dataset, *request), self._collate)


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
    """Yield this process's micro-batches for each step from ``first + 1`` on, endlessly.

    For map-style data on a GPU, the micro-batches of the next step are copied during the current step.

    Args:
        dataset: the training data: a map-style data set or a stream.
        order: determines the samples of each step and logical rank.
        device: target device of the batches.
        first: number of the last completed step.
        workers: number of processes that load ahead; a stream uses at most one. 0 loads in this process, as does
            :class:`AutoWorkers` for a stream.
        collate: combines a list of samples into a batch.
        patience: limits for each wait for data; None for unlimited waits.
    """
    wait = DataWait(patience or Patience())
    with wait.run_watchdog():
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
            sample_lengths(dataset)  # raises for a stream
        source = dataset if isinstance(dataset, TrainingStream) else TrainingStream(dataset)
        processes = workers if isinstance(workers, int) else 0  # AutoWorkers restarts loaders, which needs an index
        batches = source.read_batches(order, first, collate, workers=processes, pinned=device.type == "cuda", wait=wait)
        yield from _create_micro_batches(
            (list(islice(batches, len(order.mine))) for _ in count()), order, first, device
        )
    else:
        steps = _load_steps(_Fetcher(dataset, order, collate), order, device, wait, first=first, workers=workers)
        if device.type == "cuda":
            yield from prefetch_copies(_create_micro_batches(steps, order, first, _CPU), SideStream(device))
        else:
            yield from _create_micro_batches(steps, order, first, device)


def _load_steps(
    fetcher: _Fetcher,
    order: Order,
    device: torch.device,
    wait: DataWait,
    *,
    first: int,
    workers: int | AutoWorkers,
) -> Iterator[list[Batch]]:
    if isinstance(workers, int):
        return load_batches(fetcher, order.mine, device, first=first, workers=workers, wait=wait)

    def create_loader(first: int, processes: int) -> WorkerLoader:
        return WorkerLoader(fetcher, first, order.mine, device, processes)

    return load_with_auto_workers(workers, create_loader, first=first, batches=len(order.mine), wait=wait)


def _create_micro_batches(
    steps: Iterator[list[Batch]], order: Order, first: int, device: torch.device
) -> Iterator[list[MicroBatch]]:
    for step, batches in enumerate(steps, first + 1):
        ranked = zip(order.mine, batches, strict=True)
        yield [MicroBatch(to_device(batch, device), order.step_seed(step, rank), step, rank) for rank, batch in ranked]


@final
class MicroBatchLoader:
    """Loads single micro-batches of a map-style data set, of any step (from 1) and logical rank, in this process."""

    def __init__(self, dataset: Any, order: Order, device: torch.device, collate: Collate = default_collate) -> None:
        self._fetcher, self._order, self._device = _Fetcher(dataset, order, collate), order, device

    def load(self, step: int, logical_rank: int) -> MicroBatch:
        """Load the data of ``logical_rank`` for ``step``; this seeds all random generators."""
        batch = self._fetcher.__getitems__((step, logical_rank))
        seed = self._order.step_seed(step, logical_rank)
        return MicroBatch(to_device(batch, self._device), seed, step, logical_rank)


def load_micro_batch(
    dataset: Any, order: Order, device: torch.device, step: int, logical_rank: int, collate: Collate = default_collate
) -> MicroBatch:
    """Load one micro-batch, as :class:`MicroBatchLoader` does."""
    return MicroBatchLoader(dataset, order, device, collate).load(step, logical_rank)


class _Loaded(NamedTuple):
    """A batch, and whether it counts toward the evaluation."""

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
    """Yield this rank's share of the evaluation batches, which are the same at every world size.

    Batches are dealt to the ranks in turn. All ranks yield the same number of batches: a rank that is one batch short
    repeats its last batch, or the first batch of the set if it has none, with ``counted=False``. With ``drawn``, the
    evaluation consists of that many batches of samples drawn with replacement, instead of the full set. Drawn samples
    and the random numbers for their evaluation depend only on ``seed`` and the batch index.

    Unreadable samples are omitted if the source skips them. A batch with only unreadable samples contains readable
    ones instead, with ``counted=False``.

    Raises:
        ConfigError: the set is empty, or a stream cannot be drawn from.
    """
    if drawn is not None:
        numbered = _draw_random_batches(dataset, batch_size, collate, drawn, seed)
    else:
        numbered = (_cut_stream if is_iterable(dataset) else _split_into_batches)(dataset, batch_size, collate)
    spare, index = None, -1
    for index, load in numbered:
        if index % world.size == world.rank:
            loaded = load()
            data, draws = to_device(loaded.data, world.device), derive_seed(seed, "evaluation", index)
            yield EvaluationBatch(index, data, loaded.counted, draws)
            spare = load
        spare = spare or load
    if spare is None:
        raise ConfigError("the evaluation set is empty. Check the data path of the recipe.")
    if index % world.size < world.rank:
        yield EvaluationBatch(index, to_device(spare().data, world.device), counted=False)


def _draw_random_batches(
    dataset: Any, batch_size: int, collate: Collate, count: int, seed: int
) -> Iterator[tuple[int, Callable[[], _Loaded]]]:
    if is_iterable(dataset):
        raise ConfigError(
            "evaluation.batches requires an indexable data set, but the data are a stream. Set evaluation.batches=null."
        )
    if len(dataset) == 0:
        return
    for index in range(count):
        generator = torch.Generator().manual_seed(derive_seed(seed, "batch", index))
        indices = torch.randint(len(dataset), (batch_size,), generator=generator)
        yield index, partial(_load_indices, dataset, indices, collate)


def _split_into_batches(dataset: Any, batch_size: int, collate: Collate) -> Iterator[tuple[int, Callable[[], _Loaded]]]:
    length = len(dataset)
    for index, first in enumerate(range(0, length, batch_size)):
        yield index, partial(_load_range, dataset, range(first, min(first + batch_size, length)), collate)


def _load_range(dataset: Any, indices: range, collate: Collate) -> _Loaded:
    return _load_indices(dataset, torch.arange(indices.start, indices.stop), collate)


def _load_indices(dataset: Any, indices: Tensor, collate: Collate) -> _Loaded:
    if not isinstance(dataset, Source) or hasattr(dataset, "load_batch"):
        return _Loaded(fetch_batch(dataset, indices, collate))
    good = []
    for index, sample in zip(indices.tolist(), dataset.read_each(indices.tolist()), strict=True):
        if isinstance(sample, SampleError):
            count_skipped(index, sample)
        else:
            good.append(sample)
    return _Loaded(collate(good)) if good else _Loaded(fetch_batch(dataset, indices, collate), counted=False)


def _cut_stream(
    dataset: Iterable[Any], batch_size: int, collate: Collate
) -> Iterator[tuple[int, Callable[[], _Loaded]]]:
    samples = iter(dataset)
    parts = iter(lambda: list(islice(samples, batch_size)), [])
    for index, part in enumerate(parts):
        yield index, partial(_load_samples, part, collate)


def _load_samples(samples: list[Any], collate: Collate) -> _Loaded:
    return _Loaded(collate(samples))
