"""Token files: every token is predicted as in a plain loop over the text, wherever the files are."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest

from worldsize.data.preparation import Preparation
from worldsize.data.sources.documents import DocumentWindows, PackedDocuments
from worldsize.data.sources.tokens import TokenWindows
from worldsize.data.storage.byte_files import SampleError
from worldsize.data.storage.cache import Cache
from worldsize.data.texts import Tokenizer
from worldsize.errors import ConfigError, WorldsizeError

LENGTH = 16


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder as ``worldsize prepare`` writes it: three shards of documents of 0 to 60 tokens."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    random = numpy.random.default_rng(0)
    for shard in range(3):
        lengths = random.integers(0, 60, 2500 if shard == 1 else 40)
        bounds = numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int64)
        numpy.save(folder / f"documents_{shard:05}.npy", bounds)
        numpy.save(folder / f"tokens_{shard:05}.npy", random.integers(0, 1000, bounds[-1]).astype(numpy.uint16))
    return folder


def cache(tmp_path: Path) -> Cache:
    return Cache(folder=str(tmp_path / "cache"))


def texts(folder: Path) -> list[Any]:
    return [numpy.load(file).astype(int).tolist() for file in sorted(folder.glob("tokens_*.npy"))]


def documents(folder: Path) -> list[list[int]]:
    split = []
    for text, file in zip(texts(folder), sorted(folder.glob("documents_*.npy")), strict=True):
        bounds = numpy.load(file).tolist()
        split += [text[first:last] for first, last in itertools.pairwise(bounds)]
    return split


def test_windows_follow_each_other(prepared: Path, tmp_path: Path) -> None:
    data = TokenWindows(str(prepared), length=LENGTH, cache=cache(tmp_path))
    expected = [
        text[first : first + LENGTH + 1] for text in texts(prepared) for first in range(0, len(text) - LENGTH, LENGTH)
    ]
    assert [data[index].tolist() for index in range(len(data))] == expected


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_raw_numbers(tmp_path: Path, dtype: str) -> None:
    numbers = numpy.arange(100, dtype=dtype)
    numbers.tofile(tmp_path / "text.bin")
    data = TokenWindows(str(tmp_path / "text.bin"), length=9, dtype=dtype)
    assert len(data) == 11
    assert data[10].tolist() == list(range(90, 100))
    with pytest.raises(IndexError):
        data[11]


def test_a_url_gives_the_same_samples(prepared: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for file in prepared.iterdir():
        memory.pipe(f"/prepared/{file.name}", file.read_bytes())
    here = PackedDocuments(str(prepared), length=LENGTH, cache=cache(tmp_path))
    there = PackedDocuments("memory://prepared", length=LENGTH, cache=Cache(folder=str(tmp_path / "other"), block=4096))
    assert len(here) == len(there)
    for index in range(0, len(here), 37):
        assert {name: values.tolist() for name, values in here[index].items()} == {
            name: values.tolist() for name, values in there[index].items()
        }
    assert here.fingerprint() == there.fingerprint()


def test_windows_of_documents_say_where_each_begins(prepared: Path, tmp_path: Path) -> None:
    data = DocumentWindows(str(prepared), length=LENGTH, cache=cache(tmp_path))
    plain = TokenWindows(str(prepared), length=LENGTH)
    assert len(data) == len(plain)
    owners = []
    for file in sorted(prepared.glob("documents_*.npy")):
        lengths = numpy.diff(numpy.load(file))
        own = numpy.repeat(numpy.arange(len(lengths)), lengths).tolist()
        owners += [own[first : first + LENGTH + 1] for first in range(0, len(own) - LENGTH, LENGTH)]
    for index, owner in enumerate(owners):
        sample = data[index]
        assert sample["tokens"].tolist() == plain[index].tolist()
        assert [number + owner[0] for number in sample["documents"].tolist()] == owner


def test_packed_samples_hold_every_document(prepared: Path, tmp_path: Path) -> None:
    data = PackedDocuments(str(prepared), length=LENGTH, cache=cache(tmp_path))
    pairs: Counter[tuple[int, ...]] = Counter()  # (token, next token) that are predicted
    kept: list[list[int]] = []
    for index in range(len(data)):
        sample = data[index]
        tokens, owners = sample["tokens"].tolist(), sample["documents"].tolist()
        assert len(tokens) == len(owners) == LENGTH + 1
        for place in range(LENGTH):
            if owners[place] == owners[place + 1] >= 0:
                pairs[tokens[place], tokens[place + 1]] += 1
        kept += [
            [token for token, owner in zip(tokens, owners, strict=True) if owner == number]
            for number in range(max(owners) + 1)
        ]
    expected = documents(prepared)
    assert pairs == Counter(pair for each in expected for pair in itertools.pairwise(each))
    short = [each for each in expected if 0 < len(each) <= LENGTH + 1]
    assert Counter(map(tuple, short)) - Counter(map(tuple, kept)) == Counter()  # not one of these is cut


def test_boundaries_of_another_file_are_refused(prepared: Path, tmp_path: Path) -> None:
    (prepared / "documents_00000.npy").write_bytes((prepared / "documents_00002.npy").read_bytes())
    with pytest.raises(ConfigError, match="documents_00000.npy does not match .*tokens_00000.npy"):
        len(PackedDocuments(str(prepared), length=LENGTH, cache=cache(tmp_path)))


def test_each_of_several_folders_has_its_own_documents(tmp_path: Path) -> None:
    """Both folders have as many tokens, and files of the same names."""
    for name, bounds in (("a", [0, 10, 40]), ("b", [0, 30, 40])):
        (tmp_path / name).mkdir()
        numpy.save(tmp_path / name / "tokens_00000.npy", numpy.arange(40, dtype=numpy.uint8))
        numpy.save(tmp_path / name / "documents_00000.npy", numpy.array(bounds, dtype=numpy.int64))
    for path in ([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "*" / "tokens_*.npy")):
        windows = DocumentWindows(path, length=39, cache=cache(tmp_path))
        assert [sample["documents"].tolist().count(0) for sample in windows] == [10, 30]
        packed = PackedDocuments(path, length=39, cache=cache(tmp_path))
        assert [sample["documents"].tolist().count(0) for sample in packed] == [10, 30]


def test_tokens_without_boundaries_are_refused(prepared: Path, tmp_path: Path) -> None:
    (prepared / "documents_00001.npy").unlink()
    with pytest.raises(ConfigError, match="document boundaries documents_00001.npy not found"):
        len(DocumentWindows(str(prepared), length=LENGTH, cache=cache(tmp_path)))


def test_new_boundaries_make_a_new_index(tmp_path: Path) -> None:
    numpy.save(tmp_path / "tokens_00000.npy", numpy.arange(40, dtype=numpy.uint8))
    for bounds in ([0, 20, 40], [0, 10, 40]):
        numpy.save(tmp_path / "documents_00000.npy", numpy.array(bounds, dtype=numpy.int64))
        data = PackedDocuments(str(tmp_path), length=39, cache=cache(tmp_path))
        assert data[0]["documents"].tolist().count(0) == bounds[1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), "has .* bytes, expected .* bytes"),
        (lambda file: file.write_bytes(b"not an array"), "is not an .npy file"),
        (lambda file: numpy.save(file, numpy.zeros(100)), "has dtype float64; tokens must be integers"),
        (lambda file: numpy.save(file, numpy.zeros((10, 10), dtype=numpy.uint8)), "has 2 dimensions"),
        (lambda file: numpy.save(file, numpy.array([{}] * 9), allow_pickle=True), "object"),
    ],
)
def test_a_file_that_is_damaged_is_named(prepared: Path, spoil: Any, message: str) -> None:
    spoil(prepared / "tokens_00001.npy")
    with pytest.raises(WorldsizeError, match=rf"tokens_00001.npy.*{message}"):
        len(TokenWindows(str(prepared), length=LENGTH))


def test_a_file_that_ends_within_a_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_bytes(bytes(101))
    with pytest.raises(SampleError, match=r"text.bin, byte 100: the last token is incomplete"):
        len(TokenWindows(str(tmp_path / "text.bin"), length=LENGTH))


def test_a_path_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file, or no \.npy or \.bin files"):
        len(TokenWindows(str(tmp_path / "nothing"), length=LENGTH))


TEXTS = ["a document", "another, longer document", "the third one"]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A folder that ``worldsize prepare`` has written, in two shards."""
    folder = tmp_path / "finished"
    for number, text in enumerate(TEXTS):
        (tmp_path / f"text_{number}.txt").write_text(text)
    inputs = [tmp_path / f"text_{number}.txt" for number in range(3)]
    Preparation(inputs, Tokenizer("bytes"), shard_bytes=20).write_shards(folder, processes=1)
    return folder


