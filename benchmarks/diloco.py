"""DiLoCo's tables in miniature: what training apart costs in loss, and what it saves on the wire.

uv run python benchmarks/diloco.py loss 2000        # 4 workers on this machine, 2,000 steps each way
uv run python benchmarks/diloco.py network 100      # hosts with links of 100 Mbit/s (root; namespaces)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from worldsize.testing.hosts import Hosts, running

REPOSITORY = Path(__file__).parents[1]
WORKERS = 4
COMMON = ("recipe=stdlib_lm", f"cluster.processes={WORKERS}", "cluster.threads=1", "logger=none", "checkpoint=none")

# ---------------------------------------------------------------- loss at equal tokens

SMALL = ("recipe.width=32", "recipe.depth=3", "recipe.heads=2", "recipe.context=32", "batch_size=32")
STREAMING = ("strategy=streaming_diloco", "strategy.fragment_blocks=1")
WAYS: Mapping[str, tuple[str, ...]] = {
    "DDP": ("strategy=ddp",),
    "DiLoCo, H = 30": ("strategy=diloco", "strategy.inner_steps=30"),
    "DiLoCo, H = 100": ("strategy=diloco", "strategy.inner_steps=100"),
    "DiLoCo, H = 500": ("strategy=diloco", "strategy.inner_steps=500"),
    "streaming, 4 bits, H = 30": (*STREAMING, "strategy.inner_steps=30"),
    "streaming, 4 bits, H = 100": (*STREAMING, "strategy.inner_steps=100"),
    "streaming, fp32, H = 30": (*STREAMING, "strategy.inner_steps=30", "strategy.wire=fp32"),
}


@dataclass(frozen=True)
class Found:
    bits: float  # per byte of the test split
    sent: float  # bytes that leave each worker


def loss(steps: int = 2000, *names: str) -> None:
    found = {}
    for name in names or WAYS:
        found[name] = _trained(*WAYS[name], f"steps={steps}")
        print(name, found[name], file=sys.stderr)
    drawn = Table("", "bits per byte", "to DDP", "MB sent by a worker", "fewer than DDP", title=f"{steps:,} steps")
    base = found["DDP"]
    for name, each in found.items():
        ratio, fewer = 100 * (each.bits / base.bits - 1), base.sent / each.sent
        drawn.add_row(name, f"{each.bits:.4f}", f"{ratio:+.1f} %", f"{each.sent / 1e6:,.1f}", f"{fewer:,.0f} ×")
    Console(width=110).print(drawn)


def _trained(*words: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        more = (*SMALL, "recipe.test_bytes=100000", f"run.root={folder}", "log_every=50")
        command = [sys.executable, "train.py", *COMMON, *more, *words]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).rglob("result.json")
        result: dict[str, Any] = json.loads(file.read_text())
        last = _steps(file.with_name("metrics.jsonl"))[-1]
    sent = last["facts"]["sent_bytes"] if "facts" in last else _all_reduced(result)
    return Found(float(result["metrics"]["bits_per_byte"]), float(sent))


def _all_reduced(result: Mapping[str, Any]) -> float:
    """Bytes that leave each worker in ``steps`` ring all-reduces of float32 gradients."""
    return int(result["steps"]) * 2 * (WORKERS - 1) / WORKERS * 4 * _parameters(*SMALL)


def _parameters(*words: str) -> int:
    sizes = {key: int(value) for key, value in (word.removeprefix("recipe.").split("=") for word in words)}
    width = sizes["width"]
    return 256 * width + width + sizes["depth"] * (12 * width**2 + 2 * width)


def _steps(path: Path) -> list[Any]:
    return [each for each in map(json.loads, path.read_text().splitlines()) if each["event"] == "step"]


# ---------------------------------------------------------------- over shaped links

LARGE = ("recipe.width=256", "recipe.depth=3", "recipe.context=8", "batch_size=4")


def network(megabits: int = 100) -> None:
    """Tokens a second of 4 workers, each on a host of its own; the bytes are what the first host's link carried."""
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
    """Tokens a second of the steps after the first, and bytes a step that left the first host."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), name="dlc", count=WORKERS) as hosts:
        hosts.shape(f"{megabits}mbit")
        names = ",".join(f"h{host + 1}" for host in range(hosts.count))
        ssh = f"cluster.ssh=[{','.join(hosts.ssh)}]"
        cluster = ("+cluster=ssh", f"cluster.hosts=[{names}]", "cluster.processes_per_node=1", ssh)
        where = (f"cluster.python={sys.executable}", "cluster.folder=null", f"run.root={folder}/runs")
        how = ("clip_norm=null", "optimizer=sgd", "lr=0.01", "recipe.test_bytes=1000")
        common = [word for word in COMMON if not word.startswith("cluster.processes")]
        command = hosts.on(1, [sys.executable, "train.py", *common, *cluster, *where, *how, *LARGE, *words])
        before = _sent(hosts)
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        sent = _sent(hosts) - before
        (file,) = Path(folder).rglob("metrics.jsonl")
        steps = _steps(file)
    seconds = sum((b["samples"] - a["samples"]) / b["samples_per_second"] for a, b in zip(steps, steps[1:]))  # noqa: B905, RUF007
    tokens = (steps[-1]["samples"] - steps[0]["samples"]) * 8
    return tokens / seconds, sent / steps[-1]["step"]


def _sent(hosts: Hosts) -> int:
    """Bytes that have left the first host."""
    read = hosts.on(1, ["cat", "/sys/class/net/eth0/statistics/tx_bytes"])
    return int(subprocess.run(read, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    command, number, *names = sys.argv[1:]
    loss(int(number), *names) if command == "loss" else network(int(number))
