"""Kill processes at named points inside a step, and compare the results with an undisturbed run.

uv run python benchmarks/step_kills.py 300 ddp zero hsdp fsdp mesh    # kills per strategy, spread over all points

Each run starts with 12 processes and loses one after another, each at a different point; in every second run, they are
replaced. All runs of a strategy must end with the same digests of state and metrics.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tests.faults.step_kills import POINTS, SAME, STRATEGIES, disturbed, lost, undisturbed  # noqa: E402

WORLDSIZE = (sys.executable, "-c", "from worldsize.cli import main; main()")


def drawn(times: int, chance: random.Random) -> Iterator[list[str]]:
    """Yield the points of each run's kills: all points in random order, until ``times`` kills are used up."""
    while times > 0:
        points = chance.sample(POINTS, len(POINTS))[:times]
        times -= len(points)
        yield points


def train(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Train, and return the result and the number of processes that died."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment["WORLDSIZE_PLUGINS"] = str(HERE)
    with tempfile.TemporaryDirectory() as folder:
        words = [*WORLDSIZE, "train", *arguments]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} ended with exit code {done.returncode}:\n{done.stderr}")
        (manifest,) = Path(folder).rglob("run_manifest.json")
        return json.loads(manifest.with_name("result.json").read_text()), lost(json.loads(manifest.read_text()))


def sweep(strategy: str, times: int) -> bool:
    """Compare all runs of a strategy with an undisturbed one; return whether all results are equal."""
    expected, _ = train(undisturbed(strategy))
    deaths, others = 0, list[list[str]]()
    for number, points in enumerate(drawn(times, random.Random(0))):
        restarts = len(points) if number % 2 else 0
        result, died = train(disturbed(strategy, points, restarts=restarts))
        deaths += died
        if any(result[key] != expected[key] for key in SAME):
            others.append(points)
        print(f"\r{strategy}: {deaths} of {times} kills, {len(others)} runs differ", end="", file=sys.stderr)
    print(f"\r{strategy}: {deaths} kills, {len(others)} runs differ {others or ''}")
    return not others and deaths == times


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(STRATEGIES)
    sys.exit(not all([sweep(strategy, int(sys.argv[1])) for strategy in chosen]))
