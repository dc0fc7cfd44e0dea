"""Golden resolved configurations; ``uv run python tests/config/golden.py`` writes them again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "golden"
COMBINATIONS = {
    "default": [],
    "laptop_single_digits_deterministic": [
        "+cluster=laptop",
        "+strategy=single",
        "cluster.processes=1",
        "reproducibility=deterministic",
    ],
    "node_ddp_stdlib_lm": ["cluster=node", "strategy=ddp", "recipe=stdlib_lm", "precision=bf16"],
    "sgd_constant_fast_none": ["optimizer=sgd", "schedule=constant", "reproducibility=fast", "logger=none"],
}


def resolved(overrides: list[str]) -> str:
    """Return what ``train.py --cfg job --resolve`` prints."""
    command = [sys.executable, "train.py", "--cfg", "job", "--resolve", *overrides]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WORLDSIZE")}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, overrides in COMBINATIONS.items():
        (FOLDER / f"{name}.yaml").write_text(resolved(overrides))
