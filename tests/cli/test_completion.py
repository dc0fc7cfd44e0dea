"""Bash, zsh and fish complete commands, options and keys of ``worldsize``."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

pytestmark = pytest.mark.heavy

TYPED = {  # words, and the words that complete them
    "worldsize rep": {"report", "reproduce"},
    "worldsize train strategy=fs": {"strategy=fsdp"},
    "worldsize plan seed=1 cluster.proc": {"cluster.processes=", "cluster.processes_per_node="},
    "worldsize report la": {"last"},
}
BASH = """
eval "$(worldsize completion bash)"
COMP_LINE=$1 COMP_POINT=${#1}
read -ra COMP_WORDS <<< "$1"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_worldsize
echo "${COMPREPLY[@]}"
"""
FISH = "worldsize completion fish | source; complete -C $argv[1] | string replace -r '\\t.*' ''"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("shell", [["bash", "-c", BASH, "-"], ["fish", "-N", "-c", FISH]], ids=["bash", "fish"])
@pytest.mark.usefixtures("path")
def test_what_is_typed_is_completed(shell: list[str], typed: str) -> None:
    done = subprocess.run([*shell, typed], capture_output=True, text=True)
    assert set(done.stdout.split()) == TYPED[typed], done.stderr


@pytest.mark.usefixtures("path")
def test_zsh_completes_as_one_types() -> None:
    with zsh() as terminal:
        shown = ""

        def has(text: str) -> bool:
            nonlocal shown
            with suppress(BlockingIOError):
                shown += os.read(terminal, 4096).decode()
            return text in shown

        for typed, expected in (
            ('eval "$(worldsize completion zsh)"; echo re""ady\n', "\nready"),
            ("worldsize trai\t", "worldsize train"),
            (" strategy=fs\t", "strategy=fsdp"),
        ):
            os.write(terminal, typed.encode())
            wait_until(partial(has, expected), lambda: shown)


@contextmanager
def zsh() -> Iterator[int]:
    """Start an interactive zsh; yield the file descriptor of its terminal."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    program = ["zsh", "--no-rcs", "--interactive"]
    process = subprocess.Popen(program, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    try:
        yield master
    finally:
        process.kill()
        process.wait()
        os.close(master)
