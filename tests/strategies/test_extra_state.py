"""Extra entries in an optimizer's ``state_dict()`` are saved with it, or the optimizer is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plugins.parameter_server.strategy import ParameterServer
from worldsize.core import RunContext, Strategy, World
from worldsize.errors import CheckpointError
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.train_state import TrainState, collect_named_state
from worldsize.strategies.zero import ZeRO
from worldsize.testing.loops import Case, find_early_refusal, largest_difference
from worldsize.testing.training import train
from worldsize.testing.update_loops import Optimized, Remembering, SharedLoss
from worldsize.testing.worlds import run_in_worlds

RECIPE = Optimized(lambda model: Remembering(model.parameters()))
BY_PARAMETER = Optimized(lambda model: Remembering(model.parameters(), by_parameter=True))
STRATEGIES: Mapping[str, Strategy] = {"ddp": DDP(), "zero": ZeRO(), "fsdp": FSDP(), "mesh": Mesh()}


def test_a_run_resumes_under_other_strategies_as_the_plain_loop_goes_on(tmp_path: Path) -> None:
    expected = Case("straight", RECIPE, steps=5).train_reference()

    def trained(strategy: Strategy, name: str, steps: int, world: World, *, save: bool = False) -> Any:
        context = RunContext(world, logical_ranks=2)
        return train(strategy, context, steps, tmp_path / name, save=save, recipe=RECIPE).model

    def save_all(world: World) -> None:
        for name, strategy in STRATEGIES.items():
            trained(strategy, name, 2, world, save=True)

    def resume_all(world: World) -> list[Mapping[str, Tensor]]:
        return [trained(each, "single", 5, world) for each in STRATEGIES.values()]

    run_in_worlds(save_all, 2)
    resumed = run_in_worlds(lambda world: [trained(Single(), name, 5, world) for name in STRATEGIES], 1)[0]
    run_in_worlds(lambda world: trained(Single(), "single", 2, world, save=True), 1)
    resumed += run_in_worlds(resume_all, 2)[0]
    assert max(largest_difference(each, expected) for each in resumed) < 2e-5


def test_it_is_refused_if_ranks_with_other_parameters_would_add_other_entries() -> None:
    assert not find_early_refusal(DDP(on_failure="heal"), BY_PARAMETER)
    for kind in (ZeRO, FSDP, Mesh):
        assert not find_early_refusal(kind(on_failure="heal"), RECIPE)
        refusal = find_early_refusal(kind(), BY_PARAMETER)
        assert "Remembering.state_dict() has entries besides state and param_groups" in refusal
    assert "each server has a separate optimizer for its part" in find_early_refusal(ParameterServer(), RECIPE)


class Two(SharedLoss):
    """Trains with two optimizers, one from torch and one with extra entries."""

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        optimizers = dict(super().optimizers(model))
        matrices = optimizers["matrices"].param_groups[0]["params"]
        return {**optimizers, "matrices": Remembering(matrices)}

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        return {}


def test_each_of_several_optimizers_has_its_own_entries() -> None:
    recipe = Two()
    saved, loaded = (TrainState.from_recipe(recipe, recipe.model()) for _ in range(2))
    _take_steps(saved.model, saved.optimizers, 2)
    state = copy.deepcopy(saved.state())
    assert state["optimizer"]["extra"]["matrices"]["taken"] == 2
    assert state["optimizer"]["extra"].keys() == {"matrices"}
    loaded.load(state)
    for each in (saved, loaded):
        _take_steps(each.model, each.optimizers, 3)
    assert largest_difference(loaded.model.state_dict(), saved.model.state_dict()) == 0


def test_a_state_without_the_entries_is_refused() -> None:
    state = TrainState.from_recipe(RECIPE, RECIPE.model())
    saved = state.state()
    del saved["optimizer"]["extra"]
    with pytest.raises(CheckpointError, match="the saved state of Remembering is missing 'decay', an entry"):
        state.load(saved)


class Moving(Optimizer):
    """Sets its learning rate in each step, moves weights without gradients, and keeps no state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = 0.1 / group["taken"]
            for each in group["params"]:
                each.add_(group["lr"])


def test_saving_changes_no_weight_and_no_option_of_an_optimizer_without_state() -> None:
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = Moving(model.parameters())
    saved = collect_named_state(model, optimizer)
    assert largest_difference(model.state_dict(), before) == 0
    for group in (*optimizer.param_groups, *saved["param_groups"]):
        assert "taken" not in group
        assert group["lr"] == 0.1


def _take_steps(model: nn.Module, optimizers: Any, count: int) -> None:
    inputs = torch.linspace(-1, 1, 20).view(5, 4)
    for _ in range(count):
        model.zero_grad()
        model(inputs).square().mean().backward()
        for each in optimizers:
            each.step()
