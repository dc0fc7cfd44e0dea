"""Token shards match a plain loop over the tokenizer, whatever processes made them or were killed."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from worldsize.cli import prepare as command
from worldsize.data.preparation import Preparation
from worldsize.data.texts import TextFormat, Tokenizer, choose_token_dtype
from worldsize.errors import ConfigError, WorldsizeError

SMALL = 4000  # bytes of text in a shard


def texts(count: int, seed: int) -> list[str]:
    """Return texts: some are empty, some span lines, and some are longer than a shard."""
    chooser = random.Random(seed)
    words = ["Wörter", "of", "several\nlines", "数", "\u2028", "longer", "x"]
    lengths = [chooser.choice([0, 1, 5, 40, 200]) for _ in range(count - 1)]
    return [" ".join(chooser.choices(words, k=length)) for length in [*lengths, 2000]]


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Sequence[str]]:
    """The documents of each file, by its name in the manifest."""
    return {"a.jsonl": texts(60, 1), "b/c.jsonl": texts(50, 2), "b/note.txt": [" ".join(texts(5, 3))]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, rows: Mapping[str, Sequence[str]]) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    (root / "b").mkdir()
    for name, documents in rows.items():
        lines = [json.dumps({"text": each, "url": "u"}, ensure_ascii=len(each) % 2 == 0) + "\n" for each in documents]
        (root / name).write_text("".join(lines) if name.endswith(".jsonl") else documents[0])
    return root


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, rows: Mapping[str, Sequence[str]]) -> Path:
    """A tokenizer.json of 300 tokens, with padding and truncation that must not apply to texts of a corpus."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    library.train_from_iterator((each for documents in rows.values() for each in documents), trainer)
    library.enable_truncation(8)
    library.enable_padding(length=16)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return path


def read(folder: Path) -> list[list[int]]:
    """Return the documents of a folder of shards, read by the format's definition."""
    documents = []
    for tokens in sorted(folder.glob("tokens_*.npy")):
        starts = numpy.load(folder / tokens.name.replace("tokens", "documents"), mmap_mode="r")
        numbers = numpy.load(tokens, mmap_mode="r")
        assert starts.dtype == numpy.int64
        assert (starts[0], starts[-1]) == (0, len(numbers))
        documents += [numbers[begin:end].tolist() for begin, end in pairwise(starts)]
    return documents


