"""Unreadable samples are replaced by good ones, or omitted in evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pyarrow
import pytest
import torch
from pyarrow import parquet

from worldsize.core import World
from worldsize.data.loader import evaluation_batches
from worldsize.data.mixture import Mixture, Part
from worldsize.data.source import Source, Transformed, read_with_replacements
from worldsize.data.sources.arrow import Parquet
from worldsize.data.sources.json_lines import JsonLines
from worldsize.data.splits import split_source
from worldsize.data.storage.byte_files import COUNTS, SampleError
from worldsize.data.storage.cache import Cache

SAMPLES, BAD = 5000, range(1000, 1400)


@pytest.fixture
def lines(tmp_path: Path) -> JsonLines:
    path = tmp_path / "a.jsonl"
    path.write_text("".join("bad\n" if index in BAD else f"{index}\n" for index in range(SAMPLES)))
    return JsonLines(str(path), on_error="skip", cache=Cache(str(tmp_path / "cache")))


@final
@dataclass(frozen=True)
class Group(Source):
    """Numbers; those in ``BAD`` are in an unreadable part of a file."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        sample: int = read_with_replacements(self, [index])[0]
        return sample

    def read_each(self, indices: Sequence[int]) -> list[int | SampleError]:
        return [SampleError("bad") if index in BAD else index for index in indices]

    def find_bad_range(self, index: int) -> range:
        return BAD if index in BAD else range(index, index + 1)

    def fingerprint(self) -> Mapping[str, Any]:
        return {}


@pytest.mark.parametrize("kind", ["lines", "group"])
def test_many_samples_stand_in_for_many_bad_ones(kind: str, lines: JsonLines) -> None:
    source = lines if kind == "lines" else Group()
    stand_ins = Counter(source[index] for index in BAD)
    assert len(stand_ins) > len(BAD) / 2
    assert max(stand_ins.values()) <= 6
    assert all(BAD.stop <= each < BAD.stop + 8 * 1024 for each in stand_ins)
    assert [source[index] for index in (1000, 1399)] == source.__getitems__([1000, 1399])


@pytest.mark.parametrize("kind", ["plain", "transformed", "mixed", "split twice"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_stand_in_is_on_the_side_of_the_split_that_the_bad_sample_is_on(
    kind: str, split: str, lines: JsonLines
) -> None:
    wrapped: Source = {
        "plain": lines,
        "transformed": Transformed(lines, int),
        "mixed": Mixture({"a": Part(lines, weight=1)}),
        "split twice": split_source(lines, "train", share=0.2),
    }[kind]
    side, other = (split_source(wrapped, each, share=0.3) for each in (split, "train" if split == "test" else "test"))
    own = {each for each in side.read_each(range(len(side))) if not isinstance(each, SampleError)}
    assert set(side.__getitems__(range(len(side)))) == own
    assert {side[index] for index in range(len(side))} == own
    assert not own & set(other.__getitems__(range(len(other))))


def test_a_bad_row_group_has_many_stand_ins(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": range(2000)}), path, row_group_size=500, compression="none")
    source = Parquet(str(path), on_error="skip", cache=Cache(str(tmp_path / "cache")))
    start = int(source.index["start"][1])
    data = bytearray(path.read_bytes())
    data[start : start + 200] = b"\x77" * 200
    path.write_bytes(data)
    damaged = Parquet(str(path), on_error="skip", cache=Cache(str(tmp_path / "other")))
    ids = [sample["id"] for sample in damaged.__getitems__(range(500, 520))]
    assert len(set(ids)) > 15
    assert not set(ids) & set(range(500, 1000))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "side"])
def test_evaluation_leaves_bad_samples_out_and_counts_the_others_once(kind: str, size: int, lines: JsonLines) -> None:
    source = lines if kind == "plain" else split_source(lines, "test", share=0.5)
    good = sorted(each for each in source.read_each(range(len(source))) if not isinstance(each, SampleError))
    before = COUNTS.skipped
    shares = []
    for rank in range(size):
        world = World("worker", rank, size, rank, size, rank, 0, torch.device("cpu"))
        shares.append(list(evaluation_batches(source, world, batch_size=16)))
    assert COUNTS.skipped > before
    assert len({len(share) for share in shares}) == 1
    counted = [number for share in shares for batch in share if batch.counted for number in batch.data.tolist()]
    assert sorted(counted) == good
    assert all(len(batch.data) for share in shares for batch in share)


def test_the_stand_ins_stay_what_they_are() -> None:
    """They are part of the sample order: a change alters the bits of runs that skip samples."""
    assert [Group()[index] for index in (1000, 1001, 1399)] == [2321, 1519, 2057]
    side = split_source(Group(), "test", share=0.3)
    assert side.__getitems__(range(300, 304)) == [2800, 2757, 4099, 1618]
