"""Damaged files are reported with the byte offset of the damage, or skipped and counted."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import ipc, parquet

from tests.data.formats import FORMATS, SAMPLES, opened, rows
from worldsize.core import ConfigError
from worldsize.data.source import FileSource
from worldsize.data.storage.byte_files import COUNTS, SampleError

Damaged = Callable[..., FileSource]


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        FORMATS[name].write(folder)
        return folder

    return write


@pytest.fixture
def source(tmp_path: Path) -> Damaged:
    def open_it(name: str, path: Path, **options: Any) -> FileSource:
        return opened(name, path, tmp_path / "cache", **options)

    return open_it


def test_a_line_that_is_no_json_is_named_with_its_file_and_byte(tmp_path: Path, source: Damaged) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"id": 0}\n{"ü": 1, 2}\n{"id": 2}\n'.encode())
    broken = source("json_lines", path)
    assert [broken[0], broken[2]] == [{"id": 0}, {"id": 2}]
    place = path.read_bytes().index(b"2}")
    message = f"{path}, byte {place}: the line is not valid JSON: .*Repair the file, or set on_error=skip for the data"
    with pytest.raises(SampleError, match=message):
        broken[1]


@pytest.mark.parametrize("line", [b"\xff\xfe1", b"[" * 100_000, b"9" * 5000, b"{"])
def test_a_line_that_python_cannot_hold_is_no_json_either(line: bytes, tmp_path: Path, source: Damaged) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 0}\n' + line + b"\n")
    with pytest.raises(SampleError, match=f"{path}, byte 1[01]: the line is not valid JSON"):
        source("json_lines", path)[1]


def test_skipping_takes_a_good_sample_and_is_counted_and_logged(
    tmp_path: Path, source: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 0}\n{"id": \nnothing\n{"id": 3}\n{"id"\n')
    skipping, before = source("json_lines", path, on_error="skip"), COUNTS.skipped
    with caplog.at_level(logging.WARNING, "worldsize"):
        read = [skipping[index]["id"] for index in range(5)]
    assert [read[0], read[3]] == [0, 3]
    assert set(read) == {0, 3}
    assert COUNTS.skipped - before == 3
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"skipping sample {index}" for index in (1, 2, 4)
    ]
    assert f"{path}, byte 17" in caplog.records[0].getMessage()


def test_a_file_of_bad_samples_alone_is_an_error_though_they_may_be_skipped(tmp_path: Path, source: Damaged) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("bad\n" * 3)
    with pytest.raises(SampleError, match="byte 4.*All replacement samples are unreadable, too"):
        source("json_lines", path, on_error="skip")[1]


def test_a_missing_column_is_named_with_its_neighbour(files: Callable[[str], Path], source: Damaged) -> None:
    folder = files("json_lines")
    lines = (folder / "b.jsonl").read_text().splitlines()
    (folder / "b.jsonl").write_text("\n".join([*lines, '{"id": 1}', "[1]"]))
    chosen = source("json_lines", folder, columns=["text"])
    assert chosen[3] == {"text": rows()[3]["text"]}
    with pytest.raises(SampleError, match=r"b.jsonl, byte \d+: column 'text' not found. Available: id"):
        chosen[SAMPLES]
    with pytest.raises(SampleError, match=r"b.jsonl, byte \d+: data.columns requires each line to be a JSON object"):
        chosen[SAMPLES + 1]


@pytest.mark.parametrize("name", ["parquet", "feather", "arrow", "hf_datasets"])
def test_a_missing_column_of_a_table_is_named_before_anything_is_read(
    name: str, files: Callable[[str], Path], source: Damaged
) -> None:
    folder = files(name)
    assert source(name, folder, columns=["text"])[3] == {"text": rows()[3]["text"]}
    with pytest.raises(
        ConfigError, match=r"byte \d+: column 'txt' not found; did you mean 'text'. Available: id, text"
    ):
        len(source(name, folder, columns=["txt"]))


def test_a_column_that_the_second_file_lacks_is_named_with_that_file(
    files: Callable[[str], Path], source: Damaged
) -> None:
    folder = files("parquet")
    parquet.write_table(pyarrow.table({"id": [1]}), folder / "b.parquet")
    with pytest.raises(ConfigError, match=r"b.parquet, byte \d+: column 'text' not found. Available: id"):
        len(source("parquet", folder, columns=["text"]))


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize(
    ("where", "samples"), [("content", 19), ("header", 19), ("padding of the last", 29), ("second header", 10)]
)
def test_a_truncated_tar_is_named_with_its_byte(
    where: str, samples: int, files: Callable[[str], Path], source: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    path = files("webdataset") / "a.tar"
    with tarfile.open(path) as archive:
        member, second = archive.getmember("k020.cls"), archive.getmember("k010.json")
        last = archive.getmembers()[-1]
    size, place = {
        "content": (member.offset_data + 1, member.offset),
        "header": (member.offset + 100, member.offset),
        "padding of the last": (last.offset_data + last.size, last.offset),
        "second header": (second.offset + 100, second.offset),
    }[where]
    cut(path, size)
    with pytest.raises(SampleError, match=f"{path}, byte {place}: the tar file .*truncated.*Copy the file again"):
        len(source("webdataset", path))
    skipping, before = source("webdataset", path, on_error="skip"), COUNTS.skipped
    with caplog.at_level(logging.WARNING, "worldsize"):
        assert len(skipping) == samples
    assert COUNTS.skipped == before + 1
    assert f"{path}, byte {place}" in caplog.text
    assert [int(skipping[index]["cls"]) for index in range(samples)] == list(range(samples))


def test_a_tar_without_an_end_mark_may_have_been_cut_off(
    files: Callable[[str], Path], source: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    path = files("webdataset") / "a.tar"
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1]
    size = -(-(last.offset_data + last.size) // 512) * 512
    cut(path, size)
    with caplog.at_level(logging.WARNING, "worldsize"):
        assert len(source("webdataset", path)) == 30
    assert f"{path}, byte {size}: missing end-of-archive marker; the tar file may be truncated" in caplog.text


def test_a_member_that_comes_twice_in_a_sample_is_named(tmp_path: Path, source: Damaged) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(SampleError, match=f"{path}, byte 512: duplicate member a.txt in a sample"):
        len(source("webdataset", path))


IMAGE_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no image": lambda data: b"text",
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "changed": lambda data: data[:41] + b"?" * 8 + data[49:],
}


@pytest.mark.parametrize("damage", IMAGE_DAMAGES.values(), ids=IMAGE_DAMAGES)
def test_an_image_that_does_not_decode_is_named(
    damage: Callable[[bytes], bytes], files: Callable[[str], Path], source: Damaged
) -> None:
    folder = files("images")
    path = folder / "cat" / "004.png"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SampleError, match=f"{path}, byte 0: failed to decode as png: .*on_error=skip"):
        source("images", folder)[2]
    skipping = source("images", folder, on_error="skip")
    assert FORMATS["images"].number(skipping[2]) in {
        FORMATS["images"].number(skipping[index]) for index in range(3, 50)
    }


def test_an_image_in_a_tar_or_a_table_that_does_not_decode_is_named_with_its_byte(
    tmp_path: Path, source: Damaged
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("a.mask.png")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"image"))
    with pytest.raises(SampleError, match=r"a.tar, byte 512 \(a.mask.png\): failed to decode as png"):
        source("webdataset", tmp_path, decode=["png"])[0]
    features = datasets.Features({"picture": datasets.Image()})
    stored = [{"picture": {"bytes": b"image", "path": None}}]
    datasets.Dataset.from_list(stored, features=features).save_to_disk(tmp_path / "set")
    with pytest.raises(SampleError, match=r"data-00000-of-00001.arrow, byte \d+ \(picture\): failed to decode"):
        source("hf_datasets", tmp_path / "set")[0]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "images"])
def test_an_empty_file_is_named(name: str, files: Callable[[str], Path], source: Damaged) -> None:
    folder = files(name)
    path = next(path for path in sorted(folder.iterdir()) if path.suffix != ".json")
    cut(path, 0)
    for other in folder.iterdir():
        if other != path and other.suffix != ".json":
            cut(other, 0)
    with pytest.raises((SampleError, ConfigError), match=f"{path}.*, byte 0: "):
        len(source(name, folder))


def test_a_folder_without_images_and_files_without_lines_are_no_data(tmp_path: Path, source: Damaged) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.txt").touch()
    with pytest.raises(ConfigError, match="no images found in"):
        len(source("images", tmp_path))
    (tmp_path / "a.jsonl").write_text("\n \r\n")
    with pytest.raises(ConfigError, match="a.jsonl, byte 0: no samples found"):
        len(source("json_lines", tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match="or no .jsonl or .ndjson or .json files in the folder"):
        len(source("json_lines", tmp_path / "cat"))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "images"])
def test_a_file_that_shrinks_after_it_was_indexed_is_named_where_it_ends(
    name: str, files: Callable[[str], Path], source: Damaged
) -> None:
    folder = files(name)
    path = [path for path in sorted(folder.iterdir()) if path.suffix != ".json"][-1]
    used, fresh = source(name, folder), source(name, folder)
    used[SAMPLES - 1]
    assert len(fresh) == SAMPLES
    size = path.stat().st_size // 3
    cut(path, size)
    for each in (used, fresh):
        if each is used and name == "parquet":
            continue  # its row group has been read
        with pytest.raises(SampleError, match=rf"{path}, byte (\d+): .*unexpected end of file"):
            each[SAMPLES - 2]


def test_an_image_that_has_changed_since_it_was_indexed_is_named(files: Callable[[str], Path], source: Damaged) -> None:
    folder = files("images")
    images = source("images", folder)
    assert len(images) == SAMPLES
    path = folder / "cat" / "004.png"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(
        SampleError, match=f"{path}, byte 20: the file is shorter than the .* bytes recorded in the index"
    ):
        images[2]
    path.unlink()
    with pytest.raises(SampleError, match=f"{path}, byte 0: read failed: No such file"):
        images[2]


@pytest.mark.parametrize("name", ["parquet", "feather", "arrow", "hf_datasets"])
def test_a_table_whose_bytes_are_damaged_is_skipped_part_by_part(
    name: str, files: Callable[[str], Path], source: Damaged
) -> None:
    folder = files(name)
    whole = source(name, folder)
    assert len(whole) == SAMPLES
    path = Path(whole.get_row_file(1).name)  # type: ignore[attr-defined]
    start = int(whole.index["start"][1])  # type: ignore[attr-defined]
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\x77" * 200)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that its index is used
    first, second = (int(each) for each in whole.index["stop"][:2])  # type: ignore[attr-defined]
    with pytest.raises(SampleError, match=f"{path}, byte {start}: "):
        source(name, folder)[first]
    skipping = source(name, folder, on_error="skip")
    before, *stand_ins = (sample["id"] for sample in skipping.__getitems__([first - 1, first, second - 1]))
    assert before == first - 1
    assert all(not first <= each < second for each in stand_ins)


def test_what_is_compressed_as_a_whole_is_refused_with_the_remedy(tmp_path: Path, source: Damaged) -> None:
    for name, ending in (("json_lines", "jsonl"), ("webdataset", "tar")):
        path = tmp_path / f"a.{ending}"
        path.write_bytes(gzip.compress(b"{}\n" * 1000))
        with pytest.raises(
            SampleError, match=f"{path}, byte 0: gzip-compressed files do not support .*Decompress the file"
        ):
            len(source(name, path))


@pytest.mark.parametrize("name", ["parquet", "feather", "arrow", "webdataset"])
def test_files_of_another_format_are_named(name: str, tmp_path: Path, source: Damaged) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps(rows()) * 20)
    with pytest.raises(SampleError, match=rf"{path}, byte \d+: "):
        len(source(name, path))


def test_columns_of_categories_are_refused(tmp_path: Path, source: Damaged) -> None:
    table = pyarrow.table({"a": pyarrow.array(["x", "y"]).dictionary_encode()})
    with ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(SampleError, match="dictionary-encoded columns.*Write them as plain columns"):
        len(source("arrow", tmp_path))


def test_a_dataset_whose_split_is_not_there_names_those_that_are(tmp_path: Path, source: Damaged) -> None:
    part = datasets.Dataset.from_list(rows())
    datasets.DatasetDict({"train": part, "test": part.select(range(5))}).save_to_disk(tmp_path / "set")
    assert len(source("hf_datasets", tmp_path / "set", split="test")) == 5
    with pytest.raises(
        ConfigError, match="unknown split 'tain'; did you mean 'train'. Available: test, train. Set data.split"
    ):
        len(source("hf_datasets", tmp_path / "set", split="tain"))
    with pytest.raises(ConfigError, match="no split selected. Available: test, train"):
        len(source("hf_datasets", tmp_path / "set"))
    shutil.rmtree(tmp_path / "set")
    with pytest.raises(ConfigError, match=r"set/state.json: no such file"):
        len(source("hf_datasets", tmp_path / "set"))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "images"])
def test_a_file_that_is_replaced_or_written_to_before_it_is_opened_is_named(
    name: str, files: Callable[[str], Path], source: Damaged
) -> None:
    folder = files(name)
    path = [path for path in sorted(folder.iterdir()) if path.suffix != ".json"][-1]
    assert len(source(name, folder)) == SAMPLES  # with an index, no file needs to be opened for one
    replaced, changed = source(name, folder), source(name, folder)
    assert len(replaced) == SAMPLES
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.replace(path)
    with pytest.raises(SampleError, match=f"{path}, byte .*the file was replaced.*Restart the run"):
        replaced[SAMPLES - 1]
    assert len(changed) == SAMPLES
    assert len(changed.files) == 2
    os.utime(path, (1, 1))
    with pytest.raises(SampleError, match=f"{path}, byte .*the file was modified after.*Restart the run"):
        changed[SAMPLES - 1]
    assert len(source(name, folder)) == SAMPLES
