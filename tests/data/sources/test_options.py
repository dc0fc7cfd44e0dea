"""Options of sources: decoding, columns, output form, and the number of decoded parts kept."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import numpy
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.utils.data import default_collate

from tests.data.formats import FORMATS, SAMPLES, opened, rows
from worldsize.core import ConfigError
from worldsize.data.source import Transformed
from worldsize.data.sources.arrow import Parquet
from worldsize.data.sources.images import FORMATS as FORMATS_OF_IMAGES
from worldsize.data.sources.images import ImageFolder, decode_image
from worldsize.data.sources.json_lines import JsonLines
from worldsize.data.sources.webdataset import WebDataset
from worldsize.data.storage.byte_files import SampleError
from worldsize.data.storage.cache import Cache

TABLES = [name for name in FORMATS if name in ("parquet", "feather", "arrow", "hf_datasets")]


@pytest.mark.parametrize("name", TABLES)
def test_numbers_become_tensors_of_a_batch(name: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    FORMATS[name].write(tmp_path / "files")
    source = opened(name, tmp_path / "files", tmp_path / "cache", format="numpy", columns=["id", "values", "text"])
    batch = default_collate(source.__getitems__([3, 40, 0]))
    assert batch["id"].tolist() == [3, 40, 0]
    torch.testing.assert_close(batch["values"], torch.tensor([rows()[n]["values"] for n in (3, 40, 0)]).double())
    assert batch["text"] == [rows()[number]["text"] for number in (3, 40, 0)]


def test_types_of_columns_are_kept(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "small": pyarrow.array([1, 2], pyarrow.int8()),
            "half": pyarrow.array([0.5, 1.5], pyarrow.float32()),
            "flag": [True, False],
            "fixed": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int16(), 2)),
            "ragged": pyarrow.array([None, [7]], pyarrow.large_list(pyarrow.uint8())),
            "record": [{"x": 1}, {"x": 2}],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    cache = Cache(folder=str(tmp_path / "cache"))
    first, second = Parquet(str(tmp_path), cache=cache, format="numpy").__getitems__([0, 1])
    assert (first["small"].dtype, first["half"].dtype, first["flag"].dtype) == (numpy.int8, numpy.float32, numpy.bool_)
    assert (second["fixed"].dtype, second["fixed"].tolist()) == (numpy.int16, [3, 4])
    assert (second["ragged"].dtype, second["ragged"].tolist(), first["ragged"]) == (numpy.uint8, [7], None)
    assert second["record"] == {"x": 2}
    assert Parquet(str(tmp_path), cache=cache)[1] == table.to_pylist()[1]


def test_a_process_keeps_the_parts_read_last_up_to_a_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pyarrow.table({"x": numpy.arange(4000)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1000)  # four row groups of 8,000 bytes
    read: list[int] = []
    plain = Parquet.read_part

    def noted(self: Parquet, file: Any, start: int, number: int) -> Any:
        read.append(number)
        return plain(self, file, start, number)

    monkeypatch.setattr(Parquet, "read_part", noted)
    cache = Cache(folder=str(tmp_path / "cache"))
    for keep, expected in (
        (17_000, [0, 1, 2, 1, 3, 2]),
        (1e9, [0, 1, 2, 3]),
        (0, [0, 1, 0, 2, 0, 1, 3, 2]),
    ):
        read.clear()
        source = Parquet(str(tmp_path), cache=cache, keep=keep)
        assert [source[part * 1000]["x"] for part in (0, 1, 0, 2, 0, 1, 3, 2)] == [
            0,
            1000,
            0,
            2000,
            0,
            1000,
            3000,
            2000,
        ]
        assert read == expected
    read.clear()
    source.__getitems__([0, 3000, 1, 3001, 2])
    assert read == [0, 3]


def test_parts_of_a_tar_are_decoded_by_their_endings(tmp_path: Path) -> None:
    buffer, picture = io.BytesIO(), io.BytesIO()
    numpy.save(buffer, numpy.arange(3, dtype=numpy.int16))
    Image.new("RGB", (2, 1), (1, 2, 3)).save(picture, "png")
    parts = {
        "txt": "ü".encode(),
        "json": b"[1]",
        "cls": b"7\n",
        "npy": buffer.getvalue(),
        "left.PNG": picture.getvalue(),
    }
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for ending, data in {**parts, "bin": b"b"}.items():
            member = tarfile.TarInfo(f"k.{ending}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    cache = Cache(folder=str(tmp_path / "cache"))
    raw = WebDataset(str(tmp_path), cache=cache)[0]
    assert raw == {"__key__": "k", **{ending.lower(): data for ending, data in parts.items()}, "bin": b"b"}
    read = WebDataset(str(tmp_path), cache=cache, decode=["txt", "json", "cls", "npy", "png"])[0]
    assert numpy.asarray(read.pop("left.png")).tolist() == [[[1, 2, 3], [1, 2, 3]]]
    array = read.pop("npy")
    assert (array.dtype, array.tolist()) == (numpy.int16, [0, 1, 2])
    assert read == {"__key__": "k", "txt": "ü", "json": [1], "cls": 7, "bin": b"b"}


def test_an_array_that_would_run_code_is_not_decoded(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.array([{}], dtype=object), allow_pickle=True)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("k.npy")
        member.size = len(buffer.getvalue())
        archive.addfile(member, io.BytesIO(buffer.getvalue()))
    with pytest.raises(Exception, match=r"byte 512 \(k.npy\): failed to decode as npy: Object arrays cannot be loaded"):
        WebDataset(str(tmp_path), cache=Cache(folder=str(tmp_path / "cache")), decode=["npy"])[0]


def test_images_are_transformed_and_need_no_classes(tmp_path: Path) -> None:
    for number in range(3):
        Image.new("L", (2, 2), number).save(tmp_path / f"{number}.bmp")
    (tmp_path / ".hidden").mkdir()
    cache = Cache(folder=str(tmp_path / ".hidden"))
    images = ImageFolder(str(tmp_path), cache=cache, transform=numpy.asarray)
    assert [sample.keys() for sample in images] == [{"image"}] * 3
    assert [sample["image"].tolist() for sample in images] == [[[number] * 2] * 2 for number in range(3)]
    assert images.classes == []


def test_images_of_a_data_set_are_decoded(tmp_path: Path) -> None:
    picture = Image.new("L", (3, 2), 7)
    datasets.Dataset.from_list([{"picture": picture}, {"picture": None}]).save_to_disk(tmp_path / "set")
    source = opened("hf_datasets", tmp_path / "set", tmp_path / "cache")
    assert numpy.asarray(source[0]["picture"]).tolist() == [[7] * 3] * 2
    assert source[1] == {"picture": None}


def test_a_function_changes_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n2\n3\n")
    lines = JsonLines(str(tmp_path), cache=Cache(folder=str(tmp_path / "cache")))
    doubled = Transformed(lines, lambda number: 2 * number)
    assert (len(doubled), doubled[2], doubled.__getitems__([0, 1])) == (3, 6, [2, 4])
    assert doubled.fingerprint() == lines.fingerprint()


def test_lines_are_divided_by_newlines_alone_wherever_blocks_of_the_scan_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank lines, lines longer than a block, no final newline, and separators of str.splitlines."""
    text = (
        '\n\n  \n"a\u2028b"\n \t\r\n  1  \r\n'
        + '"'
        + "long " * 20
        + '"\n'
        + " " * 50
        + "\n[1,\t2]\n   "
        + " " * 30
        + "3"
    )
    (tmp_path / "a.jsonl").write_text(text)
    for block in (1, 2, 3, 5, 7, 16, 64, 1000):
        monkeypatch.setattr("worldsize.data.sources.json_lines._BLOCK", block)
        lines = JsonLines(str(tmp_path / "a.jsonl"), cache=Cache(folder=str(tmp_path / f"cache{block}")))
        assert list(lines) == ["a\u2028b", 1, "long " * 20, [1, 2], 3]


