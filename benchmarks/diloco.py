"""Reproduce DiLoCo's tables in miniature: the loss and traffic of infrequent synchronization.

uv run python benchmarks/diloco.py loss 1200        # 4 workers on this machine, 1,200 steps
uv run python benchmarks/diloco.py network 100      # hosts with links of 100 Mbit/s (root; namespaces)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from worldsize.testing.hosts import run_hosts

REPOSITORY = Path(__file__).parents[1]
WORKERS = 4
COMMON = ("recipe=stdlib_lm", f"cluster.processes={WORKERS}", "cluster.threads=1", "logger=none", "checkpoint=none")

# ---------------------------------------------------------------- loss at equal tokens

SMALL = ("recipe.width=32", "recipe.depth=3", "recipe.heads=2", "recipe.context=32", "batch_size=64")
STREAMING = ("strategy=streaming_diloco", "strategy.fragment_blocks=1", "strategy.outer_lr=0.7")
WAYS: Mapping[str, tuple[str, ...]] = {
    "DDP": ("strategy=ddp",),
    "DiLoCo, H = 30": ("strategy=diloco", "strategy.inner_steps=30"),
    "DiLoCo, H = 100": ("strategy=diloco", "strategy.inner_steps=100"),
    "DiLoCo, H = 500": ("strategy=diloco", "strategy.inner_steps=500"),
    "streaming, 4 bits, H = 30": (*STREAMING, "strategy.inner_steps=30"),
    "streaming, 4 bits, H = 30, mix 0.5": (*STREAMING, "strategy.inner_steps=30", "strategy.mix=0.5"),
    "streaming, fp32, H = 30, mix 0.5": (
        *STREAMING,
        "strategy.inner_steps=30",
        "strategy.mix=0.5",
        "strategy.wire=fp32",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """Loss and traffic of one training method."""

    bits: float  # bits per byte of the test split
    sent: float  # bytes per step sent by each worker


def loss(steps: int = 1200, *options: str) -> None:
    """Compare the losses of all training methods after the same number of tokens.

    DDP trains the first third, since the paper also starts from a trained model. Each method resumes from there.
    """
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        begun = _begun(Path(name), steps, options)
        jobs = {way: pool.submit(_resumed, begun, Path(name, f"{place}"), *WAYS[way]) for place, way in enumerate(WAYS)}
        outcomes = {way: job.result() for way, job in jobs.items()}
    drawn = Table("", "bits per byte", "to DDP", "kB a step", "fewer than DDP", title=f"{steps:,} steps")
    base = outcomes["DDP"]
    for way, outcome in outcomes.items():
        ratio, fewer = 100 * (outcome.bits / base.bits - 1), base.sent / outcome.sent
        drawn.add_row(way, f"{outcome.bits:.4f}", f"{ratio:+.1f} %", f"{outcome.sent / 1e3:,.1f}", f"{fewer:,.0f} ×")
    Console(width=110).print(drawn)


def _begun(folder: Path, steps: int, options: Sequence[str]) -> Path:
    """Train the first third of a run, until a planted fault terminates it, and return its folder."""
    stop = f"faults=[{{action: terminate, rank: 0, step: {steps // 3}}}]"
    more = (*SMALL, f"steps={steps}", "recipe.test_bytes=100000", "log_every=50", f"run.root={folder}/begun", stop)
    words = [word for word in (*COMMON, *more, *options) if word != "checkpoint=none"]
    subprocess.run([sys.executable, "train.py", *words], cwd=REPOSITORY, check=False, stdout=subprocess.DEVNULL)
    (manifest,) = folder.glob("begun/*/*/run_manifest.json")
    return manifest.parent


def _resumed(begun: Path, folder: Path, *words: str) -> Outcome:
    """Resume a copy of the run ``begun`` with the options ``words``, and return its result."""
    shutil.copytree(begun, folder)
    program = (sys.executable, "-c", "from worldsize.cli import main; main()")
    command = [*program, "resume", str(folder), *words, "--ignore", "data"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    first = json.loads((folder / "run_manifest.json").read_text())["attempts"][1]["steps"][0]
    facts = _steps(folder / "metrics.jsonl")[-1].get("facts")
    sent = facts["sent_bytes"] / (result["steps"] - first) if facts else _all_reduced()
    print(words, result["metrics"], sent, file=sys.stderr)
    return Outcome(float(result["metrics"]["bits_per_byte"]), sent)


def _all_reduced() -> float:
    """Return the bytes sent by each worker in a ring all-reduce of float32 gradients."""
    return 2 * (WORKERS - 1) / WORKERS * 4 * _parameters(*SMALL)


def _parameters(*words: str) -> int:
    sizes = {key: int(value) for key, value in (word.removeprefix("recipe.").split("=") for word in words)}
    width = sizes["width"]
    return 256 * width + width + sizes["depth"] * (12 * width**2 + 2 * width)


def _steps(path: Path) -> list[Any]:
    return [each for each in map(json.loads, path.read_text().splitlines()) if each["event"] == "step"]


# ---------------------------------------------------------------- over shaped links

LARGE = ("recipe.width=256", "recipe.depth=3", "recipe.context=8", "batch_size=4")


def network(megabits: int = 100) -> None:
    """Measure tokens per second of 4 workers on separate hosts, and the bytes on the first host's link."""
    size = 4 * _parameters(*LARGE)
    drawn = Table(
        "", "tokens/s", "to DDP", "MB a step", title=f"{size / 1e6:.0f} MB of parameters, {megabits} Mbit/s a host"
    )
    ways = {
        "DDP": ("strategy=ddp", "steps=6", "log_every=1"),
        "DiLoCo, H = 100": ("strategy=diloco", "strategy.inner_steps=100", "steps=201", "log_every=100"),
        "streaming, 4 bits, H = 100": (*STREAMING, "strategy.delay=5", "steps=201", "log_every=100"),
    }
    base = 0.0
    for name, words in ways.items():
        print(name, file=sys.stderr)
        tokens, sent = _over_links(megabits, *words)
        base = base or tokens
        drawn.add_row(name, f"{tokens:,.1f}", f"{tokens / base:.1f} ×", f"{sent / 1e6:,.2f}")
    Console(width=110).print(drawn)


