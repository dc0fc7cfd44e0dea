"""A mixture draws its sources in the requested shares, and each sample once per epoch of its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from worldsize.core import ConfigError
from worldsize.data.loader import micro_batches
from worldsize.data.mixture import Mixture, Part, mixture
from worldsize.data.order import Order, assign_logical_ranks, epoch_length
from worldsize.data.permutation import Shuffle
from worldsize.data.source import Source, Transformed
from worldsize.data.splits import HeldOut, split_source

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Numbers(Source):
    """Samples that contain their source and their index."""

    name: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.name, index

    def fingerprint(self) -> Mapping[str, Any]:
        return {"size": self.length, "sha256": f"{self.name}"}

    @property
    def lengths(self) -> Tensor:
        return torch.arange(self.length) + 100 * self.name


def mixed(*lengths: int, weights: tuple[float, ...] = (), epochs: tuple[float, ...] = ()) -> Mixture:
    parts = {}
    for number, length in enumerate(lengths):
        weight, times = (weights[number], None) if weights else (None, epochs[number])
        parts[f"source {number}"] = Part(Numbers(number, length), weight, times)
    return Mixture(parts)


def drawn(data: Mixture, places: range, seed: int = 0, shuffle: Shuffle | None = None) -> list[tuple[int, int]]:
    return data.__getitems__(data.indices_at(seed, places, shuffle or Shuffle()).tolist())


@pytest.mark.parametrize("shuffle", [Shuffle(), Shuffle(block=8, window=4), Shuffle(enabled=False)])
def test_each_source_has_its_share_and_its_own_epochs(shuffle: Shuffle) -> None:
    data = mixed(1000, 300, 50, weights=(0.5, 0.3, 0.2))
    samples = drawn(data, range(1 << 17), shuffle=shuffle)
    for name, (length, share) in enumerate([(1000, 0.5), (300, 0.3), (50, 0.2)]):
        own = [index for source, index in samples if source == name]
        assert abs(len(own) - share * (1 << 17)) <= 2
        counts = Counter(own[: len(own) // length * length])
        assert set(counts.values()) == {len(own) // length}
        assert len(counts) == length
        for epoch in range(5):
            assert sorted(own[epoch * length : (epoch + 1) * length]) != []


def test_shares_hold_nearby_too() -> None:
    """A share of 0.3 takes about 300 of 1,000 neighbouring places: within five standard deviations."""
    data = mixed(10**6, 10**6, weights=(3, 7))
    for first in (0, 65_000, 10**12):
        own = sum(source == 0 for source, _ in drawn(data, range(first, first + 1000)))
        assert abs(own - 300) < 5 * (1000 * 0.3 * 0.7) ** 0.5


def test_a_place_needs_no_other_place() -> None:
    data = mixed(1000, 77, weights=(0.5, 0.5))
    together = drawn(data, range(65_500, 65_600))
    assert [drawn(data, range(place, place + 1))[0] for place in range(65_500, 65_600)] == together
    assert drawn(data, range(65_500, 65_600), seed=1) != together


def test_epochs_instead_of_weights() -> None:
    data = mixed(1000, 100, epochs=(1, 3))
    assert (len(data), data.epoch_length) == (1100, 1300)
    assert data.shares == {"source 0": 1000 / 1300, "source 1": 300 / 1300}


def test_a_source_of_share_zero_is_never_drawn() -> None:
    data = mixed(10, 10, 0, weights=(1, 0, 0))
    assert {source for source, _ in drawn(data, range(70_000))} == {0}


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_step_holds_the_same_samples_at_every_world_size(size: int) -> None:
    data = mixed(100, 30, weights=(0.6, 0.4))
    seen: dict[tuple[int, int], Any] = {}
    for rank in range(size):
        order = Order(0, 12, 6, assign_logical_ranks(rank, size, 6))
        for step, batches in zip(range(1, 5), micro_batches(data, order, CPU), strict=False):
            seen |= {(step, each): batch.data for each, batch in zip(order.mine, batches, strict=True)}
    whole = Order(0, 12, 1, (0,))
    for step in range(1, 5):
        (sources, indices) = zip(*[seen[step, each] for each in range(6)], strict=True)
        (positions,) = whole.positions(step, 0)
        expected = drawn(data, positions)
        assert list(zip(torch.cat(sources).tolist(), torch.cat(indices).tolist(), strict=True)) == expected


def test_steps_of_similar_length_are_dealt_over_sources() -> None:
    data = mixed(64, 64, weights=(0.5, 0.5))
    order = Order(0, 8, 2, (0, 1), balanced=True)
    lengths = []
    for _, batches in zip(range(32), micro_batches(data, order, CPU), strict=False):
        step = [
            100 * source + index
            for batch in batches
            for source, index in zip(*map(Tensor.tolist, batch.data), strict=True)
        ]
        lengths.append((min(step), max(step)))
    assert sum(most - least for least, most in lengths) < 32 * 40


def test_held_out_samples_of_each_source() -> None:
    data = mixed(5000, 2000, weights=(0.5, 0.5))
    sides = {split: split_source(data, split, share=0.1) for split in ("train", "test")}
    assert {split: len(side) for split, side in sides.items()} == {"train": 6300, "test": 700}
    samples = {split: {side[index] for index in range(len(side))} for split, side in sides.items()}
    assert samples["train"] | samples["test"] == {*drawn_all(data)}
    assert not samples["train"] & samples["test"]
    assert isinstance(sides["train"], Mixture)
    assert sides["train"].shares == data.shares


def drawn_all(data: Mixture) -> list[tuple[int, int]]:
    return [data[index] for index in range(7000)]


def test_a_split_keeps_epochs() -> None:
    train = split_source(mixed(1000, 100, epochs=(1, 3)), "train", share=0.1)
    assert epoch_length(train) == 900 + 3 * 90
    assert len([*train]) == 990


def test_a_function_of_samples_keeps_the_shares() -> None:
    data = mixed(1000, 1000, weights=(0.9, 0.1))
    turned = Transformed(data, lambda sample: sample[::-1])
    order = Order(0, 1000, 1, (0,))
    indices = order.indices_in(turned, 7, 0)
    assert indices.tolist() == order.indices_in(data, 7, 0).tolist()
    assert {turned[index][1] for index in indices.tolist()} == {0, 1}
    assert epoch_length(turned) == 2000


def test_what_would_lose_the_shares_is_refused() -> None:
    data = mixed(1000, 1000, weights=(0.9, 0.1))
    with pytest.raises(ConfigError, match="Use split_source"):
        HeldOut(data, share=0.1, held_out=True)
    with pytest.raises(ConfigError, match="Use split_source"):
        HeldOut(Transformed(data, str), share=0.1, held_out=True)
    with pytest.raises(ConfigError, match="nested mixtures are not supported"):
        Mixture({"inner": Part(data, weight=1)})


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, "a mixture requires at least one source"),
        ({"a": {"source": Numbers(0, 5)}}, "requires weight for all sources"),
        ({"a": {"source": Numbers(0, 5), "weight": 1, "epochs": 1}}, "requires weight for all sources"),
        ({"a": {"source": Numbers(0, 5), "weight": 0}}, "share of 0"),
        ({"a": {"source": Numbers(0, 5), "weight": -1}}, "must be finite and at least 0"),
        ({"a": {"source": Numbers(0, 5), "epochs": float("nan")}}, "must be finite and at least 0"),
        ({"a": {"source": Numbers(0, 5), "weight": "much"}}, "must be finite and at least 0"),
        ({"a": {"source": Numbers(0, 5), "wieght": 1}}, "did you mean 'weight'"),
        ({"a": {"weight": 1}}, "data.sources.a.source is not set"),
        ({"a": {"source": 3, "weight": 1}}, "expected a Source, got int"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(sources: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(sources)


def test_a_share_that_would_never_be_drawn_is_refused_before_the_start() -> None:
    message = "'source 1' has a share of .* rounds to 0 of 65,536 samples. Increase the share"
    with pytest.raises(ConfigError, match=message):
        mixed(10, 10, weights=(1, 1e-6))
    by_epochs = mixed(10**9, 10, epochs=(1, 1))
    for use in (by_epochs.fingerprint, lambda: drawn(by_epochs, range(10))):
        with pytest.raises(ConfigError, match=message):
            use()
    assert sum(source for source, _ in drawn(mixed(10, 10, weights=(1, 1.5e-5)), range(1 << 16))) == 1
    mixed(10, 10, weights=(1, 0)).fingerprint()


def test_an_empty_source_is_named() -> None:
    with pytest.raises(ConfigError, match="'source 1' of the mixture is empty"):
        drawn(mixed(10, 0, weights=(0.5, 0.5)), range(10))


def test_the_order_stays_what_it_is() -> None:
    """The manifest promises this order: a different one needs a new version number."""
    data = mixed(10**9, 10**6, weights=(0.7, 0.3))
    assert data.indices_at(7, range(10**10, 10**10 + 4), Shuffle()).tolist() == [
        357781600,
        408956369,
        1000941900,
        439677276,
    ]
