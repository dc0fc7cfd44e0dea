"""Cuts an evaluation set into the same batches at every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from worldsize.core import Batch, ConfigError, EvaluationBatch, World
from worldsize.data.batches import to_device
from worldsize.data.fetch import Collate, fetch, is_iterable
from worldsize.data.source import Source, count_skipped
from worldsize.data.storage.byte_files import SampleError
from worldsize.record.seeds import stream


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
