"""A run with state that checkpoints cannot hold is refused before the start, or before its second step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from plugins.parameter_server.strategy import ParameterServer
from worldsize.core import RunContext, Strategy
from worldsize.errors import CheckpointError
from worldsize.strategies.single import Single
from worldsize.testing.loops import Loop, find_early_refusal
from worldsize.testing.training import ALONE, train

Values = dict[str, Any]


class Remembering(Optimizer):
    """Stores a value in its options, or in its state in the first step."""

    def __init__(self, params: Any, options: Values, stored: Any, *, tries: bool = True) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self._stored, self._tries = stored, tries

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            if not self._tries and each.numel() in (37, 77):
                raise RuntimeError("these are not parameters of the model")
            self.state[each]["best"] = self._stored


class Best(LRScheduler):
    """Stores a value in its second step."""

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch:
            self.best = {1j}
        return [group["lr"] for group in self.optimizer.param_groups]


@dataclass(frozen=True)
class Remembers(Loop):
    make: Callable[[nn.Module], Optimizer] = lambda model: SGD(model.parameters(), lr=0.1)
    make_schedule: Callable[[Optimizer], LRScheduler | None] = lambda _: None

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make(model)

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.make_schedule(optimizer)


class Halving:
    """A function of the step with a value that checkpoints cannot hold."""

    def __init__(self) -> None:
        self.factor = {0.5}

    def __call__(self, step: int) -> float:
        return 0.5**step


REFUSED: dict[str, tuple[Remembers, str]] = {
    "option": (Remembers(lambda model: Remembering(model.parameters(), {"best": {1}}, 1)), "best is a set"),
    "state": (Remembers(lambda model: Remembering(model.parameters(), {}, 1j)), "best is a complex"),
    "schedule": (Remembers(make_schedule=lambda optimizer: LambdaLR(optimizer, Halving())), "factor is a set"),
    "stepped schedule": (Remembers(make_schedule=Best), "schedule/best is a set"),
}


@pytest.mark.parametrize("strategy", [Single(), ParameterServer()], ids=["single", "parameter_server"])
@pytest.mark.parametrize(("recipe", "message"), REFUSED.values(), ids=REFUSED)
def test_values_that_no_checkpoint_holds_are_refused_before_the_start(
    recipe: Remembers, message: str, strategy: Strategy
) -> None:
    refusal = find_early_refusal(strategy, recipe)
    assert message in refusal
    assert "Use only tensors and plain values" in refusal


def test_what_a_trial_cannot_find_ends_the_run_before_its_second_step() -> None:
    recipe = Remembers(lambda model: Remembering(model.parameters(), {}, 1j, tries=False))
    assert not find_early_refusal(Single(), recipe)
    train(Single(), RunContext(ALONE), 1, recipe=recipe)
    with pytest.raises(CheckpointError, match=r"optimizer/state/0\.(weight|bias)/best is a complex"):
        train(Single(), RunContext(ALONE), 2, recipe=recipe)


def test_numbers_of_numpy_in_the_state_are_trained_and_saved(tmp_path: Any) -> None:
    recipe = Remembers(lambda model: Remembering(model.parameters(), {"ratio": np.float32(0.1)}, np.int64(4)))
    assert not find_early_refusal(Single(), recipe)
    train(Single(), RunContext(ALONE), 3, tmp_path, save=True, recipe=recipe)
    train(Single(), RunContext(ALONE), 4, tmp_path, save=True, recipe=recipe)
    assert torch.tensor(recipe.optimizer(recipe.model()).param_groups[0]["ratio"]) == torch.tensor(0.1)
