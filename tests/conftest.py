"""Fixtures shared by all tests: real runs of train.py in a folder of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """``train("steps=3", ...)``: runs train.py in ``tmp_path`` without wandb, and waits for its end."""

    def run(*arguments: str, logger: str = "none", timeout: float = 120.0, **changes: str) -> Run:
        before = set(folders(tmp_path / "runs"))
        command = [sys.executable, str(REPOSITORY / "train.py"), f"logger={logger}", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(**changes), capture_output=True, text=True, timeout=timeout
        )
        new = [folder for folder in folders(tmp_path / "runs") if folder not in before]
        return Run(done.returncode, done.stdout, done.stderr, new[0] if new else None)

    return run


@pytest.fixture
def environment_without_wandb() -> dict[str, str]:
    return environment()
