"""Fixtures shared by all tests: real runs of train.py in a folder of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """A finished run of train.py."""

    code: int
    output: str
    error: str
    folder: Path | None

    def json(self, name: str) -> Any:
        assert self.folder is not None, self.error
        return json.loads((self.folder / name).read_text())

    def steps(self) -> list[dict[str, Any]]:
        assert self.folder is not None, self.error
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == "step"]


Train = Callable[..., Run]


def environment(**changes: str) -> dict[str, str]:
    """The test's environment without a wandb key, so that nothing leaves the machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return {**kept, "WANDB_MODE": "offline", "COLUMNS": "120", **changes}


def folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.rglob("run_manifest.json"))


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """``command("train", "steps=3", cwd=..., environment=...)``: the worldsize command in a process of its own."""
    zygote = subprocess.Popen([sys.executable, str(Path(__file__).with_name("zygote.py"))], stdin=subprocess.PIPE)
    assert zygote.stdin is not None
    requests = zygote.stdin

    def run(*arguments: str, cwd: Path, environment: Mapping[str, str], timeout: float = 120.0) -> Done:
        folder = tmp_path_factory.mktemp("command")
        request = {"arguments": arguments, "cwd": str(cwd), "environment": dict(environment), "folder": str(folder)}
        requests.write(json.dumps(request).encode() + b"\n")
        requests.flush()
        deadline = time.monotonic() + timeout
        while not (folder / "code").exists():
            assert time.monotonic() < deadline, f"{arguments} did not end within {timeout} s"
            assert zygote.poll() is None, "the process that forks commands has died"
            time.sleep(0.005)
        output, error = ((folder / name).read_text() for name in ("stdout", "stderr"))
        return Done(int((folder / "code").read_text()), output, error)

    yield run
    requests.close()
    zygote.kill()
    zygote.wait()


@pytest.fixture
def train(tmp_path: Path, command: Command) -> Train:
    """``train("steps=3", ...)``: trains in ``tmp_path`` without wandb, and waits for the end."""

    def run(*arguments: str, logger: str = "none", timeout: float = 120.0, **changes: str) -> Run:
        before = set(folders(tmp_path / "runs"))
        words = ("train", f"logger={logger}", *arguments)
        done = command(*words, cwd=tmp_path, environment=environment(**changes), timeout=timeout)
        new = [folder for folder in folders(tmp_path / "runs") if folder not in before]
        return Run(done.returncode, done.stdout, done.stderr, new[0] if new else None)

    return run


@pytest.fixture
def environment_without_wandb() -> dict[str, str]:
    return environment()


@pytest.fixture
def begun() -> Callable[..., Path]:
    """Waits until a run below a folder has logged a step later than ``after``, and gives the run's folder."""
    return _begun


def _begun(root: Path, after: int = 3) -> Path:
    deadline = time.monotonic() + 60
    while True:
        for file in root.rglob("metrics.jsonl"):
            lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if lines and json.loads(lines[-1])["step"] > after:
                return file.parent
        assert time.monotonic() < deadline
        time.sleep(0.01)
