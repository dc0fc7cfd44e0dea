"""Held-out samples are disjoint from training samples, complete with them, and stay so when data are appended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import pytest

from worldsize.data.source import Source
from worldsize.data.splits import HeldOut


@final
@dataclass(frozen=True)
class Numbers(Source):
    """Samples equal to their index."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index

    def fingerprint(self) -> Mapping[str, Any]:
        return {"size": self.length}


def sides(length: int, share: float) -> tuple[list[int], list[int]]:
    """Return the training samples and the held-out samples, each read to the end."""
    learned, out = (HeldOut(Numbers(length), share, held_out) for held_out in (False, True))
    assert [learned[index] for index in range(len(learned))] == learned.__getitems__(range(len(learned)))
    return learned.__getitems__(range(len(learned))), out.__getitems__(range(len(out)))


@pytest.mark.parametrize("length", [0, 1, 2, 999, 1000, 1001, 3500])
@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.0555, 0.5, 0.999, 1])
def test_the_sides_are_disjoint_complete_and_as_large_as_their_share(length: int, share: float) -> None:
    learned, out = sides(length, share)
    assert sorted(learned + out) == list(range(length))
    assert abs(len(out) - share * length) <= 0.5 * (length // 1000 + 1)
    assert learned == sorted(learned)
    assert out == sorted(out)


def test_appended_data_change_no_side_of_whole_thousands() -> None:
    before, after = (set(sides(length, 0.05)[1]) for length in (4000, 9876))
    assert {number for number in after if number < 4000} == before
    assert len(before) == 200


def test_what_is_held_out_is_spread_and_differs_between_thousands() -> None:
    out = sides(20_000, 0.1)[1]
    by_thousand = [tuple(number % 1000 for number in out if number // 1000 == group) for group in range(20)]
    assert len(set(by_thousand)) == 20
    halves = [sum(number < 500 for number in group) for group in by_thousand]
    assert all(30 <= count <= 70 for count in halves)


def test_an_index_costs_no_memory_in_the_number_of_samples() -> None:
    source = HeldOut(Numbers(10**12 + 500), 0.1, True)
    assert len(source) == 10**11 + 50
    assert source[len(source) - 1] >= 10**12
    assert source.fingerprint() == {"size": 10**12 + 500}


def test_the_sides_stay_what_they_are() -> None:
    """A change would train resumed runs on their held-out samples."""
    assert sides(12, 0.25) == ([0, 2, 4, 5, 6, 7, 8, 9, 10], [1, 3, 11])
    assert sides(2010, 0.002)[1] == [19, 423, 1365, 1742]
    out = HeldOut(Numbers(10**12 + 500), 0.1, True)
    places = (0, 1, 99, 100, 10**11 - 1, 10**11, 10**11 + 49)
    expected = [1, 12, 998, 1007, 999999999972, 1000000000002, 1000000000499]
    assert [out[index] for index in places] == expected
