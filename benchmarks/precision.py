"""Compare losses of the byte-level GPT in several precisions.

    uv run --extra fp8 python benchmarks/precision.py [STEPS] [SEEDS]

On CPUs, fp8 products are emulated: numbers are rounded to 8 bits, then multiplied in a higher precision. The losses are
representative of fp8, but the speed is not.
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
RUN = ("strategy=single", "cluster.processes=1", "cluster.threads=1", "batch_size=16", "logger=none", "log_every=1")


def main() -> None:
    words = sys.argv[1:]
    steps, seeds = int(words[0]) if words else 300, int(words[1]) if len(words) > 1 else 2
    quarters = [steps * quarter // 4 for quarter in range(1, 5)]
    print(f"| precision | {' | '.join(f'to step {last}' for last in quarters)} | test, bits a byte | by seed |")
    print(f"|---|{'---|' * 6}")
    for precision in PRECISIONS:
        curves, finals = zip(*(trained(precision, steps, seed) for seed in range(seeds)), strict=True)
        means = [mean(mean(curve[last - steps // 4 : last]) for curve in curves) for last in quarters]
        cells = [*(f"{each:.4f}" for each in means), f"{mean(finals):.4f}", ", ".join(f"{each:.4f}" for each in finals)]
        print(f"| `{precision}` | {' | '.join(cells)} |")


def trained(precision: str, steps: int, seed: int) -> tuple[list[float], float]:
    """Train, and return the loss of each step and the final bits per byte on the test data."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*MODEL, *RUN, f"precision={precision}", f"steps={steps}", f"seed={seed}", f"run.root={folder}"]
        command = [sys.executable, "train.py", *words, "checkpoint.at_end=false"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        rows = map(json.loads, metrics.read_text().splitlines())
        result = json.loads(metrics.with_name("result.json").read_text())
        return [row["loss"] for row in rows if row["event"] == "step"], result["metrics"]["bits_per_byte"]


if __name__ == "__main__":
    main()
