"""Replicas on a device match plain PyTorch on the CPU, in every precision, singly and in a group."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.devices import CUDA, DEVICES, device_of, run_on_one_device
from tests.strategies.test_recomputed import Blocks
from worldsize.core import MicroBatch, Numerics, Replica, RunContext, Strategy, World
from worldsize.core.numerics import ActivationCheckpointing, PrecisionName
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.record.determinism import Determinism
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.synchronous import create_local_replica
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.training import plain_step
from worldsize.testing.worlds import gather_losses

STEPS, BATCH = 4, 16
GROUPS = {
    "ddp": DDP(),
    "ddp, ordered": DDP(reduce="ordered"),
    "zero": ZeRO(),
    "fsdp": FSDP(wrap="size", wrap_parameters=100),
}
RECIPE = Blocks(dropout=0.0)


def rows() -> Sequence[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(BATCH, 10, generator=generator) for _ in range(STEPS)]
    return [(each[:, :7], each[:, 7:]) for each in made]


def plain_losses(clip: float | None = None) -> list[float]:
    """Return the losses of plain PyTorch on the CPU, with clipping in a handwritten loop."""
    model = RECIPE.model()
    if clip is None:
        step = plain_step(RECIPE, model)
        return [step(batch, number) for number, batch in enumerate(rows(), 1)]
    optimizer, losses = RECIPE.optimizer(model), []
    for batch in rows():
        loss = RECIPE.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(kind: str, **numerics: Any) -> tuple[list[float], Replica]:
    """Return the losses of a single-device replica, and the replica."""
    device = device_of(kind)
    replica = create_local_replica(
        RECIPE, RECIPE.model().to(device), RunContext(World.create_single(device), Numerics(**numerics))
    )
    losses = []
    for step, (inputs, targets) in enumerate(rows(), 1):
        batch = MicroBatch((inputs.to(device), targets.to(device)), seed=step, step=step)
        losses.append(float(replica.step([batch]).losses[0]))
    return losses, replica


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.05), ("fp16", 0.05)])
def test_losses_are_those_of_plain_pytorch(device: str, precision: PrecisionName, tolerance: float) -> None:
    losses, _ = trained(device, precision=precision)
    compared = 1 if precision == "fp16" else STEPS  # the loss scale skips updates until it has adapted
    assert losses[:compared] == pytest.approx(plain_losses()[:compared], rel=tolerance)
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_and_running_statistics_are_those_of_plain_pytorch(device: str) -> None:
    losses, replica = trained(device, clip_norm=0.1)
    assert losses == pytest.approx(plain_losses(0.1), rel=1e-3)
    state = replica.state()["model"]
    counts = [int(each) for name, each in state.items() if name.endswith("num_batches_tracked")]
    assert counts == [STEPS] * 3
    assert {each.device.type for each in state.values()} == {device}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chosen", ["full", "selective"])
def test_recomputed_activations_change_no_loss(device: str, chosen: ActivationCheckpointing) -> None:
    kept, _ = trained(device)
    recomputed, _ = trained(device, activation_checkpointing=chosen)
    assert recomputed == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_activations_that_wait_on_the_host_come_back(device: str) -> None:
    kept, _ = trained(device)
    for chosen in ("none", "full"):
        offloaded, _ = trained(device, activation_offload=True, activation_checkpointing=chosen)
        assert offloaded == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize("device", [CUDA])
def test_a_compiled_replica_has_the_losses_of_one_that_is_not(device: str) -> None:
    pytest.importorskip("triton")
    compiled, _ = trained(device, compile=True)
    assert compiled == pytest.approx(plain_losses(), rel=1e-3)


@pytest.mark.parametrize("device", [CUDA])
def test_eight_bits_round_as_on_the_cpu(device: str) -> None:
    pytest.importorskip("torchao")
    emulated, _ = trained("cpu", precision="fp8")
    losses, _ = trained(device, precision="fp8")
    assert losses == pytest.approx(emulated, rel=0.05)


@pytest.mark.parametrize("device", [CUDA])
def test_recomputing_and_offloading_take_less_of_the_device(device: str) -> None:
    def peak(**numerics: Any) -> int:
        place = device_of(device)
        recipe = Blocks(dropout=0.0)
        replica = create_local_replica(
            recipe, recipe.model().to(place), RunContext(World.create_single(place), Numerics(**numerics))
        )
        batch = torch.randn(2**15, 10, device=place)
        torch.cuda.reset_peak_memory_stats(place)
        replica.step([MicroBatch((batch[:, :7], batch[:, 7:]), seed=1)])
        return torch.cuda.max_memory_allocated(place)

    kept = peak()
    assert peak(activation_checkpointing="full") < 0.8 * kept
    assert peak(activation_offload=True) < 0.9 * kept


def weights_by_strategy(world: World) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Train each strategy of ``GROUPS`` on eight logical ranks; return its losses, and its weights if it has them."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    Determinism("elastic", deterministic=True).apply(world.device.type)
    return {name: _weights(world, strategy) for name, strategy in GROUPS.items()}


def _weights(world: World, strategy: Strategy) -> tuple[list[float], dict[str, Tensor]]:
    recipe = Chain()
    replica = strategy.replica(recipe, RunContext(world, logical_ranks=8))
    order = Order(0, BATCH, 8, assign_logical_ranks(world.rank, world.size, 8, replica.dealing))
    batches, losses = micro_batches(recipe.data("train"), order, world.device), []
    for _ in range(STEPS):
        mine = replica.step(next(batches)).losses
        losses.append(math.fsum(gather_losses(mine, world)) / 8)
    state = {} if isinstance(strategy, FSDP) else replica.state()["model"]
    return losses, {key: each.cpu().clone() for key, each in state.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_that_share_a_device_have_the_losses_of_one(device: str, tmp_path: Path) -> None:
    (one,) = run_on_one_device(weights_by_strategy, kind=device, size=1, folder=tmp_path)
    for two in run_on_one_device(weights_by_strategy, kind=device, size=2, folder=tmp_path):
        for name, (losses, _) in two.items():
            assert losses == pytest.approx(one["ddp"][0], rel=1e-4), name
        for key, tensor in one["ddp, ordered"][1].items():
            assert torch.equal(two["ddp, ordered"][1][key], tensor), key