def test_shards_have_the_tokens_of_a_plain_loop_and_a_manifest_that_describes_them(
    corpus: Path, rows: Mapping[str, Sequence[str]], tokenizer: Path, tmp_path: Path
) -> None:
    made = Preparation([corpus], Tokenizer(str(tokenizer), end="<end>"), shard_bytes=SMALL).write_shards(
        tmp_path, processes=1
    )
    library = Library.from_file(str(tokenizer))
    library.no_truncation()
    library.no_padding()
    documents = [each for name in sorted(rows) for each in rows[name]]
    plain = [[*library.encode(each, add_special_tokens=False).ids, library.token_to_id("<end>")] for each in documents]
    assert read(tmp_path) == plain
    assert made == json.loads((tmp_path / "manifest.json").read_text())
    assert (made["documents"], made["tokens"]) == (len(plain), sum(map(len, plain)))
    assert (made["dtype"], made["tokenizer"]["name"]) == ("uint16", str(tokenizer))
    assert [each["name"] for each in made["inputs"]] == sorted(rows)
    assert len(made["shards"]) > 5
    for shard in made["shards"]:
        data = (tmp_path / shard["file"]).read_bytes()
        assert (shard["sha256"], shard["bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == sorted(
        ["manifest.json", *(shard[key] for shard in made["shards"] for key in ("file", "documents_file"))]
    )


def test_bytes_are_tokens_and_documents_without_text_are_left_out(
    corpus: Path, rows: Mapping[str, Sequence[str]], tmp_path: Path
) -> None:
    made = Preparation([corpus], Tokenizer("bytes"), shard_bytes=SMALL).write_shards(tmp_path, processes=1)
    documents = [each for name in sorted(rows) for each in rows[name]]
    assert read(tmp_path) == [list(each.encode()) for each in documents if each]
    assert made["empty"] == documents.count("")
    assert made["dtype"] == "uint8"


def test_a_folder_made_by_three_processes_is_that_of_one(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    preparation = Preparation([corpus], Tokenizer(str(tokenizer)), shard_bytes=SMALL)
    first, second = (preparation.write_shards(tmp_path / str(count), processes=count) for count in (1, 3))
    assert first == second
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def killed(preparation: Preparation, folder: Path, *, after: int) -> bool:
    """Prepare in processes that are killed before they replace one file more; return whether they were.

    Args:
        after: Files that they have replaced by then, together.
    """
    count, replace = mmap.mmap(-1, 1), Path.replace  # memory shared with forked processes

    def counted(path: Path, target: Any) -> Path:
        if count[0] == after:
            os.killpg(0, signal.SIGKILL)
        count[0] += 1
        return replace(path, target)

    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        Path.replace = counted  # type: ignore[assignment,method-assign]
        try:
            preparation.write_shards(folder, processes=1)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_preparation_that_is_killed_at_any_point_goes_on_and_ends_with_the_same_bytes(
    corpus: Path, tmp_path: Path
) -> None:
    preparation = Preparation([corpus], Tokenizer("bytes"), shard_bytes=16_000)
    expected = preparation.write_shards(tmp_path / "whole", processes=1)
    kills = 0
    for after in range(250):
        folder = tmp_path / str(after)
        if not killed(preparation, folder, after=after):
            break
        kills += 1
        preparation.write_shards(folder, processes=2)
        assert contents(folder) == contents(tmp_path / "whole")
    # the request and the manifest; per shard, three files of its piece, two of them moved into place
    assert kills == 2 + 5 * len(expected["shards"])


def test_finished_pieces_are_not_made_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation = Preparation([corpus], Tokenizer("bytes"), shard_bytes=SMALL)
    assert killed(preparation, tmp_path, after=8)
    finished = [path.stat().st_size for path in (tmp_path / ".pieces").glob("piece_*.json")]
    assert len(finished) == 2
    shown: list[tuple[int, int]] = []
    preparation.write_shards(tmp_path, processes=1, progress=lambda done, total: shown.append((done, total)))
    assert 0 < shown[0][0] < shown[0][1]
    assert shown[-1][0] == shown[-1][1]


def test_a_folder_with_other_shards_or_files_is_left_as_it_is(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    plain = Preparation([corpus], Tokenizer("bytes"))
    made = plain.write_shards(tmp_path / "a", processes=1)
    assert plain.write_shards(tmp_path / "a", processes=1) == made
    before = contents(tmp_path / "a")
    with pytest.raises(ConfigError, match="contains token shards that differ in tokenizer; nothing was changed"):
        Preparation([corpus], Tokenizer(str(tokenizer))).write_shards(tmp_path / "a", processes=1)
    with pytest.raises(ConfigError, match="differ in inputs"):
        Preparation([corpus / "b"], Tokenizer("bytes")).write_shards(tmp_path / "a", processes=1)
    assert contents(tmp_path / "a") == before
    with pytest.raises(ConfigError, match="is not empty"):
        plain.write_shards(corpus, processes=1)


BAD = {
    "row.jsonl": (b'{"text": "ok"}\n{"text": oh}\n', "byte 15: the line is not valid JSON"),
    "field.jsonl": (b'{"text": "ok"}\n{"texts": "oh"}\n', "byte 15: field 'text' not found; did you mean 'texts'?"),
    "null.jsonl": (b'{"text": "ok"}\n{"text": null}\n', "byte 15: field 'text' is null"),
    "list.jsonl": (b'{"text": "ok"}\n[1]\n', "byte 15: the line is not a JSON object"),
    "number.jsonl": (b'{"text": "ok"}\n{"text": 5}\n', "byte 15: field 'text' must be a string, got int"),
    "half.jsonl": (b'{"text": "ok"}\n{"text": "\\ud800"}\n', "byte 15: field 'text' is not valid UTF-8"),
    "latin.jsonl": (b'{"text": "ok"}\n{"text": "\xe4h"}\n', "byte 25: not valid UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named_with_file_and_byte_or_left_out_and_counted(name: str, tmp_path: Path) -> None:
    data, why = BAD[name]
    path = tmp_path / name
    path.write_bytes(data)
    stops = Preparation([path], Tokenizer("bytes"))
    with pytest.raises(WorldsizeError, match="or skip unreadable documents with --on-error skip") as stopped:
        stops.write_shards(tmp_path / "out", processes=1)
    assert f"{path}, {why}" in str(stopped.value)
    made = Preparation([path], Tokenizer("bytes"), on_error="skip").write_shards(tmp_path / "out", processes=1)
    assert (made["documents"], made["skipped"]) == (1, 1)
    assert made["bad"][0].startswith(f"{path}, {why}")


def test_a_column_of_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [*texts(30, 4), None, "last"]
    parquet.write_table(arrow.table({"body": rows}), tmp_path / "rows.parquet", row_group_size=7)
    preparation = Preparation([tmp_path / "rows.parquet"], Tokenizer("bytes"), TextFormat("body"), 1000, "skip")
    made = preparation.write_shards(tmp_path / "out", processes=2)
    assert read(tmp_path / "out") == [list(each.encode()) for each in rows if each]
    assert (made["skipped"], made["bad"]) == (1, [f"{tmp_path}/rows.parquet, row 30: field 'body' is null"])
    with pytest.raises(WorldsizeError, match="column 'boy' not found; did you mean 'body'"):
        Preparation([tmp_path / "rows.parquet"], Tokenizer("bytes"), TextFormat("boy")).write_shards(
            tmp_path / "x", processes=1
        )


def test_each_line_of_a_text_file_can_be_a_document(tmp_path: Path) -> None:
    lines = [f"line {number} äöü" for number in range(300)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    preparation = Preparation([tmp_path / "lines.txt"], Tokenizer("bytes"), TextFormat(documents="line"), 100)
    preparation.write_shards(tmp_path / "out", processes=2)
    assert read(tmp_path / "out") == [list(line.encode()) for line in lines]


@pytest.mark.parametrize(("vocabulary", "name"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (1 << 16, "uint16")])
def test_the_smallest_type_holds_the_vocabulary(vocabulary: int, name: str) -> None:
    assert choose_token_dtype(vocabulary).name == name
    assert choose_token_dtype((1 << 16) + 1).name == "uint32"


def test_the_command_says_what_it_made_and_refuses_with_a_remedy(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["worldsize prepare", str(corpus), "-o", str(tmp_path / "out"), "--processes", "1"]
    monkeypatch.setattr(sys, "argv", words)
    command.main()
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}/out/manifest.json: ")
    assert "tokens (uint8) from" in out
    for more, said in (
        (["--tokenizer", str(tmp_path / "no.json")], "failed to load"),
        (["--end", "x"], "--end is not supported with"),
    ):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as stopped:
            command.main()
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["worldsize prepare", str(corpus / "a.json"), "-o", str(tmp_path / "other")])
    with pytest.raises(SystemExit):
        command.main()
    assert capsys.readouterr().err.startswith(f"{corpus / 'a.json'} does not exist; did you mean 'a.jsonl'?")
    assert not (tmp_path / "other").exists()
