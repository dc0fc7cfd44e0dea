"""Samples of every format match the format's own library, wherever the files are and in any reader."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.formats import FORMATS, SAMPLES, opened
from tests.data.range_server import served
from worldsize.data.storage.byte_files import COUNTS

Written = Callable[[str], Path]
each_format = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """``written(name)`` is a folder with the files of a format; tests do not change it."""
    folders: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name) / "files"
            folders[name].mkdir()
            FORMATS[name].write(folders[name])
        return folders[name]

    return write


def at_memory(folder: Path) -> str:
    url = f"memory://{folder}"
    fsspec.filesystem("memory").put(str(folder) + "/", url + "/", recursive=True)
    return url


@pytest.fixture
def at(written: Written) -> Iterator[Callable[[str, str], str]]:
    """``at(name, place)`` is the path or URL of a format's files: here, in fsspec's memory, or on a server."""
    with served(Path("/")) as server:

        def url(name: str, place: str) -> str:
            folder = written(name)
            if place == "memory":
                return at_memory(folder)
            return str(folder) if place == "path" else f"{server.url}{folder}/"

        yield url


@each_format
@pytest.mark.parametrize("place", ["path", "memory", "http"])
def test_samples_are_what_the_library_of_the_format_reads(
    name: str, place: str, at: Callable[[str, str], str], written: Written, tmp_path: Path
) -> None:
    expected, source = FORMATS[name].reference(written(name)), opened(name, at(name, place), tmp_path)
    assert len(source) == len(expected) == SAMPLES
    assert [FORMATS[name].plain(source[index]) for index in range(SAMPLES)] == expected
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = source.__getitems__(order + order[:3])
    assert [FORMATS[name].plain(sample) for sample in shuffled] == [expected[index] for index in order + order[:3]]
    for index in (-1, SAMPLES):
        with pytest.raises(IndexError, match=f"sample index {index} is out of range for {SAMPLES}"):
            source[index]
        with pytest.raises(IndexError, match=f"sample index {index} is out of range for {SAMPLES}"):
            source.__getitems__([0, index])


@each_format
@pytest.mark.parametrize("place", ["path", "http"])
def test_forked_data_workers_read_what_their_parent_has_opened(
    name: str, place: str, at: Callable[[str, str], str], written: Written, tmp_path: Path
) -> None:
    source = opened(name, at(name, place), tmp_path)
    FORMATS[name].plain(source[0])
    loader = DataLoader(source, num_workers=2, multiprocessing_context="fork", collate_fn=list, batch_size=10)
    read = [FORMATS[name].plain(sample) for batch in loader for sample in batch]
    assert read == FORMATS[name].reference(written(name))


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        yield processes


@each_format
def test_a_spawned_process_reads_what_it_is_sent(
    name: str, spawned: ProcessPoolExecutor, written: Written, tmp_path: Path
) -> None:
    source = opened(name, written(name), tmp_path)
    FORMATS[name].plain(source[0])
    read = spawned.submit(source.__getitems__, range(SAMPLES)).result()
    assert [FORMATS[name].plain(sample) for sample in read] == FORMATS[name].reference(written(name))


@each_format
def test_a_pickled_source_carries_nothing_that_was_opened(name: str, written: Written, tmp_path: Path) -> None:
    source = opened(name, written(name), tmp_path)
    fresh = len(pickle.dumps(source))
    source[SAMPLES - 1]
    assert len(pickle.dumps(source)) == fresh < 1000
    assert pickle.loads(pickle.dumps(source)) == source


@each_format
def test_what_is_read_is_counted_and_what_a_cache_keeps_is_not_fetched_again(
    name: str, written: Written, tmp_path: Path
) -> None:
    with served(written(name)) as server:
        source = opened(name, server.url + "/", tmp_path)
        assert len(source) == SAMPLES
        before, fetched, asked = COUNTS.read, COUNTS.fetched, len(server.ranges)
        samples = [FORMATS[name].plain(source[index]) for index in range(SAMPLES)]
        assert COUNTS.read - before > SAMPLES * 8
        assert COUNTS.fetched - fetched <= sum(path.stat().st_size for path in written(name).rglob("*"))
        count = len(server.ranges)
        again = opened(name, server.url + "/", tmp_path)
        assert [FORMATS[name].plain(again[index]) for index in range(SAMPLES)] == samples
        assert len(server.ranges) == count >= asked


@each_format
def test_the_fingerprint_changes_with_the_data_alone(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / number / "files" for number in "ab"]
    folders[0].mkdir(parents=True)
    FORMATS[name].write(folders[0])
    shutil.copytree(folders[0], folders[1])
    first, second = (opened(name, folder, tmp_path / "cache").fingerprint() for folder in folders)
    assert first == second
    path = max((path for path in folders[1].rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if name == "images":  # 16 of them are inspected
        path.unlink()
    assert opened(name, folders[1], tmp_path / "cache").fingerprint()["sha256"] != first["sha256"]
