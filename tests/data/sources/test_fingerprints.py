"""A fingerprint reads only the bytes it needs, and trusts a manifest that matches the files beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.data.range_server import served
from worldsize.data.mixture import Mixture, Part
from worldsize.data.preparation import Preparation
from worldsize.data.source import FileSource
from worldsize.data.sources.documents import DocumentWindows, PackedDocuments
from worldsize.data.sources.json_lines import JsonLines
from worldsize.data.sources.tokens import TokenWindows
from worldsize.data.storage.cache import Cache
from worldsize.data.texts import Tokenizer
from worldsize.errors import ConfigError

PARTS, PART = 16, 16 << 10  # of a large file


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "cache"))


def test_of_a_large_remote_file_only_the_hashed_parts_come(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "a.jsonl"
    path.write_bytes(b"\n".join(b'"' + os.urandom(1 << 19).hex().encode() + b'"' for _ in range(9)))
    with served(path.parent) as server:
        remote = JsonLines(f"{server.url}/a.jsonl", cache=cache)
        assert remote.fingerprint() == JsonLines(str(path), cache=cache).fingerprint()
        assert (len(server.ranges), server.sent) == (PARTS, PARTS * PART)
        len(remote)  # the index needs the whole file, and the cache keeps it
        asked = len(server.ranges)
        assert remote.fingerprint() == JsonLines(str(path), cache=cache).fingerprint()
        assert len(server.ranges) - asked < PARTS // 2  # those parts that straddle two blocks


@pytest.mark.parametrize("pattern", ["/", "/*.jsonl"])
def test_the_files_of_a_remote_folder_are_described_by_its_list(
    pattern: str, tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = fsspec.filesystem("memory")
    for number in range(20):
        system.pipe(f"/{tmp_path.name}/{number:02d}.jsonl", b"1\n")
    asked: list[str] = []
    info = MemoryFileSystem.info

    def counted(self: MemoryFileSystem, path: str, **options: Any) -> Any:
        asked.append(path)
        return info(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "info", counted)
    assert JsonLines(f"memory://{tmp_path.name}{pattern}", cache=cache).fingerprint()["files"] == 20
    assert len(asked) < 5


def test_many_files_have_the_fingerprint_of_each_in_turn(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "files").mkdir()
    for number in range(300):
        (tmp_path / "files" / f"{number:03d}.jsonl").write_text(f"{number}\n" * (number % 5 + 1))
    lines = JsonLines(str(tmp_path / "files"), cache=cache)
    again = JsonLines([str(file.name) for file in lines.files], cache=cache)
    before = again.fingerprint()
    assert lines.fingerprint() == before
    assert before["files"] == 300
    (tmp_path / "files" / "299.jsonl").write_text("299\n" * 4 + "298\n")
    assert JsonLines(str(tmp_path / "files"), cache=cache).fingerprint()["sha256"] != before["sha256"]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("some text that is long enough")
    Preparation([tmp_path / "text.txt"], Tokenizer("bytes")).write_shards(tmp_path / "out", processes=1)
    return tmp_path / "out"


@pytest.mark.parametrize("kind", [TokenWindows, DocumentWindows, PackedDocuments])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: numpy.save(folder / "documents_00000.npy", [0, 5, 29]), "00000.npy: .* 144 bytes.*152"),
        (lambda folder: numpy.save(folder / "documents_00001.npy", [0, 5]), "00001.npy: .* no file .*144"),
        (
            lambda folder: (folder / "documents_00000.npy").unlink(),
            "found no file|document boundaries documents_00000.npy not found",
        ),
    ],
)
def test_boundaries_that_the_manifest_does_not_list_are_named(
    kind: Callable[..., FileSource], spoil: Callable[[Path], None], message: str, prepared: Path, cache: Cache
) -> None:
    assert kind(str(prepared), length=5, cache=cache).fingerprint()["files"] == 1
    spoil(prepared)
    with pytest.raises(ConfigError, match=message):
        kind(str(prepared), length=5, cache=cache).fingerprint()


def test_the_fingerprint_of_a_mixture_names_its_tokenizers(prepared: Path, tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "raw.bin").write_bytes(bytes(100))
    raw = TokenWindows(str(tmp_path / "raw.bin"), length=5, cache=cache)
    tokens = TokenWindows(str(prepared), length=5, cache=cache)
    found = Mixture({"books": Part(tokens, weight=1), "raw": Part(raw, weight=1)}).fingerprint()
    assert found["tokenizers"] == {"books": tokens.fingerprint()["tokenizers"]}
    assert "tokenizers" not in Mixture({"raw": Part(raw, weight=1)}).fingerprint()
