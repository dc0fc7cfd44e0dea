"""Training on hosts that are network namespaces with shaped links; needs root."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from worldsize.core import Link
from worldsize.testing.hosts import Hosts

REPOSITORY = Path(__file__).parents[1]


@contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """A Python that has imported worldsize already, as the tests have it: four hosts on two cores start in no time."""
    sys.path.append(str(REPOSITORY))
    from tests import warm

    path = folder / "zygote"
    zygote = subprocess.Popen([sys.executable, str(REPOSITORY / "tests" / "zygote.py"), str(path), "-" * 4000])
    try:
        while not path.exists():
            time.sleep(0.005)
        yield warm.interpreter(folder, str(path))
    finally:
        zygote.kill()
        zygote.wait()


def trained_on(hosts: Hosts, *options: str, python: str | Path = sys.executable) -> list[dict[str, Any]]:
    """The logged steps of a run by ``cluster=ssh`` on all of ``hosts``, whose interpreter is ``python``."""
    with tempfile.TemporaryDirectory() as runs:
        words = [
            *("+cluster=ssh", f"cluster.hosts=[{','.join(f'h{host + 1}' for host in range(hosts.count))}]"),
            *(f"cluster.ssh=[{','.join(hosts.ssh)}]", f"cluster.python={python}", "cluster.folder=null"),
            *("log_every=1", "logger=none", "cluster.threads=1", f"run.root={runs}", "evaluate_every=0"),
            *("recipe.test_bytes=1000", "optimizer=sgd", "checkpoint=none", *options),
        ]
        command = hosts.on(1, [str(python), "train.py", *words])
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(runs).rglob("metrics.jsonl")
        return [each for each in map(json.loads, file.read_text().splitlines()) if each["event"] == "step"]


# ---------------------------------------------------------------- what the links give


def measured_links(hosts: Hosts, each: int) -> dict[str, Link]:
    """Bandwidth and latency inside a host and between hosts, by gloo, both directions of a link in use, with ``each``
    processes on every host: inside hosts all pairs at once, between hosts one process of each.
    """
    count = hosts.count * each
    context = get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=_measure, args=(hosts, rank, each, pipe[1])) for rank, pipe in enumerate(pipes)]
    for process in processes:
        process.start()
    found = [pipe[0].recv() for pipe in pipes]
    for process in processes:
        process.join()
    return {tier: _slowest([rank[tier] for rank in found if tier in rank]) for tier in ("node", "network")}


def _slowest(links: list[Link]) -> Link:
    return Link(min(link.bandwidth for link in links), max(link.latency for link in links))


def _measure(hosts: Hosts, rank: int, each: int, sender: Any) -> None:
    torch.set_num_threads(1)
    host, count = rank // each, hosts.count * each
    with Path(f"/run/netns/{hosts.name}h{host + 1}").open() as space:
        ctypes.CDLL(None).setns(space.fileno(), 0)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29450", rank=rank, world_size=count)
    beside = host * each + (rank + 1) % each, host * each + (rank - 1) % each
    found = {"node": _link(*beside)}
    dist.barrier()
    if rank % each == 0:
        found["network"] = _link((rank + each) % count, (rank - each) % count)
    dist.barrier()
    sender.send(found)
    dist.destroy_process_group()


def _link(to: int, source: int) -> Link:
    latency = _exchange(to, source, 1)
    return Link(4 * _NUMBERS / (_exchange(to, source, _NUMBERS) - latency), latency)


_NUMBERS = 1 << 20


def _exchange(to: int, source: int, numbers: int) -> float:
    """Median seconds to send so many float32 to one and receive as many from another."""
    out, into, seconds = torch.zeros(numbers), torch.zeros(numbers), []
    for _ in range(15):
        begun = time.perf_counter()
        works = [dist.isend(out, to), dist.irecv(into, source)]
        for work in works:
            assert work is not None
            work.wait()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[3:])
