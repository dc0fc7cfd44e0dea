"""Devices for the tests of GPUs: the CPU in every test run, so that the tests are known to work, and one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from worldsize.core import Cluster, Role, World
from worldsize.testing.worlds import run_in_worlds
from worldsize.world.environments import Placement
from worldsize.world.world import create_world

_MISSING = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch found no GPU on this machine")
CUDA = pytest.param("cuda", marks=(pytest.mark.gpu, _MISSING))
DEVICES = ("cpu", CUDA)

Body = Callable[[World], Any]


def device_of(kind: str) -> torch.device:
    """Return the first device of a ``kind``."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def run_on_one_device(body: Body, *, kind: str, size: int, folder: Path) -> list[Any]:
    """Call ``body(world)`` in ``size`` processes that share one device, by gloo; return the results by rank.

    On a GPU they are spawned, since a forked process cannot use CUDA once its parent has. NCCL refuses two ranks of one
    GPU.
    """
    if kind == "cpu":
        return run_in_worlds(body, size)
    store = f"file://{folder}/store_{size}"
    with ProcessPoolExecutor(size, mp_context=get_context("spawn")) as pool:
        started = [pool.submit(_called, body, kind, Placement(rank, size, rank, size, store)) for rank in range(size)]
        return [each.result(timeout=240) for each in started]


def _called(body: Body, kind: str, placement: Placement) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    size, device = placement.world_size, device_of(kind)
    torch.cuda.set_device(device)
    cluster = Cluster("test", 1, size, "cuda", "gloo", threads=1, timeout=240.0)
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=placement.store,
            rank=placement.rank,
            world_size=size,
            timeout=timedelta(seconds=cluster.timeout),
        )
    try:
        return body(create_world(placement, cluster, {"worker": Role(size)}, device))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
