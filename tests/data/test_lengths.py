"""Sources report the lengths of their samples, also through wrappers, from an index on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy
import pyarrow
import pytest
import torch
from pyarrow import feather, parquet

from tests.data.formats import FORMATS, opened
from worldsize.core import ConfigError
from worldsize.data.loader import micro_batches
from worldsize.data.mixture import Mixture, Part
from worldsize.data.order import Order
from worldsize.data.source import Source, Transformed
from worldsize.data.sources.arrow import Arrow, HfDataset, Parquet
from worldsize.data.sources.documents import PackedDocuments
from worldsize.data.sources.json_lines import JsonLines
from worldsize.data.sources.tables import TableSource
from worldsize.data.splits import split_source
from worldsize.data.storage.byte_files import SampleError
from worldsize.data.storage.cache import Cache

SAMPLES = 300
WORDS = ["x" * (1 + number * 37 % 101) for number in range(SAMPLES)]


def lengths_of(source: Any) -> list[int]:
    lengths: list[int] = source.lengths[torch.arange(len(source))].tolist()
    return lengths


def write_parquet(table: Any, folder: Path) -> None:
    parquet.write_table(table, folder / "a.parquet", row_group_size=40, compression="none")


def write_arrow(table: Any, folder: Path) -> None:
    feather.write_feather(table, folder / "a.arrow", compression="uncompressed", chunksize=40)


def write_dataset(table: Any, folder: Path) -> None:
    datasets.Dataset(table).save_to_disk(folder)


TABLES: dict[str, tuple[Callable[..., TableSource], Callable[[Any, Path], None]]] = {
    "parquet": (Parquet, write_parquet),
    "arrow": (Arrow, write_arrow),
    "hf_dataset": (HfDataset, write_dataset),
}


def lines(folder: Path) -> JsonLines:
    (folder / "a.jsonl").write_text("".join(json.dumps(word) + "\n\n" for word in WORDS))
    return JsonLines(str(folder / "a.jsonl"), cache=Cache(str(folder / "cache")))


def test_a_line_is_as_long_as_its_bytes(tmp_path: Path) -> None:
    assert lengths_of(lines(tmp_path)) == [len(word) + 2 for word in WORDS]


def test_a_sample_of_a_tar_file_is_as_long_as_its_members(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    FORMATS["webdataset"].write(tmp_path / "files")
    source = opened("webdataset", tmp_path / "files", tmp_path / "cache")
    for index, length in enumerate(lengths_of(source)):
        contents = [value for value in source[index].values() if isinstance(value, bytes)]
        assert sum(map(len, contents)) + 512 * len(contents) <= length
        assert length <= sum(map(len, contents)) + 2048 * len(contents)  # including the headers for names


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("columns", [None, ["word"]])
def test_a_column_of_a_table_says_how_long_its_rows_are(name: str, columns: list[str] | None, tmp_path: Path) -> None:
    make, write = TABLES[name]
    (tmp_path / "files").mkdir()
    write(pyarrow.table({"word": WORDS, "letters": [len(word) for word in WORDS]}), tmp_path / "files")
    options: dict[str, Any] = {"cache": Cache(str(tmp_path / "cache")), "columns": columns}
    source = make(str(tmp_path / "files"), length_column="letters", **options)
    assert lengths_of(source) == [len(word) for word in WORDS]
    assert set(source[3]) == ({"word", "letters"} if columns is None else {"word"})
    assert make(str(tmp_path / "files"), **options).lengths is None
    with pytest.raises(ConfigError, match="column 'leters' not found; did you mean 'letters'"):
        lengths_of(make(str(tmp_path / "files"), length_column="leters", **options))
    with pytest.raises(ConfigError, match="column 'word' contains values other than integers. Choose a different"):
        lengths_of(make(str(tmp_path / "files"), length_column="word", **options))


def test_a_part_whose_lengths_cannot_be_read_has_the_length_0_if_it_may_be_skipped(tmp_path: Path) -> None:
    write_parquet(pyarrow.table({"letters": [len(word) for word in WORDS]}), tmp_path)
    path, cache = tmp_path / "a.parquet", Cache(str(tmp_path / "cache"))
    start = int(Parquet(str(path), cache=cache).index["start"][1])
    data = bytearray(path.read_bytes())
    data[start : start + 100] = b"\x77" * 100
    path.write_bytes(data)
    with pytest.raises(SampleError, match=f"{path}, byte {start}"):
        lengths_of(Parquet(str(path), cache=cache, length_column="letters"))
    lengths = lengths_of(Parquet(str(path), cache=cache, length_column="letters", on_error="skip"))
    assert lengths == [0 if 40 <= number < 80 else len(word) for number, word in enumerate(WORDS)]


def test_a_packed_sample_is_as_long_as_its_documents(tmp_path: Path) -> None:
    sizes = numpy.random.default_rng(0).integers(0, 60, 1500)
    numpy.save(tmp_path / "documents_00000.npy", numpy.concatenate([[0], numpy.cumsum(sizes)]))
    numpy.save(tmp_path / "tokens_00000.npy", numpy.arange(sizes.sum(), dtype=numpy.uint16))
    source = PackedDocuments(str(tmp_path), length=31, cache=Cache(str(tmp_path / "cache")))
    assert lengths_of(source) == [int((sample["documents"] >= 0).sum()) for sample in source]


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_wraps_a_source_says_what_the_source_says(split: str, tmp_path: Path) -> None:
    source = lines(tmp_path)
    both = Mixture({"a": Part(source, weight=1), "b": Part(Transformed(source, str.upper), weight=1)})
    for whole in (source, Transformed(source, str.upper), both):
        side = split_source(whole, split, share=0.3)
        assert lengths_of(side) == [len(word) + 2 for word in side]
    assert getattr(split_source(SILENT, split, share=0.3), "lengths", "none") is None


class _Silent(Source):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index

    def fingerprint(self) -> dict[str, Any]:
        return {}


SILENT = _Silent()


def test_batches_of_similar_length_come_from_a_split_of_lines(tmp_path: Path) -> None:
    side = split_source(lines(tmp_path), "train", share=0.1)
    order = Order(0, 9, 1, (0,), balanced=True)
    steps = [batch for _, (batch,) in zip(range(30), micro_batches(side, order, torch.device("cpu")), strict=False)]
    assert sorted(word for step in steps for word in step.data) == sorted(side)
    assert sum(len(step.data[0]) - len(step.data[-1]) for step in steps) < 30 * 20
