"""Compare traffic on the slow uplinks of two racks of two hosts: hierarchical sums, and orders of mesh axes.

uv run python benchmarks/islands.py sums 400 50    # hosts at 400 Mbit/s, the uplink of a rack at 50 (root; namespaces)
uv run python benchmarks/islands.py orders 400 40
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from links import trained_on, warm_python
from reductions import MODEL, gpt
from worldsize.testing.hosts import Hosts, run_hosts

BUCKETS = "strategy.bucket_mb=2"
BY_TIER = "strategy.reduce=hierarchical"
ORDERED, MIXED = "cluster.hosts=[h1,h2,h3,h4]", "cluster.hosts=[h1,h3,h2,h4]"  # racks: h1 and h2, h3 and h4
WAYS = {
    "flat, hosts of the racks in turn": (MIXED,),
    "flat": (ORDERED,),
    "two tiers: nodes, network": (BY_TIER, ORDERED),
    "three tiers: nodes, racks, network": (BY_TIER, MIXED, "cluster.topology={topology}"),
}
STAGES = ("recipe=stdlib_lm", "recipe.depth=4", "recipe.context=64", "strategy=mesh", "strategy.pipeline=2")
ORDERS = ("[tensor,data,pipeline]", "[tensor,pipeline,data]")
SHORT, LONG = 3, 9  # steps; the difference excludes traffic at startup


def sums(megabits: int, uplink: int) -> None:
    size = 4 * sum(parameter.numel() for parameter in gpt().parameters())  # bytes
    title = f"{size / 1e6:.1f} MB of gradients, 2 racks x 2 hosts x 2 ranks, {megabits} and {uplink} Mbit/s"
    drawn = Table("", "a rack sends a step", "to M", "step, s", "flat to it", title=title)
    flat = 0.0
    with racks(megabits, uplink) as (hosts, python), tempfile.TemporaryDirectory() as name:
        topology = Path(name, "topology.conf")
        topology.write_text("SwitchName=a Nodes=h[1-2]\nSwitchName=b Nodes=h[3-4]\nSwitchName=core Switches=a,b\n")
        for way, options in WAYS.items():
            own = [each.format(topology=topology) for each in options]
            sent, seconds = measured(hosts, [*MODEL, BUCKETS, *own, "cluster.processes_per_node=2"], 8, python)
            flat = seconds if way == "flat" else flat
            faster = f"{flat / seconds:.2f} ×" if flat else ""
            drawn.add_row(way, f"{sent / 1e6:.2f} MB", f"{sent / size:.2f}", f"{seconds:.2f}", faster)
    Console(width=120).print(drawn)


def orders(megabits: int, uplink: int) -> None:
    title = f"4 blocks, 8 micro-batches of 4, 2 racks x 2 hosts, {megabits} and {uplink} Mbit/s"
    drawn = Table("width", "strategy.order", "a rack sends a step", "step, s", title=title)
    with racks(megabits, uplink) as (hosts, python):
        for width in (64, 128):
            for order in ORDERS:
                own = (f"recipe.width={width}", f"strategy.order={order}", "strategy.micro_batches=8")
                sent, seconds = measured(hosts, [*STAGES, *own], 64, python)
                drawn.add_row(str(width), order.replace("[", "\\["), f"{sent / 1e6:.2f} MB", f"{seconds:.2f}")
    Console(width=120).print(drawn)


@contextmanager
def racks(megabits: int, uplink: int) -> Iterator[tuple[Hosts, Path]]:
    """Yield four hosts in two racks, and the path of a fast-starting Python interpreter."""
    with tempfile.TemporaryDirectory() as name, run_hosts(Path(name), name="bench", count=4, racks=2) as hosts:
        hosts.shape_links(f"{megabits}mbit")
        hosts.shape_uplinks(f"{uplink}mbit")
        with warm_python(Path(name)) as python:
            yield hosts, python


def measured(hosts: Hosts, options: list[str], batch: int, python: Path) -> tuple[float, float]:
    """Return the bytes per step of ``batch`` samples sent by the second rack, and the median seconds per step."""
    short, _ = _run(hosts, options, batch, SHORT, python)
    long, seconds = _run(hosts, options, batch, LONG, python)
    return (long - short) / (LONG - SHORT), seconds


def _run(hosts: Hosts, options: list[str], batch: int, steps: int, python: Path) -> tuple[int, float]:
    before = hosts.count_uplink_bytes(1)
    logged = trained_on(hosts, *options, f"batch_size={batch}", f"steps={steps}", "log_every=1", python=python)
    return hosts.count_uplink_bytes(1) - before, statistics.median(
        batch / line["samples_per_second"] for line in logged[2:]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"sums": sums, "orders": orders}[sys.argv[1]](*map(int, sys.argv[2:]))
