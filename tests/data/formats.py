"""The same 50 samples in files of every format, written by each format's own library."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy
import pyarrow
import webdataset
from PIL import Image
from pyarrow import feather, ipc, parquet
from webdataset.tariterators import group_by_keys, tar_file_iterator

from worldsize.data.source import FileSource
from worldsize.data.sources.arrow import Arrow, HfDataset, Parquet
from worldsize.data.sources.images import ImageFolder
from worldsize.data.sources.json_lines import JsonLines
from worldsize.data.sources.webdataset import WebDataset
from worldsize.data.storage.cache import Cache

SAMPLES = 50
Row = dict[str, Any]


def rows() -> list[Row]:
    """Return the samples: a number, non-ASCII words of unequal length, and two numbers."""
    return [
        {"id": number, "text": "größer 語 " * (number % 7), "values": [number / 4, float(number % 3)]}
        for number in range(SAMPLES)
    ]


def halves() -> Iterator[tuple[str, list[Row]]]:
    """Yield the samples of two files; the first is larger."""
    yield "a", rows()[:30]
    yield "b", rows()[30:]


@dataclass(frozen=True)
class Format:
    """One format of files.

    Attributes:
        write: Writes the samples into a folder.
        source: Reads them at a path or URL.
        reference: Reads them by the format's own library.
        plain: Converts a sample for comparison.
    """

    write: Callable[[Path], None]
    source: Callable[..., FileSource]
    reference: Callable[[Path], list[Any]]
    number: Callable[[Any], int] = lambda sample: int(sample["id"])
    plain: Callable[[Any], Any] = lambda sample: sample


def _write_json(folder: Path) -> None:
    for name, part in halves():
        lines = [json.dumps(row, ensure_ascii=False) for row in part]
        (folder / f"{name}.jsonl").write_text("\n".join([lines[0], "", "  ", *lines[1:]]), encoding="utf-8")


def _read_json(folder: Path) -> list[Row]:
    text = "\n".join((folder / f"{name}.jsonl").read_text(encoding="utf-8") for name in "ab")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _write_parquet(folder: Path) -> None:
    for name, part in halves():
        parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{name}.parquet", row_group_size=7)


def _read_parquet(folder: Path) -> list[Row]:
    read: list[Row] = pyarrow.concat_tables(
        [parquet.read_table(folder / f"{name}.parquet") for name in "ab"]
    ).to_pylist()
    return read


def _write_feather(folder: Path) -> None:
    for name, part in halves():  # one compressed, one not
        compression = "lz4" if name == "a" else "uncompressed"
        feather.write_feather(
            pyarrow.Table.from_pylist(part), folder / f"{name}.feather", compression=compression, chunksize=7
        )


def _read_feather(folder: Path) -> list[Row]:
    read: list[Row] = [row for name in "ab" for row in feather.read_table(folder / f"{name}.feather").to_pylist()]
    return read


def _write_stream(folder: Path) -> None:
    for name, part in halves():
        table = pyarrow.Table.from_pylist(part)
        with ipc.new_stream(str(folder / f"{name}.arrow"), table.schema) as stream:
            stream.write_table(table, max_chunksize=7)


def _read_stream(folder: Path) -> list[Row]:
    return [
        row for name in "ab" for row in ipc.open_stream((folder / f"{name}.arrow").read_bytes()).read_all().to_pylist()
    ]


def _write_tar(folder: Path) -> None:
    """Write the first shard by webdataset, and the second by tarfile, with long names and a folder in between."""
    (_, first), (_, second) = halves()
    with webdataset.TarWriter(str(folder / "a.tar")) as sink:
        for row in first:
            sink.write({"__key__": f"k{row['id']:03d}", "cls": row["id"], "json": row, "txt": row["text"]})
    with tarfile.open(folder / "b.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        folder_of = "ü" * 60 + "/" + "n" * 100
        inside = tarfile.TarInfo(folder_of)
        inside.type = tarfile.DIRTYPE
        for row in second:
            parts = {"cls": str(row["id"]), "JSON": json.dumps(row), "txt": row["text"]}
            for ending, text in parts.items():
                member = tarfile.TarInfo(f"{folder_of}/k{row['id']:03d}.{ending}")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
            archive.addfile(inside)


def _read_tar(folder: Path) -> list[Row]:
    samples = []
    for path in (folder / "a.tar", folder / "b.tar"):
        with path.open("rb") as shard:
            members = [{**member, "__url__": str(path)} for member in tar_file_iterator(shard)]
        samples += [{key: sample[key] for key in sample if key != "__url__"} for sample in group_by_keys(members)]
    return samples


def _write_images(folder: Path) -> None:
    for row in rows():
        pixels = numpy.full((2 + row["id"] % 3, 3, 3), row["id"], dtype=numpy.uint8)
        below = folder / ("cat", "dog", "owl")[row["id"] * 3 // SAMPLES] / ("", "more")[row["id"] % 2]
        below.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(below / f"{row['id']:03d}.{('png', 'PNG')[row['id'] % 2]}")
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / "cat" / ".hidden.png").write_text("no image")


def _read_images(folder: Path) -> list[Row]:
    classes = sorted(path.name for path in folder.iterdir())
    paths = [path for name in classes for below in (folder / name, folder / name / "more") for path in _images(below)]
    return [
        {"image": numpy.asarray(Image.open(path)).tolist(), "label": classes.index(path.relative_to(folder).parts[0])}
        for path in paths
    ]


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.suffix.lower() == ".png")


def _plain_image(sample: Mapping[str, Any]) -> Row:
    return {**sample, "image": numpy.asarray(sample["image"]).tolist()}


def _write_dataset(folder: Path) -> None:
    datasets.Dataset.from_list(rows()).save_to_disk(folder, num_shards=2)


def _read_dataset(folder: Path) -> list[Row]:
    return list(datasets.load_from_disk(str(folder)))


FORMATS: Mapping[str, Format] = {
    "json_lines": Format(_write_json, JsonLines, _read_json),
    "parquet": Format(_write_parquet, Parquet, _read_parquet),
    "feather": Format(_write_feather, Arrow, _read_feather),
    "arrow": Format(_write_stream, Arrow, _read_stream),
    "webdataset": Format(_write_tar, WebDataset, _read_tar, number=lambda sample: int(sample["cls"])),
    "images": Format(
        _write_images,
        ImageFolder,
        _read_images,
        lambda sample: int(numpy.asarray(sample["image"]).flat[0]),
        _plain_image,
    ),
    "hf_datasets": Format(_write_dataset, HfDataset, _read_dataset),
}


def opened(name: str, path: str | Path, cache: Path, **options: Any) -> FileSource:
    """Open the files of a format at a path or URL."""
    return FORMATS[name].source(str(path), cache=Cache(folder=str(cache), block=4096), **options)
