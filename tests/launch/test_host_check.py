"""All hosts of a run must have the same code and data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldsize.data.sources.json_lines import JsonLines
from worldsize.errors import WorldsizeError
from worldsize.launch.host_check import _describe_data, check_hosts, data_digest


def test_a_data_digest_depends_on_names_and_sizes_and_names_missing_files(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a.txt", "b.txt", "c.txt")}
    files["a.txt"].write_text("one")
    assert data_digest(files) == "without b.txt and 1 more"
    files["b.txt"].write_text("three")
    files["c.txt"].write_text("")
    assert data_digest(files) == hashlib.sha256(b"a.txt 3\nb.txt 5\nc.txt 0").hexdigest()[:12]


def test_a_host_tells_which_path_of_its_data_is_missing(tmp_path: Path) -> None:
    recipe: Any = SimpleNamespace(parts=[JsonLines(str(tmp_path / "nowhere.jsonl"))], files=dict)
    told = _describe_data(recipe)
    assert told.startswith(f"with missing files ({tmp_path}/nowhere.jsonl: no such file")
    (tmp_path / "nowhere.jsonl").write_text("{}\n")
    assert _describe_data(recipe) == data_digest({})


def test_a_host_without_the_data_is_named() -> None:
    first = {"node": 0, "host": "a", "must_match": {"data": "0123"}}
    other = {"node": 1, "host": "b", "must_match": {"data": "without train.txt"}}
    with pytest.raises(WorldsizeError, match=r"b \(node 1\) has data without train\.txt, a has 0123"):
        check_hosts(first, [other], on_mismatch="refuse")
    check_hosts(first, [{**first, "node": 1}], on_mismatch="refuse")
    check_hosts(first, [other], on_mismatch="warn")
