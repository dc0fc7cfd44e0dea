"""Losses of the byte-level GPT in several precisions, side by side.

    uv run --extra fp8 python benchmarks/precision.py [STEPS] [SEEDS]

On CPUs the products of fp8 are emulated: numbers are rounded to 8 bits, and multiplied as others. So these are the
losses of fp8, and not its speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
PRECISIONS = ("fp32", "bf16", "fp8")
MODEL = ("recipe=stdlib_lm", "recipe.width=64", "recipe.depth=2", "recipe.heads=2", "recipe.context=64")
RUN = ("strategy=single", "cluster.processes=1", "cluster.threads=1", "batch_size=16", "logger=none", "log_every=10")


def main() -> None:
    words = sys.argv[1:]
    steps, seeds = int(words[0]) if words else 200, int(words[1]) if len(words) > 1 else 2
    curves: dict[str, list[list[float]]] = {
        precision: [losses(precision, steps, seed) for seed in range(seeds)] for precision in PRECISIONS
    }
    marks = [steps // 4, steps // 2, steps]
    print(f"| precision | {' | '.join(f'step {mark}' for mark in marks)} | seeds' spread at the end |")
    print(f"|---|{'---|' * (len(marks) + 1)}")
    for precision, runs in curves.items():
        cells = [f"{mean(run[mark // 10 - 1] for run in runs):.4f}" for mark in marks]
        last = [run[-1] for run in runs]
        print(f"| `{precision}` | {' | '.join(cells)} | {max(last) - min(last):.4f} |")


def losses(precision: str, steps: int, seed: int) -> list[float]:
    """Return the logged losses of a run, one for ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*MODEL, *RUN, f"precision={precision}", f"steps={steps}", f"seed={seed}", f"run.root={folder}"]
        command = [sys.executable, "train.py", *words, "checkpoint.at_end=false"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        rows = map(json.loads, metrics.read_text().splitlines())
        return [row["loss"] for row in rows if row["event"] == "step" and row["step"] % 10 == 0]


if __name__ == "__main__":
    main()
