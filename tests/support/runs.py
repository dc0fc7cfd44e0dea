"""Fixtures that run train.py and worldsize commands in temporary folders, and their results."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """Exit code, output and run folder of a finished train.py; ``folder`` is None without a run."""

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
Once = Callable[[str, Callable[[Path], None]], Path]


def environment(**changes: str) -> dict[str, str]:
    """Return this environment with wandb offline and ``changes``, so that nothing is uploaded."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return {**kept, "WANDB_MODE": "offline", "COLUMNS": "120", **changes}


def folders(root: Path) -> list[Path]:
    """Return the folders of all runs below ``root``; tolerates concurrent changes of their checkpoints."""
    return sorted(Path(folder) for folder, _, files in os.walk(root) if "run_manifest.json" in files)


@dataclass(frozen=True)
class Done:
    """Exit code and output of a finished command."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """``command("train", "steps=3", cwd=..., environment=...)`` runs worldsize in a process.

    ``python`` is the interpreter for the processes that the command starts.
    """

    def run(
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str],
        timeout: float = 240.0,
        python: str | Path = sys.executable,
    ) -> Done:
        folder = tmp_path_factory.mktemp("command")
        output, error = folder / "stdout", folder / "stderr"
        with Path(os.devnull).open() as nothing, output.open("wb") as first, error.open("wb") as second:
            line = warm.ask(
                os.environ[warm.ZYGOTE],
                ["worldsize", *arguments],
                cwd=str(cwd),
                environment=environment,
                streams=[nothing.fileno(), first.fileno(), second.fileno()],
                executable=str(python),
            )
        with line:
            line.settimeout(timeout)
            code = int(line.recv(64))
        return Done(code, output.read_text(), error.read_text())

    return run


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a Python that starts with worldsize imported, for processes started by launchers."""
    return warm.interpreter(tmp_path_factory.mktemp("warm"), os.environ[warm.ZYGOTE])


@pytest.fixture(scope="session")
def train_in(command: Command) -> Callable[[Path], Train]:
    """``train_in(folder)`` returns a ``train`` for that folder, for runs shared by tests."""

    def at(folder: Path) -> Train:
        def run(*arguments: str, logger: str = "none", python: str | Path = sys.executable, **changes: str) -> Run:
            before = set(folders(folder / "runs"))
            words = ("train", f"logger={logger}", *arguments)
            done = command(*words, cwd=folder, environment=environment(**changes), python=python)
            new = [run_folder for run_folder in folders(folder / "runs") if run_folder not in before]
            return Run(done.returncode, done.stdout, done.stderr, new[0] if new else None)

        return run

    return at


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once(name, fill)`` returns a folder filled by ``fill(folder)``, which tests must not change.

    The first of the test processes that needs it fills it; the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"

    def filled(name: str, fill: Callable[[Path], None]) -> Path:
        folder = root / hashlib.sha256(name.encode()).hexdigest()[:16]
        root.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            complete = folder.with_suffix(".complete")
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)  # remains of a failed attempt
                folder.mkdir()
                fill(folder)
                complete.touch()
        return folder

    return filled


@pytest.fixture(scope="session")
def reference_run(train_in: Callable[[Path], Train], once: Once) -> Callable[..., Run]:
    """``reference_run("steps=3", ...)`` returns a completed run, shared by all tests."""

    def run(*options: str, **changes: str) -> Run:
        def fill(folder: Path) -> None:
            trained = train_in(folder)(*options, **changes)
            assert trained.code == 0, trained.error

        (folder,) = folders(once("\n".join((*options, *changes.values())), fill))
        return Run(0, "", "", folder)

    return run


@pytest.fixture
def train(tmp_path: Path, train_in: Callable[[Path], Train]) -> Train:
    """``train("steps=3", ...)`` trains in ``tmp_path`` without wandb until the run ends."""
    return train_in(tmp_path)


@pytest.fixture
def environment_without_wandb() -> dict[str, str]:
    return environment()


@pytest.fixture
def change_workers(command: Command) -> Callable[..., str]:
    """``change_workers(run, "add", "2")`` returns the output of ``worldsize workers``."""

    def run(folder: Path, *words: str) -> str:
        done = command("workers", *words, "--run", str(folder), cwd=folder, environment=environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def begun() -> Callable[..., Path]:
    """``begun(root, after)`` waits until a run has logged a step after ``after``; returns its folder."""
    return _begun


def _begun(root: Path, after: int = 3) -> Path:
    deadline = time.monotonic() + 180
    while True:
        with suppress(FileNotFoundError):  # a folder may disappear while it is searched
            for file in root.rglob("metrics.jsonl"):
                lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
                if lines and json.loads(lines[-1])["step"] > after:
                    return file.parent
        assert time.monotonic() < deadline
        time.sleep(0.05)  # each check walks through the folders
