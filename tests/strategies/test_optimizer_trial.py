"""An optimizer is tried on small tensors: can ranks have parts of parameters, or some of them?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from plugins.parameter_server.strategy import ParameterServer
from worldsize.core import ONE_UPDATE, ConfigError, Recipe
from worldsize.optimizers.muon import muon
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.optimizer_trial import OptimizerTrial
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.loops import Loop, find_early_refusal
from worldsize.testing.update_loops import Counting, Optimized, TrustRatio

Make = Callable[[nn.Module], Optimizer]


class Rows(Optimizer):
    """Scales each row of an update by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * each.grad / (1 + each.grad.norm(dim=-1, keepdim=each.ndim > 1)))


class Noisy(Optimizer):
    """Adds noise to each update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * (each.grad + torch.randn_like(each)))


class Unhooked(Optimizer):
    """Replaces its step, and so runs no hooks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.step: Any = self._take

    @torch.no_grad()
    def _take(self) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * each.grad)


MATRICES: dict[str, tuple[Make, bool, bool, bool]] = {  # split by rows, by columns, and separately
    "adam": (lambda model: Adam(model.parameters()), True, True, True),
    "counting": (lambda model: Counting(model.parameters(), AdamW, warmup=3), True, True, True),
    "trust ratio": (lambda model: TrustRatio(model.parameters(), 0.1, jointly=False), False, False, True),
    "joint trust ratio": (lambda model: TrustRatio(model.parameters(), 0.1, jointly=True), False, False, False),
    "adafactor": (lambda model: Adafactor(model.parameters()), False, False, True),
    "muon": (lambda model: muon(model.parameters()), False, False, True),
    "noisy": (lambda model: Noisy(model.parameters()), False, False, False),
    "unhooked": (lambda model: Unhooked(model.parameters()), True, True, False),
}


class Matrices(Optimized):
    def build_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))


@pytest.mark.parametrize(("make", "rows", "columns", "apart"), MATRICES.values(), ids=MATRICES)
def test_a_trial_tells_norms_of_a_parameter_from_those_of_all(
    make: Make, rows: bool, columns: bool, apart: bool
) -> None:
    with torch.device("meta"):
        recipe = Matrices(make)
        trial = OptimizerTrial(recipe, recipe.model())
        assert trial.failure is None
        assert (trial.updates_parts(0), trial.updates_parts(1), trial.joint is None) == (rows, columns, apart)


def test_a_trial_leaves_the_model_and_the_random_numbers_as_they_are() -> None:
    recipe = Optimized(lambda model: Noisy(model.parameters()))
    model = recipe.model()
    parameters, values = list(model.parameters()), [each.detach().clone() for each in model.parameters()]
    torch.manual_seed(3)
    assert OptimizerTrial(recipe, model).joint is not None
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    for own, before, value in zip(model.parameters(), parameters, values, strict=True):
        assert own is before
        assert torch.equal(own, value)
        assert own.grad is None


def test_an_optimizer_that_cannot_be_tried_is_refused_where_bits_depend_on_cuts() -> None:
    class Hasty(SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("there is no first gradient")

    recipe = Optimized(lambda model: Hasty(model.parameters(), lr=0.1))
    assert "there is no first gradient" in find_early_refusal(FSDP(reduce="ordered"), recipe)
    assert not find_early_refusal(ZeRO(), recipe)


def test_rows_may_be_dealt_to_ranks_but_not_divided_by_tensor_parallelism() -> None:
    class Divided(Optimized):
        def tensor_plan(self, model: nn.Module) -> Any:
            return {"0": "column", "2": "row"}

    recipe = Divided(lambda model: Rows([each for each in model.parameters() if each.ndim > 1]))
    assert not find_early_refusal(FSDP(reduce="ordered"), recipe)
    assert not find_early_refusal(Mesh(reduce="ordered"), recipe)
    assert "Rows updates shards differently from whole parameters" in find_early_refusal(
        Mesh(tensor=2, reduce="ordered"), recipe
    )


@pytest.mark.parametrize("strategy", [FSDP(on_failure="heal"), Mesh(on_failure="heal"), FSDP(reduce="ordered")])
def test_norms_are_refused_where_ranks_divide_parameters_anew(strategy: Any) -> None:
    refusal = find_early_refusal(strategy, Optimized(lambda model: TrustRatio(model.parameters(), 0.1, jointly=False)))
    assert "for example because of a norm" in refusal
    assert "Use strategy=ddp or zero" in refusal


@pytest.mark.parametrize("strategy", [ZeRO(), ParameterServer()])
def test_a_norm_of_all_parameters_is_refused_where_a_process_updates_some(strategy: Any) -> None:
    refusal = find_early_refusal(strategy, Optimized(lambda model: TrustRatio(model.parameters(), 0.1, jointly=True)))
    assert "updates parameters jointly" in refusal


def test_an_optimizer_that_takes_other_parameters_than_the_models_is_refused_by_servers() -> None:
    held: list[nn.Parameter] = []

    class Holding(Loop):
        def model(self) -> nn.Module:
            model = super().model()
            held[:] = model.parameters()
            return model

        def optimizer(self, model: nn.Module) -> Optimizer:
            return Adam(held)

    from plugins.parameter_server.shard_parameters import ShardParameters
    from plugins.parameter_server.sharding import plan_shards
    from worldsize.strategies.train_state import TrainState

    recipe: Recipe = Holding()
    state = TrainState.from_recipe(recipe, recipe.model())
    (buckets,) = plan_shards(dict(state.model.named_parameters()), 1, bucket_bytes=1 << 20, cut=True)
    with pytest.raises(ConfigError, match="Use the parameters of the given model"):
        ShardParameters(state.parts[ONE_UPDATE], buckets, make=recipe.optimizer)


class Saved(Noisy):
    """Counts in its options; they are part of a checkpoint."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = 0.1 / group["taken"]
        super().step()


def test_counters_that_no_checkpoint_has_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert not find_early_refusal(Single(), Optimized(lambda model: Saved(model.parameters())))
    assert not find_early_refusal(Single(), Optimized(lambda model: muon(model.parameters())))
    assert not caplog.records
    assert not find_early_refusal(Single(), Optimized(lambda model: Counting(model.parameters(), AdamW, warmup=3)))
    assert "Counting.state_dict() does not contain its full state" in caplog.text


@pytest.mark.parametrize("kind", [DDP, ZeRO, FSDP, Mesh])
def test_counters_that_a_newcomer_would_not_have_are_refused_with_healing(kind: Any) -> None:
    recipe = Optimized(lambda model: Counting(model.parameters(), AdamW, warmup=3))
    assert not find_early_refusal(kind(), recipe)
    refusal = find_early_refusal(kind(on_failure="heal"), recipe)
    assert "a replacement process cannot restore it. Store the full state in the optimizer's state" in refusal
