"""Planned memory is the maximum over all parts of a run, and values without a rehearsal are marked."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.plan.rehearsal.composed import isolated
from worldsize.config.settings import Settings
from worldsize.core import Cluster, Cost, Recipe
from worldsize.plan import advice
from worldsize.plan.advice import detect_memory_bytes, explain_memory_excess, formula_text
from worldsize.plan.predictor import Forecast, Given, Predictor

MEGA = 250_000  # float32 numbers that take 1 MB
OPTIONS = ("recipe=digits", "strategy=ddp", "cluster.processes=2", "batch_size=32")


@final
@dataclass(frozen=True)
class Greedy(Recipe):
    """A small layer, plus the given MB of memory while the model is built, in a loss or in an evaluation."""

    building: int = 0
    evaluating: int = 0
    fails: bool = False

    def model(self) -> nn.Module:
        torch.zeros(self.building * MEGA)
        return nn.Linear(6, 1)

    def data(self, split: str) -> Any:
        return TensorDataset(torch.zeros(256, 6))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.fails and dist.is_initialized():
            raise ValueError("no such rank")
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        more = torch.zeros(self.evaluating * MEGA)
        return {"loss": (model(batch[0]).square().sum() + more.sum(), torch.tensor(len(batch[0])))}

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


def predicted(settings: Settings, recipe: Recipe) -> Forecast:
    return Predictor(Given(compute_seconds=1.0)).forecast(replace(settings, recipe=recipe))


@pytest.mark.parametrize("recipe", [Greedy(building=20), Greedy(evaluating=20)], ids=["building", "evaluation"])
def test_a_run_needs_the_most_that_any_part_of_it_takes(recipe: Recipe) -> None:
    forecast = isolated(predicted, *OPTIONS, given=(recipe,))
    assert forecast.cost.memory_bytes == pytest.approx(20e6, rel=0.05)
    assert forecast.by_formula is None


def test_a_formula_in_place_of_a_rehearsal_that_failed_is_marked_with_the_reason() -> None:
    forecast = isolated(predicted, *OPTIONS, given=(Greedy(fails=True),))
    assert forecast.cost.memory_bytes > 0
    text = formula_text({"ddp": forecast, "zero": forecast, "fsdp": replace(forecast, by_formula=None)})
    assert text.startswith(
        "* Memory estimated by the strategy's formula, without activations. "
        "ddp, zero: the rehearsal failed in step 1: ValueError: no such rank (tests/plan/test_predicted_memory.py:"
    )
    assert formula_text({"fsdp": replace(forecast, by_formula=None)}) == ""


def test_memory_of_a_process_is_never_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("test", 1, 4, "cpu", "gloo")
    found = detect_memory_bytes(cluster)
    assert found is not None
    assert found > 0
    monkeypatch.setattr(os, "sysconf", lambda name: 1000)
    assert detect_memory_bytes(cluster) == 0
    forecast = Forecast(Cost(1e9, 0.0, 0.0, 0.0), 1.0, 0.0, 1.0)
    assert explain_memory_excess(forecast, 0.0, processes=4) == (
        "Python and torch use all memory of this machine with 4 processes. Lower cluster.processes, or set "
        "cluster.device_memory."
    )


def test_memory_of_a_container_or_a_job_counts_where_it_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (8 << 30, 4 << 30):
        monkeypatch.setattr(advice, "find_memory_limit", lambda node, limit=limit: replace(node, total=limit))
        found.append(detect_memory_bytes(Cluster("test", 1, 2, "cpu", "gloo")))
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] - found[1] == pytest.approx(2 << 30, rel=0.01)  # half of the difference for each process


def test_what_a_process_has_loaded_before_it_asks_is_not_free() -> None:
    cluster = Cluster("test", 1, 1, "cpu", "gloo")
    before = detect_memory_bytes(cluster)
    held = torch.ones(100 * MEGA)
    after = detect_memory_bytes(cluster)
    assert before is not None
    assert after is not None
    assert before - after == pytest.approx(held.nbytes, rel=0.2)


def test_memory_of_a_gpu_leaves_room_for_what_is_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    answer = subprocess.CompletedProcess([], 0, stdout="80000000000\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: answer)
    assert detect_memory_bytes(Cluster("test", 1, 2, "cuda", "nccl")) == 78e9
