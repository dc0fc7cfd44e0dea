"""Compare gradient reductions of DDP on two hosts of two ranks: bytes on the link, step time and loss.

uv run python benchmarks/reductions.py 200      # links of 200 Mbit/s (root; network namespaces)
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from links import REPOSITORY, trained_on
from worldsize.testing.hosts import Hosts, run_hosts

MODEL = ("recipe=stdlib_lm", "recipe.width=256", "recipe.depth=4", "recipe.context=8", "clip_norm=null", "batch_size=4")
BUCKETS = "strategy.bucket_mb=2"  # several buckets, so that one is sent while the next is computed
WAYS = {
    "flat": (),
    "hierarchical": ("strategy.reduce=hierarchical",),
    "hierarchical, bf16": ("strategy.reduce=hierarchical", "strategy.compress=bf16"),
    "hierarchical, int8": ("strategy.reduce=hierarchical", "strategy.compress=int8"),
    "hierarchical, powersgd 4": ("strategy.reduce=hierarchical", "strategy.compress=powersgd"),
    "hierarchical, topk 1 %": ("strategy.reduce=hierarchical", "strategy.compress=topk"),
    "hierarchical, randomk 1 %": ("strategy.reduce=hierarchical", "strategy.compress=randomk"),
    "flat, int8": ("strategy.compress=int8",),
}
SHORT, LONG = 4, 12  # steps; the difference excludes traffic at startup


def main(megabits: int) -> None:
    size = 4 * sum(parameter.numel() for parameter in gpt().parameters())  # bytes
    title = f"{size / 1e6:.1f} MB of gradients, 2 hosts x 2 ranks, {megabits} Mbit/s"
    drawn = Table(
        "",
        "bytes a host sends a step",
        "to M",
        "to flat",
        "step, s",
        "flat to it",
        "bytes promise",
        "loss",
        title=title,
    )
    flat_bytes, flat_seconds = 0.0, 0.0
    for name, options in WAYS.items():
        print(name, file=sys.stderr)
        sent, seconds, loss = measured(options, megabits)
        flat_bytes, flat_seconds = flat_bytes or sent, flat_seconds or seconds
        faster, fewer = flat_seconds / seconds, flat_bytes / sent
        cells = (f"{sent / 1e6:.2f} MB", f"{sent / size:.3f}", f"{sent / flat_bytes:.3f}", f"{seconds:.3f}")
        drawn.add_row(name, *cells, f"{faster:.2f} ×", f"{fewer:.2f} ×", f"{loss:.3f}")
    Console(width=120).print(drawn)


def measured(options: tuple[str, ...], megabits: int) -> tuple[float, float, float]:
    """Return the bytes per step sent by the second host, the median seconds per step, and the last loss."""
    with tempfile.TemporaryDirectory() as folder, run_hosts(Path(folder), name="bench", count=2) as hosts:
        hosts.shape_links(f"{megabits}mbit")
        short, _, _ = _run(hosts, options, SHORT)
        long, seconds, loss = _run(hosts, options, LONG)
    return (long - short) / (LONG - SHORT), seconds, loss


def _run(hosts: Hosts, options: tuple[str, ...], steps: int) -> tuple[int, float, float]:
    before = hosts.count_sent_bytes(2)
    logged = trained_on(
        hosts, *MODEL, BUCKETS, *options, "cluster.processes_per_node=2", f"steps={steps}", "log_every=1"
    )
    seconds = statistics.median(4 / line["samples_per_second"] for line in logged[3:])
    return hosts.count_sent_bytes(2) - before, seconds, logged[-1]["loss"]


def gpt() -> nn.Module:
    """Return the model described by ``MODEL``, for its parameter count."""
    sys.path.append(str(REPOSITORY))
    from recipes.stdlib_lm.recipe import StdlibLM

    return StdlibLM(256, 4, 4, 8, 0.0, 1000, partial(torch.optim.SGD, lr=0.1)).model()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
