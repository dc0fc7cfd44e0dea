"""Skipped samples are removed from the sequence of samples, and nothing else changes."""

from __future__ import annotations

import pickle
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from worldsize.data.loader import MicroBatchLoader, micro_batches
from worldsize.data.mixture import Mixture, Part
from worldsize.data.order import Balanced, Order, assign_logical_ranks
from worldsize.data.skips import SkippedSamples
from worldsize.data.source import Source
from worldsize.errors import ConfigError

CPU = torch.device("cpu")
RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 40)).map(lambda pair: (pair[0], sum(pair))), max_size=6)


def remaining(ranges: list[tuple[int, int]], count: int) -> list[int]:
    """Return the first ``count`` positions outside of ``ranges``, one by one."""
    kept = (place for place in range(10**6) if not any(first <= place < end for first, end in ranges))
    return list(islice(kept, count))


def flatten(order: Order, steps: int, length: int) -> list[int]:
    ranks = range(order.logical_ranks)
    return [int(i) for step in range(1, steps + 1) for rank in ranks for i in order.compute_indices(step, rank, length)]


@given(RANGES, st.integers(0, 150), st.integers(1, 60))
def test_positions_are_those_outside_of_the_ranges(ranges: list[tuple[int, int]], first: int, count: int) -> None:
    expected = remaining(ranges, first + count)[first:]
    skipped = SkippedSamples.from_ranges(ranges)
    spans = skipped.find_positions(range(first, first + count))
    assert [place for span in spans for place in span] == expected
    assert [skipped.find_position(place) for place in range(first, first + count)] == expected
    assert all(spans)
    assert all(before.stop < after.start for before, after in pairwise(spans))


@given(RANGES, RANGES, st.integers(0, 150))
def test_other_ranges_keep_samples_or_not(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]], places: int
) -> None:
    is_same = SkippedSamples.from_ranges(ranges).is_same_before(SkippedSamples.from_ranges(others), places)
    assert is_same == (remaining(ranges, places) == remaining(others, places))


@given(RANGES, st.sampled_from([(1, 1), (4, 1), (4, 4), (6, 3), (12, 2), (24, 6)]), st.integers(1, 70))
def test_every_size_reads_the_plain_sequence_without_the_ranges(
    ranges: list[tuple[int, int]], sizes: tuple[int, int], length: int
) -> None:
    batch, ranks = sizes
    steps = 96 // batch
    reference = remaining(ranges, steps * batch)
    sequence = flatten(Order(5, 1, 1, (0,)), reference[-1] + 1, length)  # one sample per step, nothing skipped
    order = Order(5, batch, ranks, (0,), skipped=SkippedSamples.from_ranges(ranges))
    assert flatten(order, steps, length) == [sequence[place] for place in reference]


class Numbers(Source):
    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.first + index)

    def __getitems__(self, indices: Any) -> list[Any]:
        return [self[index] for index in indices]

    def fingerprint(self) -> dict[str, Any]:
        return {"size": self.length, "sha256": str(self.first)}


class Texts(TensorDataset):
    """Sample i is the number i, with a random length."""

    def __init__(self) -> None:
        super().__init__(torch.arange(500))
        self.lengths = torch.randn(500, generator=torch.Generator().manual_seed(1)).exp().mul(40).ceil().long()


def read(data: Any, order: Order, steps: int, **options: Any) -> list[list[int]]:
    batches = islice(micro_batches(data, order, CPU, **options), steps)
    return [[int(i) for batch in step for i in _values(batch.data)] for step in batches]


def _values(data: Any) -> Tensor:
    return data if isinstance(data, Tensor) else data[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_mixtures_and_their_data_workers_skip(size: int, workers: int) -> None:
    data = Mixture({"a": Part(Numbers(0, 40), weight=3), "b": Part(Numbers(100, 7), weight=1)})
    ranges = [(5, 9), (12, 40), (65_530, 65_540)]
    sequence = [value for step in read(data, Order(3, 1, 1, (0,)), 140) for value in step]
    expected = [sequence[place] for place in remaining(ranges, 96)]
    skipped = SkippedSamples.from_ranges(ranges)
    parts = [
        read(data, Order(3, 12, 6, assign_logical_ranks(rank, size, 6), skipped=skipped), 8, workers=workers)
        for rank in range(size)
    ]
    for step in range(8):
        assert sorted(value for part in parts for value in part[step]) == sorted(expected[step * 12 : step * 12 + 12])


def test_audits_load_the_samples_of_the_step() -> None:
    data = TensorDataset(torch.arange(50))
    order = Order(3, 12, 4, (0, 1, 2, 3), skipped=SkippedSamples(((5, 9), (30, 41))))
    loader = MicroBatchLoader(data, order, CPU)
    steps = [[int(i) for rank in range(4) for i in loader.load(step, rank).data[0]] for step in range(1, 9)]
    assert steps == read(data, order, 8)


BATCH, RANKS = 24, 4


def balanced(ranges: list[tuple[int, int]], steps: int, rank: int = 0, size: int = 1) -> list[list[int]]:
    mine = assign_logical_ranks(rank, size, RANKS)
    return read(Texts(), Order(7, BATCH, RANKS, mine, True, skipped=SkippedSamples.from_ranges(ranges)), steps)


@pytest.mark.parametrize("begin", [3, 31, 32, 70])
def test_balanced_batches_before_skipped_steps_do_not_change(begin: int) -> None:
    plain = balanced([], 90)
    skipped = balanced([(begin * BATCH, (begin + 5) * BATCH)], 80)
    assert skipped == plain[:begin] + plain[begin + 5 : 85]


def test_balanced_batches_skip_parts_of_steps() -> None:
    ranges = [(10, 15), (31 * BATCH + 7, 33 * BATCH + 1), (900, 1000)]
    lengths = Texts().lengths
    order = Order(7, BATCH, 1, (0,))
    whole = Balanced(lambda step: order.compute_indices(step, 0, 500), lengths, seed=7, logical_ranks=1, epoch=500)
    sequence = [int(i) for step in range(1, 81) for i in whole.compute_rank_indices(step, 0)]
    places = remaining(ranges, 60 * BATCH)
    expected = [sorted(sequence[p] for p in places[i : i + BATCH]) for i in range(0, len(places), BATCH)]
    assert [sorted(step) for step in balanced(ranges, 60)] == expected
    parts = [balanced(ranges, 60, rank, 2) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == expected


def test_ranges_survive_pickling_and_text() -> None:
    skipped = SkippedSamples.from_words(["64:128", "0:5", "100:130", "5:6"])
    assert skipped.ranges == ((0, 6), (64, 130))
    assert SkippedSamples.from_words(skipped.words) == skipped
    skipped.find_position(3)
    assert pickle.loads(pickle.dumps(skipped)) == skipped
    assert skipped.add_ranges([(130, 140)]).words == ["0:6", "64:140"]


@pytest.mark.parametrize(
    ("word", "fact"), [("5:5", "is empty"), ("9:5", "is empty"), ("5", "FIRST:END"), ("-1:5", "FIRST:END")]
)
def test_other_texts_are_refused(word: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        SkippedSamples.from_words([word])
