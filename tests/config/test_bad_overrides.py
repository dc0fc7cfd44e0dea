"""Hundreds of drawn bad command lines: each is refused before the start, in a sentence, or trains."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.config.bad_overrides import USUAL, drawn
from tests.config.test_malformed import called
from tests.support.runs import Command, environment
from worldsize.launch import execute

_SEED = 44
_RAW = re.compile(  # words of libraries that a user of worldsize should not see
    r"Traceback|full_key|object_type|expecting \{|\w+Exception\b|ValidationError|ListConfig|DictConfig|"
    r"Interpolation key|while resolving|Could not (override|append|delete)|Error merging|defaults list|looks like a"
)


class _StartsError(Exception):
    """All checks have passed, and the record of the run was about to be written."""


def _starts(*_: object, **__: object) -> None:
    raise _StartsError


def _is_accepted(words: Sequence[str], folder: Path) -> bool:
    """Check the words in this process as ``train`` does before a start; assert that a refusal is a sentence."""
    try:
        code, _, error = called(["train", *USUAL, *words], folder)
    except _StartsError:
        return True
    lines = [line for line in error.splitlines() if not line.startswith("warning: ")]
    assert code == 2, (words, code, error)
    assert len(lines) == 1, (words, error)
    assert not _RAW.search(lines[0]), (words, error)
    assert lines[0].rstrip().endswith((".", "'", '"', "?")), (words, error)
    assert not (left := sorted(folder.rglob("*"))), (words, left)
    return False


def _check_in_process(
    count: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[str]], list[list[str]]]:
    """Check ``count`` drawn command lines; return those that would start, and those that are refused."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(execute, "write_record", _starts)
    accepted, refused = list[list[str]](), list[list[str]]()
    for words in drawn(count, seed=_SEED):
        (accepted if _is_accepted(words, folder) else refused).append(words)
        for path in folder.iterdir():  # the root of runs, of one that would start
            shutil.rmtree(path)
    return accepted, refused


def _check_started(words: Sequence[str], folder: Path, command: Command) -> None:
    """Run the words as a command; it must train, or be refused without leaving files."""
    folder.mkdir()
    done = command("train", *USUAL, *words, cwd=folder, environment=environment(HOME=str(folder)))
    assert "Traceback" not in done.stdout + done.stderr, (words, done)
    assert done.returncode in (0, 2), (words, done)
    results = [root for root, _, files in os.walk(folder) if "result.json" in files]
    assert len(results) == (done.returncode == 0), (words, done)
    written = [path for path in folder.rglob("*") if ".config" not in path.parts]  # of HOME: the user's signing key
    assert done.returncode == 0 or not written, (words, done)
    left = [process.pid for process in psutil.process_iter(["cwd"]) if str(process.info["cwd"]).startswith(str(folder))]
    assert not left, (words, left)


def test_the_same_seed_draws_the_same_command_lines() -> None:
    assert drawn(50, seed=1) == drawn(50, seed=1) != drawn(50, seed=2)


@pytest.mark.heavy
def test_drawn_bad_overrides_are_refused_in_a_sentence_or_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (checks := tmp_path / "checks").mkdir()
    accepted, refused = _check_in_process(40, checks, monkeypatch)
    assert len(refused) > len(accepted) >= 2
    for number, words in enumerate([*accepted[:3], refused[0]]):
        _check_started(words, tmp_path / str(number), command)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_six_hundred_drawn_bad_overrides_are_refused_in_a_sentence_or_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (checks := tmp_path / "checks").mkdir()
    accepted, refused = _check_in_process(600, checks, monkeypatch)
    for number, words in enumerate([*accepted, *refused[:10]]):
        _check_started(words, tmp_path / str(number), command)
