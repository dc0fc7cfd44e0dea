"""Indices take at most the cache's capacity, and an index in use is never removed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy
import pytest

from worldsize.data.storage.byte_files import ByteFile, LocalFile
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.index import open_index

FORK = multiprocessing.get_context("fork")
ROWS = 10_000  # of one byte each, in an index of four more


def scan(file: ByteFile) -> Iterator[Mapping[str, Any]]:
    yield {"value": numpy.frombuffer(file.read(0, file.size), numpy.uint8)}


@pytest.fixture
def files(tmp_path: Path) -> list[ByteFile]:
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * ROWS)
    return [LocalFile(tmp_path / f"{number}") for number in range(4)]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "cache"), capacity=5 * ROWS * 2.5)  # for two of them


def kept(cache: Cache) -> set[int]:
    """Return the numbers of the files with an index."""
    return {int(numpy.fromfile(path, numpy.uint8, 1)[0]) for path in (cache.root / "index").glob("*/value")}


def used(cache: Cache, *, before: float) -> None:
    """Set the last use of all indices to this many seconds ago."""
    for facts in (cache.root / "index").glob("*/index.json"):
        os.utime(facts, (time.time() - before,) * 2)


def test_the_index_unused_for_longest_goes_when_there_are_too_many(files: list[ByteFile], cache: Cache) -> None:
    for number, file in enumerate(files[:2]):
        open_index("bytes", [file], cache, scan)
        used(cache, before=100 - number)
    open_index("bytes", [files[0]], cache, scan)  # it is used again
    open_index("bytes", [files[2]], cache, scan)
    assert kept(cache) == {0, 2}
    open_index("bytes", [files[3]], Cache(cache.folder, capacity=0), scan)
    assert kept(cache) == {3}


def test_an_index_in_use_stays(files: list[ByteFile], cache: Cache) -> None:
    mine = open_index("bytes", [files[0]], cache, scan)
    used(cache, before=100)
    for file in files[1:]:
        open_index("bytes", [file], cache, scan)
    assert kept(cache) == {0, 3}
    assert mine["value"].tolist() == [0] * ROWS
    del mine
    open_index("bytes", [files[1]], Cache(cache.folder, capacity=0), scan)
    assert kept(cache) == {1}


def _use(file: ByteFile, cache: Cache, begun: Event, ended: Event) -> None:
    index = open_index("bytes", [file], cache, scan)
    begun.set()
    ended.wait(60)
    assert index["value"].sum() == ROWS


def test_an_index_that_another_process_uses_stays_until_it_ends(files: list[ByteFile], cache: Cache) -> None:
    begun, ended = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_use, args=(files[1], cache, begun, ended))
    process.start()
    assert begun.wait(60)
    none = Cache(cache.folder, capacity=0)
    open_index("bytes", [files[2]], none, scan)
    assert kept(cache) == {1, 2}
    ended.set()
    process.join()
    open_index("bytes", [files[3]], none, scan)
    assert (process.exitcode, kept(cache)) == (0, {3})


def test_what_a_killed_process_left_is_removed(files: list[ByteFile], cache: Cache) -> None:
    left = cache.create_folder("index") / ".abc.1234"
    left.mkdir()
    (left / "value").write_bytes(bytes(ROWS))
    open_index("bytes", [files[0]], cache, scan)
    assert not left.exists()
