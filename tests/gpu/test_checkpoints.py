"""Sharded state is saved from a device and loaded into it, and NCCL works in a group of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.devices import CUDA, DEVICES, run_on_one_device
from tests.gpu.test_runs import GPT
from tests.support.runs import environment
from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.save import Saver
from worldsize.core import MicroBatch, RunContext, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.strategies.fsdp import FSDP
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import gather_losses


def resumed_losses(world: World, folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses of two steps, from a replica that continues and from one that has loaded its checkpoint."""
    recipe, strategy = Chain(), FSDP(wrap="size", wrap_parameters=100)
    first, second = (strategy.replica(recipe, RunContext(world, logical_ranks=8)) for _ in range(2))
    order = Order(0, 16, 8, assign_logical_ranks(world.rank, world.size, 8, first.dealing))
    steps = micro_batches(recipe.data("train"), order, world.device)
    batches: list[list[MicroBatch]] = [list(next(steps)) for _ in range(4)]
    for each in batches[:2]:
        first.step(each)
    group: Any = dist.new_group(backend="gloo")
    saver = Saver(folder, world, group, keep=Retention(last=1))
    saver.save(first.state(), step=2, facts={"metrics": {}})
    saver.finish()
    saver.close()
    checkpoint = find_newest(folder, world)
    assert checkpoint is not None
    second.load(load_checkpoint(checkpoint, second.state()))
    went_on, resumed = (
        [sum(gather_losses(each.step(b).losses, world)) for b in batches[2:]] for each in (first, second)
    )
    return went_on, resumed


@pytest.mark.parametrize("device", DEVICES)
def test_sharded_state_is_saved_and_goes_on_where_it_was(device: str, tmp_path: Path) -> None:
    body = partial(resumed_losses, folder=tmp_path / "checkpoints")
    for went_on, resumed in run_on_one_device(body, kind=device, size=2, folder=tmp_path):
        assert resumed == pytest.approx(went_on, rel=1e-6)


# bypasses the shortcut for one process: that creates no group
ONE_RANK = """
import torch, torch.distributed as dist
device = torch.device("cuda", 0)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
sums = [torch.ones(3, device=device), torch.ones(3)]
for each in sums:
    dist.all_reduce(each)
torch.cuda.synchronize()
dist.destroy_process_group()
print([each.tolist() for each in sums])
"""


@pytest.mark.parametrize("device", [CUDA])
def test_nccl_makes_a_group_of_one_rank(device: str) -> None:
    done = subprocess.run([sys.executable, "-c", ONE_RANK], capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout == "[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]\n", done.stderr


@pytest.mark.parametrize("device", [CUDA])
def test_the_sanitizer_of_streams_finds_no_race(device: str, tmp_path: Path) -> None:
    words = ("train", *GPT, f"cluster.device={device}", "logger=none")
    variables = environment(TORCH_CUDA_SANITIZER="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    command = [sys.executable, "-m", "worldsize", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    logs = "".join(path.read_text() for path in tmp_path.rglob("worker_*.log"))
    assert "CSAN detected" not in logs
    assert torch.cuda.device_count()
