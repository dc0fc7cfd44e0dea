"""The gate fails if any of its parts fails, and leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
UV = """#!/bin/bash
echo "$*" >> ../said
case "$*" in
  *"$FAILS"*) exit 3 ;;
  *"$HANGS"*) echo $$ >> ../hung; exec sleep 100 ;;
  *capabilities.py) echo default avx2 ;;
esac
"""  # stands for uv


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A folder with the gate's script, and programs that do nothing in place of those that it calls."""
    (tmp_path / "project" / ".ci").mkdir(parents=True)
    shutil.copy(REPOSITORY / ".ci" / "run", tmp_path / "project" / ".ci" / "run")
    shutil.copy(REPOSITORY / "README.md", tmp_path / "project" / "README.md")
    (tmp_path / "bin").mkdir()
    for name, text in (("uv", UV), ("pip", "#!/bin/sh\n"), ("id", "#!/bin/sh\necho 1000\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(gate: Path, *, fails: str = "nothing", hangs: str = "nothing") -> int:
    variables = {"PATH": f"{gate}/bin:/usr/bin:/bin", "TMPDIR": str(gate), "FAILS": fails, "HANGS": hangs}
    command = ["bash", str(gate / "project" / ".ci" / "run")]
    return subprocess.run(command, env=variables, stdout=subprocess.DEVNULL, timeout=60, check=False).returncode


def test_the_gate_passes_if_all_of_its_parts_do(gate: Path) -> None:
    assert run(gate) == 0
    said = (gate / "said").read_text().splitlines()
    bits = [line for line in said if "-m bits" in line]
    assert [line.endswith("-k elastic") for line in bits] == [False, True]
    assert {"run pytest", "run --locked pytest -m heavy", "run --locked mypy"} <= {*said}


@pytest.mark.parametrize(
    "part",
    [
        *("sync", "mypy", "capabilities.py", "-m bits", "-k elastic", "skypilot", "ruff check", "ruff format"),
        *("mkdocs", "run pytest", "-m heavy"),
    ],
)
def test_the_gate_fails_if_a_part_fails(gate: Path, part: str) -> None:
    assert run(gate, fails=part) != 0


def test_what_runs_beside_ends_when_another_part_fails(gate: Path) -> None:
    assert run(gate, fails="-m heavy", hangs="mypy") != 0
    (hung,) = (Path("/proc", pid, "cmdline") for pid in (gate / "hung").read_text().split())
    deadline = time.monotonic() + 120
    while hung.exists() and hung.read_bytes():  # one that nobody has waited for has no command line
        assert time.monotonic() < deadline
        time.sleep(0.02)
