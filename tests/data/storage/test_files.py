"""Files are found by path, folder, pattern and URL, read in parts, and named without secrets."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import fsspec
import pytest

from tests.data.range_server import served
from worldsize.data.sources.json_lines import JsonLines
from worldsize.data.storage.byte_files import COUNTS, LocalFile, SampleError, strip_secrets
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.listing import open_files
from worldsize.errors import ConfigError

SECRET = "hunter2"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "cache"), block=4096)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("files/b-01.jsonl", "files/b-02.jsonl", "files/more/c.jsonl", "files/b-10.txt", "files/x{1..2}.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(name) + "\n")
    return tmp_path / "files"


@pytest.mark.parametrize("place", ["path", "file", "memory", "http"])
def test_files_are_found_in_the_order_of_their_names(place: str, folder: Path, cache: Cache) -> None:
    with served(folder) as server:
        base = {"path": str(folder), "file": f"file://{folder}", "memory": f"memory://{folder}", "http": server.url}[
            place
        ]
        if place == "memory":
            fsspec.filesystem("memory").put(f"{folder}/", f"{base}/", recursive=True)

        def names(*paths: str, endings: tuple[str, ...] = ("",)) -> list[str]:
            files = open_files(list(paths), cache, endings=endings)
            return [file.name.rpartition("/")[2] for file in files]

        assert names(f"{base}/b-{{01..02}}.jsonl") == ["b-01.jsonl", "b-02.jsonl"]
        assert names(f"{base}/b-10.txt", f"{base}/b-01.jsonl") == ["b-10.txt", "b-01.jsonl"]
        assert names(f"{base}/b-*.jsonl") == ["b-01.jsonl", "b-02.jsonl"]
        if place in ("path", "file"):  # a file with exactly this name exists
            assert names(f"{base}/x{{1..2}}.jsonl") == ["x{1..2}.jsonl"]
        if place != "http":  # a server lists its files in a page that encodes braces
            assert names(f"{base}/", endings=(".jsonl",))[:2] == ["b-01.jsonl", "b-02.jsonl"]
            assert "c.jsonl" in names(base, endings=(".jsonl",))
        for missing in (f"{base}/nothing.jsonl", f"{base}/nothing-*.jsonl"):
            with pytest.raises(ConfigError, match=r"nothing.*Check the data path"):
                names(missing)


def test_ranges_in_braces_stand_for_all_their_numbers(tmp_path: Path, cache: Cache) -> None:
    for first in range(2):
        for number in range(8, 12):
            (tmp_path / f"{first}-{number:03d}").touch()
    files = open_files(str(tmp_path / "{0..1}-{008..011}"), cache)
    assert [Path(file.name).name for file in files] == [
        f"{first}-{number:03d}" for first in range(2) for number in range(8, 12)
    ]


def test_bytes_are_read_as_they_are_wherever_blocks_end(tmp_path: Path, cache: Cache) -> None:
    data = os.urandom(3 * 4096 + 100)
    (tmp_path / "file").write_bytes(data)
    with served(tmp_path) as server:
        here, there = LocalFile(tmp_path / "file"), open_files(f"{server.url}/file", cache)[0]
        for start, stop in ((0, 10), (4090, 4100), (0, len(data)), (8192, 12288), (12388, 12388), (12380, 12388)):
            assert here.read(start, stop) == there.read(start, stop) == data[start:stop]
        assert here.compute_digest() == there.compute_digest()
        for file in (here, there):
            with pytest.raises(
                SampleError,
                match=f"{file.name}, byte 12388: unexpected end of file, expected 200 bytes from byte 12300",
            ):
                file.read(12300, 12500)


def test_each_process_fetches_what_it_reads_alone(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "file").write_bytes(bytes(100 * 4096))
    with served(tmp_path) as server:
        file = open_files(f"{server.url}/file", cache)[0]
        read, fetched = COUNTS.read, COUNTS.fetched
        file.read(5 * 4096 + 7, 5 * 4096 + 17)
        assert (COUNTS.read - read, COUNTS.fetched - fetched) == (10, 4096)
        assert server.ranges == ["bytes=20480-24575"]


def test_a_changed_remote_file_is_fetched_again(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "file").write_bytes(b"one")
    with served(tmp_path) as server:
        assert open_files(f"{server.url}/file", cache)[0].read(0, 3) == b"one"
        (tmp_path / "file").write_bytes(b"two")
        os.utime(tmp_path / "file", (1, 1))
        assert open_files(f"{server.url}/file", cache)[0].read(0, 3) == b"two"


def test_a_broken_connection_is_tried_again_twice(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worldsize.data.storage.cache._WAITS", (0.0, 0.0))
    (tmp_path / "file").write_bytes(bytes(8192))
    with served(tmp_path) as server, caplog.at_level(logging.WARNING, "worldsize"):
        file = open_files(f"{server.url}/file?key={SECRET}", cache)[0]
        server.failures = 2
        assert file.read(0, 5) == bytes(5)
        assert len(caplog.records) == 2
        server.failures = 3
        with pytest.raises(SampleError, match=f"{server.url}/file, byte 5000: read failed: 503"):
            file.read(5000, 5001)
    assert SECRET not in caplog.text


def test_a_server_that_knows_no_ranges_is_told_apart(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * 4096))
    with served(tmp_path) as server:
        file = open_files(f"{server.url}/file", cache)[0]
        server.ignores_ranges = True
        with pytest.raises(
            SampleError, match="the server does not support range requests. Copy the file to this machine"
        ):
            file.read(0, 5)


def test_a_remote_file_that_shrinks_or_goes_is_named(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worldsize.data.storage.cache._WAITS", ())
    (tmp_path / "file").write_bytes(bytes(2 * 4096))
    with served(tmp_path) as server:
        file = open_files(f"{server.url}/file", cache)[0]
        (tmp_path / "file").write_bytes(bytes(4100))
        with pytest.raises(SampleError, match="byte 5000: read failed: received 4 of 4096 bytes \\(file truncated"):
            file.read(5000, 5001)
        (tmp_path / "file").unlink()
        with pytest.raises(SampleError, match="byte 0: read failed: the file no longer exists"):
            file.read(0, 5)


def test_what_may_not_be_read_is_named(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    file = LocalFile(tmp_path / "file")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SampleError, match=f"{tmp_path}/file, byte 1: read failed: Permission denied"):
        file.read(1, 2)
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ConfigError, match="failed to open .*file: Permission denied. Check the data path"):
        open_files(str(tmp_path / "file"), cache)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"https://me:{SECRET}@host/a.tar", "https://host/a.tar"),
        (f"https://host/a.tar?token={SECRET}&x=1", "https://host/a.tar"),
        (f"s3://{SECRET}@bucket/a b.tar", "s3://bucket/a b.tar"),
        ("s3://bucket/a.tar", "s3://bucket/a.tar"),
        (f"GET https://me:{SECRET}@host/a?b={SECRET} failed", "GET https://host/a failed"),
    ],
)
def test_secrets_are_left_out_of_urls(url: str, shown: str) -> None:
    assert strip_secrets(url) == shown


def test_no_message_fingerprint_index_or_name_of_a_block_has_what_is_secret_in_a_url(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.jsonl").write_text('{"id": 1}\nbroken\n')
    with served(tmp_path / "files") as server, caplog.at_level(logging.DEBUG, "worldsize"):
        host = server.url.removeprefix("http://")
        url = f"http://{host}/a.jsonl?signature={SECRET}"
        lines = JsonLines(url, cache=cache)
        assert lines[0] == {"id": 1}
        said = [json.dumps(lines.fingerprint())]
        with pytest.raises(SampleError, match=f"{server.url}/a.jsonl, byte 10") as error:
            lines[1]
        said.append(str(error.value))
        JsonLines(url, cache=cache, on_error="skip")[1]
        for wrong in (
            f"http://me:{SECRET}@127.0.0.1:9/a?b={SECRET}",
            f"http://{host}/none?b={SECRET}",
            f"no://{SECRET}@x/y",
        ):
            with pytest.raises(ConfigError, match="Check the data path") as refused:
                len(JsonLines(wrong, cache=cache))
            said.append(str(refused.value))
    assert SECRET not in caplog.text
    assert not [text for text in said if SECRET in text]
    written = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(written) >= 5
    assert not [path for path in written if SECRET.encode() in path.read_bytes() or SECRET in str(path)]
