"""Invalid data of a source is refused with a message, in the plan if possible: by its fingerprint or length."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.data.formats import FORMATS
from worldsize.data.mixture import mixture
from worldsize.data.order import Order, epoch_length
from worldsize.data.preparation import Preparation
from worldsize.data.sources.arrow import HfDataset
from worldsize.data.sources.documents import DocumentWindows, PackedDocuments
from worldsize.data.sources.tokens import TokenWindows
from worldsize.data.storage.cache import Cache
from worldsize.data.texts import Tokenizer
from worldsize.errors import ConfigError, WorldsizeError

TOKENS: dict[str, Callable[..., Any]] = {
    "tokens": TokenWindows,
    "documents": DocumentWindows,
    "packed": PackedDocuments,
}

ASKED: tuple[Callable[[Any], Any], ...] = (len, lambda data: data.fingerprint(), lambda data: data[0])


def source(kind: str, path: Any, tmp_path: Path) -> Any:
    cache = Cache(str(tmp_path / "cache"))
    return TOKENS[kind](path, length=4, cache=cache) if kind in TOKENS else FORMATS[kind].source(path, cache=cache)


@pytest.mark.parametrize("kind", [*TOKENS, *(name for name in FORMATS if name not in ("images", "hf_datasets"))])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x{5..3}.npy", r"the range \{5..3\} is descending. Use \{3..5\}"),
        ("", "data.path is empty. Set it to a file"),
        ([], "data.path is an empty list. Set it to a file"),
        ("/a**b/c", "failed to open .*Check the data path|no such file"),
        ("~nobody-of-this-name/x", "failed to open .*Check the data path"),
        ("nothing://x/y", "failed to open nothing://x/y: Protocol not known: nothing. Check the data path"),
        ("http://", "failed to open .*Check the data path"),
        ("hf://x", "failed to open .*Check the data path"),
    ],
)
def test_a_path_of_no_file_is_refused(kind: str, path: Any, message: str, tmp_path: Path) -> None:
    for ask in ASKED:
        with pytest.raises(ConfigError, match=message):
            ask(source(kind, path, tmp_path))


@pytest.mark.parametrize("kind", ["images", "hf_datasets"])
@pytest.mark.parametrize("path", ["", [], "~nobody-of-this-name/x", "nothing://x/y", "http://", "hf://x"])
def test_a_path_of_no_folder_is_refused(kind: str, path: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.path|failed to open|no such file"):
        source(kind, path, tmp_path).fingerprint()


def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="not a regular file"):
        len(source("json_lines", str(tmp_path), tmp_path))


@pytest.mark.parametrize("kind", TOKENS)
def test_boundaries_without_tokens_are_refused(kind: str, tmp_path: Path) -> None:
    numpy.save(tmp_path / "documents_00000.npy", numpy.array([0, 5]))
    for ask in ASKED:
        with pytest.raises(ConfigError, match=r"documents_00000.npy contains document boundaries, but the token files"):
            ask(source(kind, str(tmp_path), tmp_path))


@pytest.mark.parametrize("kind", ["documents", "packed"])
@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint8"])
def test_boundaries_of_any_whole_numbers_ascend_or_are_refused(kind: str, dtype: str, tmp_path: Path) -> None:
    numpy.save(tmp_path / "tokens_00000.npy", numpy.arange(20, dtype=numpy.uint8))
    numpy.save(tmp_path / "documents_00000.npy", numpy.array([0, 5, 15, 20], dtype=dtype))
    good = source(kind, str(tmp_path), tmp_path)
    assert {int(owner) for sample in good for owner in sample["documents"]} >= {0}
    for bounds, message in (
        ([0, 15, 5, 20], "documents_00000.npy: document 1 begins at token 15 and ends at 5. Prepare the folder again"),
        (
            [5, 15, 20],
            "documents_00000.npy does not contain valid document boundaries: the first document begins at token 5",
        ),
        ([], "documents_00000.npy does not contain valid document boundaries: the file is empty"),
    ):
        numpy.save(tmp_path / "documents_00000.npy", numpy.array(bounds, dtype=dtype))
        for ask in ASKED[1:]:
            with pytest.raises(ConfigError, match=message):
                ask(source(kind, str(tmp_path), tmp_path))


@pytest.mark.parametrize("kind", ["tokens", "documents"])
def test_too_few_tokens_for_a_sample_are_refused(kind: str, tmp_path: Path) -> None:
    numpy.save(tmp_path / "tokens_00000.npy", numpy.arange(4, dtype=numpy.uint8))
    numpy.save(tmp_path / "documents_00000.npy", numpy.array([0, 4]))
    with pytest.raises(ConfigError, match=r"a sample requires 5 .*tokens_00000.npy, has 4.*decrease data.length"):
        len(source(kind, str(tmp_path), tmp_path))


def test_data_of_no_sample_have_no_order() -> None:
    with pytest.raises(ConfigError, match="the data set is empty. Check the data path"):
        epoch_length([])
    with pytest.raises(ConfigError, match="the data set is empty. Check the data path"):
        Order(0, 2, 1, (0,)).indices_in([], 1, 0)


@pytest.mark.parametrize("misspelt", [{"weight": 1}, {"weight": 1, "source": {"length": 3}}])
def test_a_misspelt_source_that_is_added_to_a_mixture_names_its_neighbour(misspelt: Any, tmp_path: Path) -> None:
    books = {"weight": 1, "source": source("tokens", str(tmp_path), tmp_path)}
    with pytest.raises(
        ConfigError, match=r"data.sources.boks.source is not set; did you mean 'books'\? Available: books\."
    ):
        mixture({"books": books, "boks": misspelt})


@pytest.mark.parametrize("header", [b"{'shape': (((", b"{" * 40, b"\x00" * 9, b"{'shape': (-3,)}"])
def test_a_damaged_header_of_numbers_is_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header.ljust(117) + b"\n")
    with pytest.raises(ConfigError, match=r"a.npy is not an .npy file"):
        len(source("tokens", str(tmp_path), tmp_path))


@pytest.mark.parametrize("shard", [{"file": 5, "bytes": 1}, {"file": "a", "bytes": "x"}, [], None])
def test_a_manifest_with_odd_shards_is_refused(shard: Any, tmp_path: Path) -> None:
    numpy.save(tmp_path / "tokens_00000.npy", numpy.arange(9, dtype=numpy.uint8))
    tokenizer = {"name": "bytes", "sha256": "", "vocabulary": 256}
    (tmp_path / "manifest.json").write_text(json.dumps({"tokenizer": tokenizer, "sha256": "", "shards": [shard]}))
    with pytest.raises(ConfigError, match="is damaged or not a manifest of worldsize prepare"):
        source("tokens", str(tmp_path), tmp_path).fingerprint()


def test_two_prepared_folders_in_one_pattern_are_known_as_such(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    for name in "12":
        Preparation([tmp_path / "text.txt"], Tokenizer("bytes")).write_shards(tmp_path / name, processes=1)
    both = source("tokens", str(tmp_path / "{1..2}"), tmp_path)
    assert len(both.fingerprint()["tokenizers"]) == 2


ODD_SETS: dict[str, dict[str, str]] = {
    "splits of no set": {"dataset_dict.json": "{}"},
    "splits in a list": {"dataset_dict.json": "[]"},
    "splits in a number": {"dataset_dict.json": '{"splits": 5}'},
    "splits cut off": {"dataset_dict.json": "{"},
    "state in a list": {"state.json": "[]"},
    "state without files": {"state.json": '{"_data_files": []}'},
    "state of null": {"state.json": '{"_data_files": null}'},
    "state of numbers": {"state.json": '{"_data_files": [5]}'},
    "state too deep": {"state.json": "[" * 100_000},
}


@pytest.mark.parametrize("name", ODD_SETS)
def test_a_damaged_description_of_a_data_set_is_named(name: str, tmp_path: Path) -> None:
    for file, text in ODD_SETS[name].items():
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=r"(dataset_dict|state)\.json.*(Save the data set again|Copy the file again)"):
        HfDataset(str(tmp_path), cache=Cache(str(tmp_path / "cache"))).fingerprint()


def test_a_description_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "state.json").open("wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(ConfigError, match=r"state.json has 4,294,967,296 bytes; the limit is 67,108,864"):
        HfDataset(str(tmp_path), cache=Cache(str(tmp_path / "cache"))).fingerprint()


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\nbad\n{"text": "two"}\n')
    preparation(tmp_path, "skip").write_shards(tmp_path / "out", processes=1)
    return tmp_path / "out"


def preparation(folder: Path, on_error: Any) -> Preparation:
    return Preparation([folder / "text.jsonl"], Tokenizer("bytes"), on_error=on_error)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged; nothing was changed"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is damaged; nothing was changed"),
        (lambda folder: (folder / "tokens_00000.npy").unlink(), "tokens_00000.npy has 0 bytes, expected 134"),
        (lambda folder: shorten(folder / "documents_00000.npy"), "documents_00000.npy has 151 bytes, expected 152"),
    ],
)
def test_a_prepared_folder_that_is_damaged_is_no_success(
    spoil: Callable[[Path], None], message: str, prepared: Path, tmp_path: Path
) -> None:
    spoil(prepared)
    with pytest.raises(ConfigError, match=message):
        preparation(tmp_path, "skip").write_shards(prepared, processes=1)


def test_what_was_left_out_before_stops_a_preparation_that_leaves_out_nothing(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prepared with --on-error skip, which skipped 1 documents"):
        preparation(tmp_path, "stop").write_shards(prepared, processes=1)
    assert preparation(tmp_path, "skip").write_shards(prepared, processes=1)["skipped"] == 1


def test_pieces_that_leave_out_documents_are_made_anew_by_one_that_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "text.jsonl").write_text('{"text": "one"}\nbad\n')
    with monkeypatch.context() as patched:
        patched.setattr("worldsize.data.preparation._finalize_shards", stop)
        with pytest.raises(KeyboardInterrupt):
            preparation(tmp_path, "skip").write_shards(tmp_path / "out", processes=1)
    with pytest.raises(WorldsizeError, match="byte 16: the line is not valid JSON.*--on-error skip"):
        preparation(tmp_path, "stop").write_shards(tmp_path / "out", processes=1)
    next((tmp_path / "out" / ".pieces").glob("piece_*")).write_text("{")  # it is rebuilt
    assert preparation(tmp_path, "skip").write_shards(tmp_path / "out", processes=1)["documents"] == 1


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(ConfigError, match="failed to create .*text.jsonl: File exists. Choose a different folder"):
        preparation(tmp_path, "stop").write_shards(tmp_path / "text.jsonl", processes=1)
