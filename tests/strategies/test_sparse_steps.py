"""Optimizers that cannot train sparse gradients, or with unsupported state, are refused before the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, SparseAdam

from plugins.parameter_server.hybrid import HybridParameterServer
from plugins.parameter_server.strategy import ParameterServer
from worldsize.core import ConfigError, Recipe, Strategy
from worldsize.plan.construction import check_construction
from worldsize.strategies.ddp import DDP
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO


class Own(SGD):
    """An optimizer with a custom constructor."""

    def __init__(self, parameters: Any, speed: str) -> None:
        super().__init__(parameters, lr={"slow": 0.1}[speed])


@dataclass(frozen=True)
class Rows(Recipe):
    """A table with sparse gradients under any optimizer."""

    make: Any

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 2, sparse=True))

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer: Optimizer = self.make(model.parameters())
        return optimizer

    def data(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(torch.arange(5))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


WHOLE = [Single(), DDP(), ZeRO()]
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


def state_in_plain_pytorch(recipe: Rows) -> dict[str, Any]:
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    recipe.loss(model, (torch.tensor([1, 3]),)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    (state,) = optimizer.state.values() or [{}]
    return state


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "make",
    [partial(SGD, lr=0.1), partial(SparseAdam, lr=0.1), partial(Adagrad, lr=0.1), partial(Own, speed="slow")],
)
def test_what_has_a_dense_state_in_plain_pytorch_is_trained(make: Any) -> None:
    assert not any(isinstance(each, Tensor) and each.is_sparse for each in state_in_plain_pytorch(Rows(make)).values())
    for strategy in WHOLE:
        check_construction(Rows(make), strategy)


@pytest.mark.parametrize("strategy", WHOLE, ids=lambda each: type(each).__name__)
def test_a_sparse_momentum_is_refused_with_what_to_do(strategy: Strategy) -> None:
    assert state_in_plain_pytorch(Rows(MOMENTUM))["momentum_buffer"].is_sparse
    with pytest.raises(ConfigError) as refusal:
        check_construction(Rows(MOMENTUM), strategy)
    assert str(refusal.value) == (
        "SGD keeps a sparse momentum_buffer for 0 (sparse=True), which checkpoints do not support. Set momentum=0, use "
        "SparseAdam or Adagrad, or set sparse=False."
    )


@pytest.mark.parametrize("make", [partial(AdamW, lr=0.1), partial(SGD, lr=0.1, weight_decay=0.1)])
def test_an_optimizer_that_takes_no_sparse_gradient_is_refused_with_its_reason(make: Any) -> None:
    with pytest.raises(RuntimeError) as plain:
        state_in_plain_pytorch(Rows(make))
    with pytest.raises(ConfigError, match="with these options does not support sparse gradients") as refusal:
        check_construction(Rows(make), DDP())
    assert str(plain.value) in str(refusal.value)
    assert "Set sparse=False" in str(refusal.value)


@pytest.mark.parametrize("strategy", [ParameterServer(), HybridParameterServer()], ids=lambda each: type(each).__name__)
def test_servers_of_rows_refuse_what_they_have_no_form_of(strategy: Strategy) -> None:
    check_construction(Rows(partial(AdamW, lr=0.1)), strategy)
    with pytest.raises(
        ConfigError, match="SGD with these options is not supported for rows of 0. Use SGD without momentum"
    ):
        check_construction(Rows(MOMENTUM), strategy)


def test_a_run_is_refused_before_it_has_a_folder(train: Any) -> None:
    words = ("recipe=word2vec", "optimizer=adamw", "cluster.processes=1", "strategy=single")
    run = train(*words)
    assert (run.code, run.folder) == (2, None)
    assert "AdamW with these options does not support sparse gradients" in run.error
    assert "inner has sparse=True" in run.error
