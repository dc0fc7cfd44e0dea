"""The model FLOP utilisation matches a count by hand, and does not affect the run's computation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import Train
from worldsize.collectives.cluster_cost import peak_flops
from worldsize.core import MicroBatch
from worldsize.observe.report.page import render_page
from worldsize.testing.recipes import Chain, TwoPlayers
from worldsize.worker.throughput import count_flops

# per sample: forward, and gradients of the weights and of the inputs, except in the first layer
CHAIN = 2 * (7 * 16 * 2 + 4 * (16 * 32 * 2) * 3 + 16 * 3 * 3)


@dataclass(frozen=True)
class Drawing(Chain):
    """A chain whose weights and loss draw random numbers."""

    def model(self) -> nn.Module:
        torch.rand(3)
        return super().model()


def test_operations_are_counted_without_drawing_random_numbers() -> None:
    recipe, rows = Drawing(), list(range(6))
    batch = [torch.stack(column) for column in zip(*(recipe.data("train")[row] for row in rows), strict=True)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert count_flops(recipe, MicroBatch(batch, seed=0)) == 6 * CHAIN
    assert torch.equal(torch.get_rng_state(), before)


def test_operations_of_several_updates_are_those_of_each_with_the_gradients_that_it_needs() -> None:
    recipe = TwoPlayers()
    batch = [torch.stack(column) for column in zip(*(recipe.data("train")[row] for row in range(6)), strict=True)]
    # in widths, by pass: forward, gradients of weights, gradients of inputs
    player, critic = 7 + 3, 10 + 1
    critics = 2 * (critic + critic + 1)  # of real and of generated samples; without input gradients
    players = player + critic + (10 + 1) + (player + 3)  # back through the critic, without gradients of its weights
    assert count_flops(recipe, MicroBatch(batch, seed=0)) == 2 * 6 * 16 * (critics + players)
    assert count_flops(recipe, MicroBatch(batch, seed=0, step=3)) == 2 * 6 * 16 * (2 * critics + players)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H200 NVL", "fp8", 1670.5e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA L40S", "bf16", 362.05e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L400", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
    ],
)
def test_peaks_are_those_of_the_device(device: str, precision: str, peak: float | None) -> None:
    assert peak_flops(device, precision) == peak


def test_a_run_shows_its_mfu_if_a_peak_is_declared_and_its_digests_do_not_change(train: Train) -> None:
    options = ("recipe=digits", "recipe.width=4", "steps=3", "log_every=1", "cluster.processes=2")
    plain, measured = train(*options), train(*options, "cluster.peak_flops=1e9")
    assert (plain.code, measured.code) == (0, 0), measured.error
    for name in ("state_digest", "metrics_digest"):
        assert plain.json("result.json")[name] == measured.json("result.json")[name]
    assert not any({"mfu", "tokens_per_second"} & row.keys() for row in plain.steps())
    rows: list[dict[str, Any]] = measured.steps()
    shares = [row["mfu"] / row["samples_per_second"] * 2e9 for row in rows]  # operations per sample
    # 3 × 3 convolutions to 4 and 8 channels and a linear layer; the first one skips its input gradients
    by_hand = 2 * (64 * 9 * 4 * 2 + 64 * 9 * 4 * 8 * 3 + 8 * 16 * 10 * 3)
    assert shares == pytest.approx([by_hand] * 3)
    assert re.search(r"MFU \d", measured.output)
    assert measured.folder is not None
    shown = render_page([measured.folder])
    assert "Model FLOP utilisation" in shown
    rate = measured.json("result.json")["samples_per_second"]
    assert f"<b>{rate * by_hand / 2e9:.1%}</b><span>MFU</span>" in shown  # for the whole run, like samples/s
