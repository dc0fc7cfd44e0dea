"""Real runs, for tests of recipes, launchers and loggers: ``worldsize train`` in a process of its own."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """A run that completed."""

    folder: Path

    @property
    def result(self) -> Mapping[str, Any]:
        """The contents of ``result.json``."""
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last evaluation."""
        metrics: dict[str, float] = self.result["metrics"]
        return metrics


def train(*overrides: str, root: Path) -> Run:
    """Train in the working directory, with the run's folder below ``root``; without a logger unless one is named.

    Raises:
        RuntimeError: the run did not complete; the message has its output.
    """
    name = f"test_{secrets.token_hex(4)}"
    quiet = [] if any(word.startswith("logger=") for word in overrides) else ["logger=none"]
    own = [*quiet, f"run.root={root}", f"run.name={name}"]
    done = subprocess.run(
        [sys.executable, "-m", "worldsize", "train", *overrides, *own], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"train {' '.join(overrides)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    (folder,) = root.glob(f"*/{name}")
    return Run(folder)
