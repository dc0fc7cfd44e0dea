"""The order of samples follows its definition: every sample once per epoch, at any world size."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from worldsize.core import World
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import evaluation_batches, micro_batches
from worldsize.data.order import Order, SampleDigest, assign_logical_ranks
from worldsize.errors import ConfigError
from worldsize.testing.recipes import Chain

CPU = torch.device("cpu")


def order(batch_size: int, logical_ranks: int, rank: int = 0, size: int = 1, seed: int = 0) -> Order:
    return Order(seed, batch_size, logical_ranks, assign_logical_ranks(rank, size, logical_ranks))


def world(rank: int, size: int) -> World:
    return World("worker", rank, size, rank, size, rank, 0, CPU)


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Noisy(Dataset[float]):
    """A data set whose samples use every random generator, as in augmentation."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()).item() + numpy.random.rand())


@pytest.mark.parametrize(("length", "batch_size"), [(10, 4), (12, 4), (7, 12), (100, 24)])
def test_every_sample_is_drawn_once_an_epoch(length: int, batch_size: int) -> None:
    epochs = 6
    stream = [
        int(index)
        for step in range(1, epochs * length // batch_size + 2)
        for rank in range(4)
        for index in order(batch_size, 4).compute_indices(step, rank, length)
    ]
    for epoch in range(epochs):
        part = stream[epoch * length : (epoch + 1) * length]
        assert Counter(part) == Counter(range(length))


def test_epochs_and_seeds_shuffle_differently() -> None:
    def epoch(seed: int, step: int) -> list[int]:
        return list(order(50, 1, seed=seed).compute_indices(step, 0, 50).tolist())

    assert len({tuple(epoch(seed, step)) for seed in (0, 1) for step in (1, 2)}) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_step_holds_the_same_samples_for_each_logical_rank_at_every_world_size(size: int) -> None:
    dataset = TensorDataset(torch.arange(40))
    seen: dict[tuple[int, int], list[int]] = {}
    for rank in range(size):
        mine = order(12, 6, rank, size)
        for step, batches in enumerate(islice(micro_batches(dataset, mine, CPU), 5), start=1):
            for logical, batch in zip(mine.mine, batches, strict=True):
                seen[step, logical] = batch.data[0].tolist()
    expected = {
        (step, rank): order(12, 6).compute_indices(step, rank, 40).tolist() for step in range(1, 6) for rank in range(6)
    }
    assert seen == expected


def test_a_run_resumes_at_the_number_of_its_step() -> None:
    dataset = TensorDataset(torch.arange(40))
    whole = [batches[0].data[0].tolist() for batches in islice(micro_batches(dataset, order(6, 1), CPU), 10)]
    resumed = [batches[0].data[0].tolist() for batches in islice(micro_batches(dataset, order(6, 1), CPU, first=7), 3)]
    assert resumed == whole[7:]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_stream_is_divided_over_ranks_without_loss_and_starts_again(size: int) -> None:
    parts = [islice(micro_batches(Stream(10), order(4, 4, rank, size), CPU), 5) for rank in range(size)]
    steps = [
        sorted(int(x) for batches in step for batch in batches for x in batch.data) for step in zip(*parts, strict=True)
    ]
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_stream_resumes_at_its_position() -> None:
    batches = next(micro_batches(Stream(100), order(4, 2), CPU, first=3))
    assert [batch.data.tolist() for batch in batches] == [[12, 13], [14, 15]]


def test_an_empty_stream_is_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(ConfigError, match="stream is empty"):
        next(micro_batches(Stream(0), order(4, 2), CPU))


def test_data_workers_yield_the_same_batches_and_the_same_randomness() -> None:
    def drawn(workers: int) -> list[list[float]]:
        batches = islice(micro_batches(Noisy(), order(4, 2), CPU, workers=workers), 4)
        return [batch.data.tolist() for step in batches for batch in step]

    here = drawn(0)
    assert here == drawn(2)
    assert len({value for row in here for value in row}) == 16


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(10)), Stream(10)], ids=["map", "stream"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_evaluation_counts_every_sample_once_and_ranks_take_equally_many_batches(dataset: Any, size: int) -> None:
    shares = [list(evaluation_batches(dataset, world(rank, size), batch_size=4)) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    counted = [batch for share in shares for batch in share if batch.counted]
    rows = [batch.data[0] if isinstance(batch.data, list | tuple) else batch.data for batch in counted]
    assert sorted(torch.cat(rows).tolist()) == list(range(10))
    assert sorted(batch.index for batch in counted) == [0, 1, 2]


def test_the_first_batch_of_a_large_evaluation_takes_no_memory_for_the_others() -> None:
    """A list of the indices of 10¹² samples would take 8 TB."""
    batches = evaluation_batches(Numbers(10**12), world(1, 4), batch_size=3)
    assert next(batches).data.tolist() == [3, 4, 5]


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Table(Dataset[dict[str, list[int]]]):
    """A data set like Hugging Face's: rows of unequal length, and a method ``batch`` that makes a table of batches."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": list(range(index + 1))}

    def batch(self, batch_size: int, drop_last_batch: bool = False) -> Table:
        raise AssertionError("this is not an access to a batch")


class Padding(Chain):
    """Pads its input with -1."""

    def collate(self, samples: list[Any]) -> torch.Tensor:
        return pad_sequence([torch.tensor(each["tokens"]) for each in samples], batch_first=True, padding_value=-1)


class PaddingStream(IterableDataset[dict[str, list[int]]]):
    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (Table()[index] for index in range(5))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_recipe_pads_the_samples_of_a_data_set_whose_batch_means_something_else(workers: int) -> None:
    ((batch,),) = islice(
        micro_batches(Table(), order(5, 1), CPU, workers=workers, collate=get_collate_fn(Padding())), 1
    )
    assert sorted((row != -1).sum() for row in batch.data) == [1, 2, 3, 4, 5]
    assert batch.data.shape == (5, 5)


@pytest.mark.parametrize("dataset", [Table(), PaddingStream()], ids=["table", "stream"])
def test_evaluation_and_streams_are_padded_too(dataset: Any) -> None:
    first, last = evaluation_batches(dataset, world(0, 1), batch_size=4, collate=get_collate_fn(Padding()))
    assert (first.data.shape, last.data.shape) == ((4, 4), (1, 5))
    ((batch,),) = islice(micro_batches(PaddingStream(), order(2, 1), CPU, collate=get_collate_fn(Padding())), 1)
    assert batch.data.tolist() == [[0, -1], [0, 1]]


def test_a_recipe_that_says_nothing_leaves_the_shortest_way_to_a_batch() -> None:
    assert get_collate_fn(Chain()) is default_collate
    assert Chain().collate([torch.ones(2), torch.zeros(2)]).shape == (2, 2)


@pytest.mark.parametrize("balanced", [False, True])
def test_the_digest_of_samples_is_that_of_the_loaded_batches(balanced: bool) -> None:
    dataset = TensorDataset(torch.arange(50))
    dataset.lengths = torch.arange(50) * 7 % 11  # type: ignore[attr-defined]
    loaded: dict[tuple[int, int], Any] = {}
    for rank in range(2):
        own = replace(order(12, 4, rank, 2, seed=3), balanced=balanced)
        for step in islice(micro_batches(dataset, own, CPU, first=2), 4):
            loaded |= {(batch.step, batch.logical_rank): batch.data[0].numpy().astype("<i8") for batch in step}
    expected = hashlib.sha256(b"".join(loaded[key].tobytes() for key in sorted(loaded)))
    digest = SampleDigest(dataset, replace(order(12, 4, seed=3), balanced=balanced))
    assert digest.digest_steps(range(3, 7)) == expected.hexdigest()
    assert digest.digest_steps(range(3, 6)) != expected.hexdigest()