def _over_links(megabits: int, *words: str) -> tuple[float, float]:
    """Return tokens per second after the first logged step, and bytes per step sent by the first host."""
    with tempfile.TemporaryDirectory() as folder, run_hosts(Path(folder), name="dlc", count=WORKERS) as hosts:
        hosts.shape_links(f"{megabits}mbit")
        names = ",".join(f"h{host + 1}" for host in range(hosts.count))
        ssh = f"cluster.ssh=[{','.join(hosts.ssh)}]"
        cluster = ("+cluster=ssh", f"cluster.hosts=[{names}]", "cluster.processes_per_node=1", ssh)
        where = (f"cluster.python={sys.executable}", "cluster.folder=null", f"run.root={folder}/runs")
        how = ("clip_norm=null", "optimizer=sgd", "lr=0.01", "recipe.test_bytes=1000")
        common = [word for word in COMMON if not word.startswith("cluster.processes")]
        command = hosts.wrap_command(1, [sys.executable, "train.py", *common, *cluster, *where, *how, *LARGE, *words])
        before = hosts.count_sent_bytes(1)
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        sent = hosts.count_sent_bytes(1) - before
        (file,) = Path(folder).rglob("metrics.jsonl")
        steps = _steps(file)
    seconds = sum((b["samples"] - a["samples"]) / b["samples_per_second"] for a, b in zip(steps, steps[1:]))  # noqa: B905, RUF007
    tokens = (steps[-1]["samples"] - steps[0]["samples"]) * 8
    return tokens / seconds, sent / steps[-1]["step"]


if __name__ == "__main__":
    command, number, *names = sys.argv[1:]
    loss(int(number), *names) if command == "loss" else network(int(number))