@pytest.mark.parametrize("name", FORMATS)
def test_values_outside_the_range_are_no_samples(name: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    FORMATS[name].write(tmp_path / "files")
    source = opened(name, tmp_path / "files", tmp_path / "cache")
    assert sum(1 for _ in source) == SAMPLES  # Python iterates by index until an IndexError


def test_a_rank_has_no_memory_in_the_number_of_samples(tmp_path: Path) -> None:
    """The index of a million lines takes 16 MB on disk; a list of as many numbers would take 36 MB in memory."""
    lines = 1_000_000
    (tmp_path / "a.jsonl").write_bytes(b'{"x":1}\n' * lines)
    cache = Cache(folder=str(tmp_path / "cache"))
    assert len(JsonLines(str(tmp_path / "a.jsonl"), cache=cache)) == lines  # this builds the index
    tracemalloc.start()
    source = JsonLines(str(tmp_path / "a.jsonl"), cache=cache)
    assert source.__getitems__([lines - 1, 0, lines // 2]) == [{"x": 1}] * 3
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6e6  # including 4 MiB read to check that the index is complete


def _pictures(folder: Path, data: bytes) -> None:
    """Write one picture, named as a PNG, in the layout of each image source."""
    (folder / "images").mkdir()
    (folder / "images" / "a.png").write_bytes(data)
    with tarfile.open(folder / "a.tar", "w") as archive:
        member = tarfile.TarInfo("a.png")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    features = datasets.Features({"image": datasets.Image()})
    rows = [{"image": {"bytes": data, "path": None}}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(folder / "set")


PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "images": ("images", {}),
    "webdataset": ("a.tar", {"decode": ["png"]}),
    "hf_datasets": ("set", {}),
}


@pytest.mark.parametrize("name", PLACES)
def test_images_reach_the_decoders_of_formats_that_are_allowed_and_no_others(name: str, tmp_path: Path) -> None:
    rare = io.BytesIO()
    Image.new("RGB", (3, 2)).save(rare, "PCX")
    _pictures(tmp_path, rare.getvalue())
    place, options = PLACES[name]

    def first(**more: Any) -> Any:
        sample = opened(name, tmp_path / place, tmp_path / "cache", **options, **more)[0]
        return sample["png" if name == "webdataset" else "image"]

    with pytest.raises(SampleError, match=r"not an image in one of the formats JPEG, PNG, .*add other formats to data"):
        first()
    assert first(image_formats=["PNG", "PCX"]).size == (3, 2)
    with pytest.raises(ConfigError, match="Pillow does not support 'PXC'; did you mean 'PCX'"):
        first(image_formats=["PXC"])


@pytest.mark.parametrize("kind", FORMATS_OF_IMAGES)
def test_the_usual_formats_of_images_are_decoded(kind: str) -> None:
    written = io.BytesIO()
    Image.new("RGB", (3, 2)).save(written, kind)
    assert decode_image(written.getvalue()).size == (3, 2)
