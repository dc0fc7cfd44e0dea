"""An index is built once, by one process, and never read if it does not match the current files."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.data.formats import FORMATS, SAMPLES, opened
from tests.support.small_disk import fill, mounted
from worldsize.data.storage.byte_files import ByteFile, LocalFile
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.index import open_index
from worldsize.errors import WorldsizeError

FORK = multiprocessing.get_context("fork")


class Scan:
    """A scan of bytes, one per row, that records its start in a file."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        notes.touch()

    def __call__(self, file: ByteFile) -> Iterator[Mapping[str, Any]]:
        with self.notes.open("a") as notes:
            notes.write(f"{Path(file.name).name}\n")
        data = numpy.frombuffer(file.read(0, file.size), numpy.uint8)
        for first in range(0, len(data), 3):
            part = data[first : first + 3]
            yield {"value": part, "twice": numpy.repeat(part, 2).astype(numpy.uint16)}

    @property
    def files(self) -> list[str]:
        return self.notes.read_text().split()


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    return Scan(tmp_path / "notes")


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for name, text in (("a", b"abcd"), ("b", b""), ("c", b"xyz")):
        (tmp_path / name).write_bytes(text)
    return [tmp_path / name for name in "abc"]


def made(paths: list[Path], scan: Any, *, kind: str = "bytes-1") -> Mapping[str, Any]:
    return open_index(kind, [LocalFile(path) for path in paths], Cache(str(paths[0].parent / "cache")), scan)


def test_an_index_has_the_rows_of_all_files_in_turn_and_is_mapped_from_disk(paths: list[Path], scan: Scan) -> None:
    for _ in range(2):
        index = made(paths, scan)
        assert bytes(index["value"]) == b"abcdxyz"
        assert index["twice"].tolist() == [value for value in b"abcdxyz" for _ in range(2)]
        assert index["file"].tolist() == [0, 0, 0, 0, 2, 2, 2]
        assert isinstance(index["value"].base, numpy.memmap)
    assert scan.files == ["a", "b", "c"]
    assert made(paths[1:2], scan) == {}


def _make(paths: list[Path], scan: Scan, first: Event, go: Event) -> None:
    def slow(file: ByteFile) -> Iterator[Mapping[str, Any]]:
        first.set()
        go.wait(60)
        yield from scan(file)

    assert bytes(made(paths, slow)["value"]) == b"abcdxyz"


def test_one_process_of_four_makes_the_index_while_the_others_wait(
    paths: list[Path], scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, go = FORK.Event(), FORK.Event()
    started = [FORK.Process(target=_make, args=(paths, scan, first, go)) for _ in range(4)]
    for each in started:
        each.start()
    assert first.wait(60)
    assert [each.exitcode for each in started] == [None] * 4
    go.set()
    for each in started:
        each.join(60)
    assert [each.exitcode for each in started] == [0] * 4
    assert scan.files == ["a", "b", "c"]


def test_a_pass_that_is_killed_leaves_nothing_that_is_read_and_no_lock(paths: list[Path], scan: Scan) -> None:
    first, go = FORK.Event(), FORK.Event()
    killed = FORK.Process(target=_make, args=(paths, scan, first, go))
    killed.start()
    assert first.wait(60)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    folder = paths[0].parent / "cache" / "index"
    assert [path.name[0] for path in folder.iterdir() if path.is_dir()] == ["."]
    assert bytes(made(paths, scan)["value"]) == b"abcdxyz"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "what was begun is removed"


@pytest.mark.parametrize("how", ["a changed array", "a shorter array", "no array", "no facts", "other files", "text"])
def test_a_damaged_index_is_made_anew(
    how: str, paths: list[Path], scan: Scan, caplog: pytest.LogCaptureFixture
) -> None:
    made(paths, scan)
    (folder,) = (path for path in (paths[0].parent / "cache" / "index").iterdir() if path.is_dir())
    array, facts = folder / "value", folder / "index.json"
    if how == "a changed array":
        array.write_bytes(b"abcdxyw")
    elif how == "a shorter array":
        array.write_bytes(b"abcd")
    elif how == "no array":
        array.unlink()
    elif how == "no facts":
        facts.unlink()
    elif how == "other files":  # the index of other files was copied here
        described = json.loads(facts.read_text())
        described["files"][0][1] += 1
        facts.write_text(json.dumps(described))
    else:
        facts.write_text("[]")
    with caplog.at_level(logging.WARNING, "worldsize"):
        assert bytes(made(paths, scan)["value"]) == b"abcdxyz"
    assert scan.files == ["a", "b", "c"] * 2
    assert f"the index of {paths[0]} and 2 more in {folder} is damaged and will be rebuilt" in caplog.text


def test_a_changed_file_another_order_and_another_rule_have_indices_of_their_own(paths: list[Path], scan: Scan) -> None:
    made(paths, scan)
    paths[0].write_bytes(b"ABC")
    assert bytes(made(paths, scan)["value"]) == b"ABCxyz"
    os.utime(paths[0], ns=(1, 1))  # the same size, a different modification time
    assert bytes(made(paths, scan)["value"]) == b"ABCxyz"
    assert bytes(made(paths[::-1], scan)["value"]) == b"xyzABC"
    made(paths, scan, kind="bytes-2")
    assert len(scan.files) == 3 * 5
    made(paths[::-1], scan)
    assert len(scan.files) == 3 * 5


def test_a_file_that_is_replaced_is_not_read_as_it_was(paths: list[Path], scan: Scan) -> None:
    assert bytes(made(paths, scan)["value"]) == b"abcdxyz"
    (paths[0].parent / "new").write_bytes(b"1234")
    (paths[0].parent / "new").rename(paths[0])
    assert bytes(made(paths, scan)["value"]) == b"1234xyz"


def test_an_index_that_finds_no_room_is_an_error_with_a_remedy(paths: list[Path], scan: Scan, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        (disk / "index").mkdir()
        (disk / "index" / "x").touch()
        fill(disk)
        message = (
            f"failed to write the index of {paths[0]}: No space left.*Free space in {disk}/index, or set cache.folder"
        )
        with pytest.raises(WorldsizeError, match=message):
            open_index("bytes-1", [LocalFile(paths[0])], Cache(str(disk)), scan)


def test_a_cache_that_one_may_not_write_to_is_an_error_with_a_remedy(
    paths: list[Path], scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("worldsize.data.storage.index.FileLock.acquire", refuse)
    with pytest.raises(WorldsizeError, match=r"failed to lock the index .*\.lock: Permission denied. Set cache.folder"):
        made(paths, scan)


@pytest.mark.parametrize("name", FORMATS)
def test_samples_are_found_again_after_files_changed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    FORMATS[name].write(folder)
    assert len(opened(name, folder, tmp_path / "cache")) == SAMPLES
    shutil.rmtree(folder)
    folder.mkdir()
    FORMATS[name].write(folder)
    number = FORMATS[name].number
    again = opened(name, folder, tmp_path / "cache")
    assert [number(again[index]) for index in (SAMPLES - 1, 0)] == [
        number(FORMATS[name].source(str(folder), cache=Cache(str(tmp_path / "other")))[index])
        for index in (SAMPLES - 1, 0)
    ]
