"""A tensor plan that does not fit its model is refused before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, Recipe, TensorStyle
from worldsize.strategies.tensor_layers import get_tensor_plan


class Scaled(nn.Embedding):
    def forward(self, indices: Tensor) -> Tensor:
        return super().forward(indices) * 2.0


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scaled = nn.Embedding(10, 8), Scaled(8, 8)
        self.inner, self.outer, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.table.weight


@dataclass(frozen=True)
class Planned(Recipe):
    plan: Mapping[str, TensorStyle] = field(default_factory=dict)
    heads: int = 4

    def model(self) -> nn.Module:
        return Tiny()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, split: str) -> Any:
        return ()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(())

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        return self.plan

    def tensor_units(self, model: nn.Module) -> Mapping[str, int]:
        return {"heads": self.heads}


PLAN: dict[str, TensorStyle] = {"inner": "column", "outer": "row"}


@pytest.mark.parametrize(
    ("plan", "slices", "message"),
    [
        ({}, 2, "Planned does not define a tensor-parallel plan"),
        (PLAN, 8, r"inner has 12 features, not divisible by logical_tensor=8\. Set logical_tensor to a divisor of 12"),
        ({"inner": "gathered"}, 8, "inner has 12 features"),
        ({"outer": "row"}, 8, "outer has 12 features"),
        ({"table": "row"}, 4, "table has 10 features"),
        ({"scaled": "row"}, 2, r"scaled is a Scaled, but only torch.nn.Linear and torch.nn.Embedding can be divided"),
        (
            {"head": "gathered"},
            2,
            r"table and head share their weight, and a shared parameter.* Omit head from Recipe",
        ),
        ({"table": "row"}, 2, r"table and head share their weight, and a shared parameter.* Omit table from Recipe"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(
    plan: Mapping[str, TensorStyle], slices: int, message: str
) -> None:
    model = Tiny()
    with pytest.raises(ConfigError, match=message):
        get_tensor_plan(Planned(plan), model, slices=slices, key="logical_tensor")
    assert get_tensor_plan(Planned(PLAN), model, slices=4, key="logical_tensor") == PLAN


def test_slices_that_would_cut_a_head_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 6 heads, not divisible by strategy.tensor=4. Set strategy.tensor to a"):
        get_tensor_plan(Planned(PLAN, heads=6), Tiny(), slices=4, key="strategy.tensor")
