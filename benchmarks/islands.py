"""Compare sums of gradients over one, two and three tiers: four hosts in two racks with a slow uplink.

uv run python benchmarks/islands.py 400 50      # hosts at 400 Mbit/s, the uplink of a rack at 50 (root; namespaces)
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from links import trained_on, warm_python
from reductions import MODEL, gpt
from worldsize.testing.hosts import Hosts, running

BUCKETS = "strategy.bucket_mb=2"
BY_TIER = "strategy.reduce=hierarchical"
ORDERED, MIXED = "cluster.hosts=[h1,h2,h3,h4]", "cluster.hosts=[h1,h3,h2,h4]"  # racks: h1 and h2, h3 and h4
WAYS = {
    "flat, hosts of the racks in turn": (MIXED,),
    "flat": (ORDERED,),
    "two tiers: nodes, network": (BY_TIER, ORDERED),
    "three tiers: nodes, racks, network": (BY_TIER, MIXED, "cluster.topology={topology}"),
}
SHORT, LONG = 3, 9  # steps; the difference in bytes is that of steps alone


def main(megabits: int, uplink: int) -> None:
    size = 4 * sum(parameter.numel() for parameter in gpt().parameters())  # bytes
    title = f"{size / 1e6:.1f} MB of gradients, 2 racks x 2 hosts x 2 ranks, {megabits} and {uplink} Mbit/s"
    drawn = Table("", "a rack sends a step", "to M", "step, s", "flat to it", title=title)
    flat = 0.0
    with tempfile.TemporaryDirectory() as name, running(Path(name), name="bench", count=4, racks=2) as hosts:
        topology = Path(name, "topology.conf")
        topology.write_text("SwitchName=a Nodes=h[1-2]\nSwitchName=b Nodes=h[3-4]\nSwitchName=core Switches=a,b\n")
        hosts.shape(f"{megabits}mbit")
        hosts.shape_uplinks(f"{uplink}mbit")
        with warm_python(Path(name)) as python:
            for way, options in WAYS.items():
                sent, seconds = measured(hosts, [each.format(topology=topology) for each in options], python)
                flat = seconds if way == "flat" else flat
                faster = f"{flat / seconds:.2f} ×" if flat else ""
                drawn.add_row(way, f"{sent / 1e6:.2f} MB", f"{sent / size:.2f}", f"{seconds:.2f}", faster)
    Console(width=120).print(drawn)


def measured(hosts: Hosts, options: list[str], python: Path) -> tuple[float, float]:
    """Return the bytes that the second rack sends in a step, and a step's median seconds."""
    short, _ = _run(hosts, options, SHORT, python)
    long, seconds = _run(hosts, options, LONG, python)
    return (long - short) / (LONG - SHORT), seconds


def _run(hosts: Hosts, options: list[str], steps: int, python: Path) -> tuple[int, float]:
    before = hosts.crossed(1)
    words = (*MODEL, "batch_size=8", BUCKETS, *options, "cluster.processes_per_node=2", f"steps={steps}", "log_every=1")
    logged = trained_on(hosts, *words, python=python)
    return hosts.crossed(1) - before, statistics.median(8 / line["samples_per_second"] for line in logged[2:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
