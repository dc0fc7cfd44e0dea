"""Compare worldsize with its peers: step time, time to the first step, peak memory per process.

uv run --extra benchmarks python benchmarks/compare.py step        # 1 and 2 processes, 6,000 steps each
uv run --extra benchmarks python benchmarks/compare.py start       # 2, 4 and 8 processes
uv run python benchmarks/compare.py logger                         # cost of the default logger, 2 processes
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
PEERS = {
    "hand-written DDP": "handwritten.py",
    "Lightning Fabric": "fabric.py",
    "Accelerate": "accelerate_loop.py",
    "Lightning Trainer": "trainer.py",
}
Figures = dict[str, float]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return {
        **kept,
        "WORLDSIZE_PLUGINS": str(HERE),
        "WANDB_MODE": "offline",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode and not any(folder.glob("*.json")):  # torch may abort in its teardown after the last step
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def peer(script: str, processes: int, steps: int) -> Figures:
    """Run a peer's script under torchrun and return its figures."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "figures.json"
        begun = time.time()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        run([*torchrun, str(HERE / "peers" / script), str(steps), str(out)], Path(name))
        figures: Figures = json.loads(out.read_text())
        return {**figures, "first_step_seconds": float(out.with_suffix(".first").read_text()) - begun}


def ours(processes: int, steps: int, logger: str = "wandb") -> Figures:
    """Train the same model with worldsize; ``logger="wandb"`` logs to an offline wandb run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = time.time()
        options = [
            f"cluster.processes={processes}",
            f"steps={steps}",
            f"batch_size={32 * processes}",
            f"logger={logger}",
        ]
        run([sys.executable, str(REPOSITORY / "train.py"), "recipe=tiny", *options], folder)
        (result,) = folder.rglob("result.json")
        lines = [json.loads(line) for line in (result.parent / "metrics.jsonl").read_text().splitlines()]
        measured = [line for line in lines if line["event"] == "step" and line["step"] > 200]
        figures = json.loads(result.read_text())
        return {
            "microseconds_per_step": _mean_step(measured, processes),
            "microseconds_per_late_step": _mean_step(
                [line for line in measured if line["step"] > steps / 2], processes
            ),
            "peak_megabytes": figures["peak_memory_bytes"] / 2**20,
            "first_step_seconds": figures["first_step_at"] - begun,
        }


def _mean_step(lines: Sequence[dict[str, Any]], processes: int) -> float:
    """Return the mean time of a step in microseconds; 0 if none was measured."""
    return 1e6 * statistics.mean(32 * processes / line["samples_per_second"] for line in lines) if lines else 0.0


def alternately(contenders: dict[str, Callable[[], Figures]], rounds: int) -> dict[str, Figures]:
    """Return each contender's medians over rounds; contenders take turns, so that drift affects them equally."""
    figures_of: dict[str, list[Figures]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            print(f"round {number + 1}/{rounds}: {name}", file=sys.stderr)
            figures_of[name].append(contender())
    return {name: _medians(rows) for name, rows in figures_of.items()}


def _medians(rows: Iterable[Figures]) -> Figures:
    rows = list(rows)
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def show(
    title: str, figures: dict[str, Figures], columns: dict[str, str], *, base_name: str = "hand-written DDP"
) -> None:
    """Print a table of figures, each with its ratio to ``base_name``'s."""
    table = Table("", *columns.values(), title=title)
    base = figures[base_name]
    for name, row in figures.items():
        table.add_row(name, *(f"{row[key]:,.1f} ({row[key] / base[key]:.2f} ×)" for key in columns))
    Console(width=110).print(table)


def step(rounds: int = 3, steps: int = 6000) -> None:
    for processes in (1, 2):
        contenders: dict[str, Callable[[], Figures]] = {
            "worldsize": partial(ours, processes, steps, logger="none"),
            "worldsize and wandb": partial(ours, processes, steps),
        }
        for name, script in PEERS.items():
            contenders[name] = partial(peer, script, processes, steps)
        columns = {"microseconds_per_step": "µs a step", "peak_megabytes": "peak MB a process"}
        show(f"{processes} process(es), {steps} steps, median of {rounds}", alternately(contenders, rounds), columns)


def start(rounds: int = 3) -> None:
    for processes in (2, 4, 8):
        contenders: dict[str, Callable[[], Figures]] = {
            "worldsize": partial(ours, processes, 2),
            "hand-written DDP": partial(peer, "handwritten.py", processes, 2),
        }
        title = (
            f"command to first step, {processes} processes, median of {rounds}; the hand-written loop under torchrun"
        )
        show(title, alternately(contenders, rounds), {"first_step_seconds": "seconds"})


def logger(rounds: int = 5, steps: int = 10_000) -> None:
    contenders: dict[str, Callable[[], Figures]] = {
        "worldsize": partial(ours, 2, steps, logger="none"),
        "worldsize and wandb": partial(ours, 2, steps),
    }
    figures = alternately(contenders, rounds)
    columns = {"microseconds_per_step": "µs a step", "microseconds_per_late_step": "µs a step in the second half"}
    show(f"2 processes, {steps} steps, median of {rounds}", figures, columns, base_name="worldsize")


if __name__ == "__main__":
    {"step": step, "start": start, "logger": logger}[sys.argv[1]](*map(int, sys.argv[2:]))