@pytest.mark.parametrize("kind", [TokenWindows, DocumentWindows, PackedDocuments])
def test_a_prepared_folder_says_what_its_tokens_are(finished: Path, tmp_path: Path, kind: Any) -> None:
    data = kind(str(finished), length=5, cache=cache(tmp_path))
    manifest = json.loads((finished / "manifest.json").read_text())
    assert data.vocabulary == 256
    assert data.fingerprint()["sha256"] == manifest["sha256"]
    assert data.fingerprint()["tokenizers"] == [{"name": "bytes", "sha256": manifest["tokenizer"]["sha256"]}]
    both = kind([str(finished), str(finished)], length=5, cache=cache(tmp_path))
    assert len(both) == 2 * len(data)
    assert both.fingerprint()["sha256"] != manifest["sha256"]


def test_packed_documents_are_the_texts_that_were_prepared(finished: Path, tmp_path: Path) -> None:
    data = PackedDocuments(str(finished), length=60, cache=cache(tmp_path))
    texts = []
    for sample in data:
        owners = sample["documents"]
        texts += [bytes(sample["tokens"][owners == owner].tolist()).decode() for owner in range(int(owners.max()) + 1)]
    assert sorted(texts) == sorted(TEXTS)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "tokens_00001.npy").unlink(), r"tokens_00001.npy: .* found no file"),
        (lambda folder: numpy.save(folder / "tokens_00000.npy", numpy.zeros(99, numpy.uint8)), "tokens_00000.npy"),
        (lambda folder: numpy.save(folder / "tokens_00009.npy", numpy.zeros(9, numpy.uint8)), "expected no file"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not a manifest of worldsize prepare"),
        (lambda folder: (folder / "manifest.json").write_text('{"shards": []}'), "not a manifest"),
        (lambda folder: shutil.copytree(folder, folder / ".pieces"), "the preparation of .* is incomplete"),
    ],
)
def test_a_folder_that_is_not_what_was_prepared_is_refused(finished: Path, spoil: Any, message: str) -> None:
    spoil(finished)
    with pytest.raises(ConfigError, match=message):
        TokenWindows(str(finished), length=5).fingerprint()
