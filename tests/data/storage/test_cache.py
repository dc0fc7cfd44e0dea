"""The cache of remote blocks stays within its capacity with any number of writers, and never blocks reading."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.small_disk import fill, mounted
from worldsize.data.storage.cache import BlockCache, Cache
from worldsize.errors import WorldsizeError

BLOCK = 4096


def kept(folder: Path) -> dict[str, int]:
    """Return the numbers of the blocks on disk and their sizes."""
    return {path.name: path.stat().st_size for path in (folder / "blocks").rglob("*") if path.is_file()}


def content(number: int) -> Callable[[], bytes]:
    return lambda: bytes([number % 251]) * BLOCK


def never() -> bytes:
    raise AssertionError("it is fetched again")


def read(blocks: BlockCache, number: int, fetch: Callable[[], bytes] | None = None) -> bytes:
    return blocks.read("a" * 64, number, (10, 20), fetch or content(number))


def test_a_block_is_fetched_once_and_its_parts_are_read_from_disk(tmp_path: Path) -> None:
    blocks = BlockCache(Cache(str(tmp_path), block=BLOCK))
    data = os.urandom(BLOCK)
    assert blocks.read("a" * 64, 0, (10, 20), lambda: data) == data[10:20]
    assert blocks.read("a" * 64, 0, (0, BLOCK), never) == data
    assert BlockCache(Cache(str(tmp_path), block=BLOCK)).read("a" * 64, 0, (4000, BLOCK), never) == data[4000:]
    assert blocks.read("b" * 64, 0, (0, 1), lambda: b"x" * BLOCK) == b"x"


def test_the_capacity_bounds_what_one_process_keeps(tmp_path: Path) -> None:
    capacity = 20 * BLOCK
    blocks = BlockCache(Cache(str(tmp_path), capacity=capacity, block=BLOCK))
    for number in range(100):
        assert read(blocks, number) == bytes([number % 251]) * 10
        assert sum(kept(tmp_path).values()) <= capacity
    assert sum(kept(tmp_path).values()) >= capacity // 2
    assert str(99) in kept(tmp_path)


def test_the_blocks_unused_for_longest_are_removed(tmp_path: Path) -> None:
    blocks = BlockCache(Cache(str(tmp_path), capacity=10 * BLOCK, block=BLOCK))
    for number in range(9):
        read(blocks, number)
    paths = {path.name: path for path in (tmp_path / "blocks").rglob("*") if path.is_file()}
    now = time.time()
    for number in range(9):  # block 0 was used last, 8 first
        os.utime(paths[str(number)], (now - 100 - number, now - 100 - number))
    read(blocks, 7, never)  # this counts as a use
    for number in range(9, 12):
        read(blocks, number)
    left = {int(name) for name in kept(tmp_path)}
    assert left >= {7, 9, 10, 11}
    removed = set(range(9)) - left
    assert removed == set(sorted(set(range(9)) - {7}, reverse=True)[: len(removed)])
    assert removed


def _fill(folder: str, first: int, capacity: int) -> None:
    blocks = BlockCache(Cache(folder, capacity=capacity, block=BLOCK))
    for number in range(first, first + 150):
        assert read(blocks, number) == bytes([number % 251]) * 10


def test_the_capacity_bounds_what_several_processes_keep_together(tmp_path: Path) -> None:
    """Each writer may exceed it by 1/32 until one of them checks."""
    capacity, processes = 64 * BLOCK, 4
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_fill, args=(str(tmp_path), 100 * each, capacity)) for each in range(processes)]
    for each in started:
        each.start()
    most = 0
    while any(each.is_alive() for each in started):
        sizes = []
        for path in (tmp_path / "blocks").rglob("*") if (tmp_path / "blocks").exists() else ():
            try:
                sizes.append(path.stat().st_size if path.is_file() else 0)
            except FileNotFoundError:  # removed during the check
                continue
        most = max(most, sum(sizes))
    for each in started:
        each.join()
        assert each.exitcode == 0
    assert capacity / 2 < most <= capacity * (1 + processes / 32) + processes * BLOCK


@pytest.mark.parametrize("capacity", [0, BLOCK - 1, BLOCK])
def test_a_capacity_smaller_than_a_block_keeps_nothing_and_says_so_once(
    capacity: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = BlockCache(Cache(str(tmp_path), capacity=capacity, block=BLOCK))
    with caplog.at_level(logging.WARNING, "worldsize"):
        for number in range(3):
            assert read(blocks, number) == bytes([number]) * 10
    assert kept(tmp_path) == {}
    (record,) = caplog.records
    assert f"a block of {BLOCK:,} bytes does not fit into the cache of {capacity:,} bytes" in record.getMessage()
    assert "Increase cache.capacity" in record.getMessage()


def test_a_full_disk_costs_the_cache_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "disk", "256k") as disk:
        blocks = BlockCache(Cache(str(disk), block=BLOCK))
        read(blocks, 0)
        fill(disk)
        with caplog.at_level(logging.WARNING, "worldsize"):
            for number in (1, 2):
                assert read(blocks, number) == bytes([number]) * 10
        assert read(blocks, 0, never) == bytes(10)
        (record,) = caplog.records
        assert f"the disk of {disk}/blocks is full" in record.getMessage()
        assert not [path for path in (disk / "blocks").rglob(".*")], "what was not written to its end is removed"
        (disk / "ballast").unlink()
        read(blocks, 3)
        assert read(blocks, 3, never) == bytes([3]) * 10


def test_a_block_that_was_cut_off_is_fetched_again(tmp_path: Path) -> None:
    blocks = BlockCache(Cache(str(tmp_path), block=BLOCK))
    read(blocks, 5)
    (path,) = (path for path in (tmp_path / "blocks").rglob("5") if path.is_file())
    path.write_bytes(b"short")
    assert read(blocks, 5) == bytes([5]) * 10
    assert path.stat().st_size == BLOCK


def test_blocks_that_others_remove_are_fetched_again(tmp_path: Path) -> None:
    blocks = BlockCache(Cache(str(tmp_path), block=BLOCK))
    read(blocks, 1)
    for path in sorted((tmp_path / "blocks").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "blocks").rmdir()
    assert read(blocks, 1) == bytes([1]) * 10
    assert read(blocks, 1, never) == bytes([1]) * 10


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        WorldsizeError,
        match="failed to create the cache folder .*: Not a directory. Set cache.folder to a different folder",
    ):
        BlockCache(Cache(str(tmp_path / "file" / "cache")))
