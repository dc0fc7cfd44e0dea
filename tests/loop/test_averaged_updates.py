"""Check the average of steps with several updates, or with a loss scale, against AveragedModel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from worldsize.core import MicroBatch, MultiUpdateRecipe, Numerics, Recipe, RunContext, Update, World
from worldsize.core.sections import WeightAverage
from worldsize.loop.averaging import AveragedReplica
from worldsize.strategies.single import Single

STEPS, EVERY, EMA = 12, 5, WeightAverage(0.7)
LOST = {3: ("critic",), 5: ("generator",), 8: ("critic",)}  # updates whose gradient is not finite; all of step 8
INPUTS = torch.linspace(-1, 1, 8).view(4, 2)


@dataclass(frozen=True)
class Pair(MultiUpdateRecipe):
    """Two layers; the generator is updated every fifth step."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.ModuleDict({"critic": nn.Linear(2, 1), "generator": nn.Linear(2, 2)})

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        return {name: SGD(module.parameters(), lr=0.1) for name, module in model.named_children()}

    def data(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(INPUTS)

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        assert isinstance(model, nn.ModuleDict)
        for name in ("critic", "generator")[: 2 if step % EVERY == 0 else 1]:
            loss = (model["critic"](model["generator"](batch[0])) - 1).square().mean()
            yield name, loss * torch.inf if name in LOST.get(step, ()) else loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


def test_a_step_counts_for_the_average_if_one_of_its_updates_was_made() -> None:
    """Untouched layers are averaged as they are; a step that loses its only update does not count."""
    recipe = Pair()
    model = recipe.model()
    assert isinstance(model, nn.ModuleDict)
    optimizers = recipe.optimizers(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA.decay))  # type: ignore[no-untyped-call]
    for step in range(1, STEPS + 1):
        made = 0
        for name, loss in recipe.updates(model, (INPUTS,), step):
            assert isinstance(name, str)
            assert isinstance(loss, Tensor)
            if name not in LOST.get(step, ()):
                optimizers[name].zero_grad()
                loss.backward(inputs=list(model[name].parameters()))  # type: ignore[no-untyped-call]
                optimizers[name].step()
                made += 1
        if made:
            average.update_parameters(model)
    assert same(averaged(recipe, Numerics(nonfinite="skip")), average.module)


@dataclass(frozen=True)
class Line(Recipe):
    """One layer whose gradient overflows float16 in some steps."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(2, 1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def data(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(INPUTS)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss_at(model, batch, 1)

    def loss_at(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        loss: Tensor = (model(batch[0]) - 1).square().mean().float() / 100
        return loss * 1e6 if step in LOST else loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


@pytest.mark.parametrize("kind", ["stop", "skip"])
def test_a_step_that_a_loss_scale_leaves_out_averages_unchanged_weights_unless_it_is_skipped(kind: Any) -> None:
    """A loop that updates its average after each GradScaler step does not check whether weights have changed."""
    recipe = Line()
    model, scaler = recipe.model(), GradScaler("cpu")
    optimizer = recipe.optimizer(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA.decay))  # type: ignore[no-untyped-call]
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = recipe.loss_at(model, (INPUTS,), step)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        if kind == "stop" or step not in LOST:
            average.update_parameters(model)
    assert same(averaged(recipe, Numerics("fp16", nonfinite=kind)), average.module)


def averaged(recipe: Recipe, numerics: Numerics) -> Mapping[str, Tensor]:
    inner = Single().replica(recipe, RunContext(World.create_single(torch.device("cpu")), numerics))
    replica = AveragedReplica(inner, EMA)
    for step in range(1, STEPS + 1):
        replica.step([MicroBatch((INPUTS,), seed=1, step=step)])
    weights: Mapping[str, Tensor] = replica.state()["ema"]["weights"]
    return weights


def same(found: Mapping[str, Tensor], expected: nn.Module) -> bool:
    state = expected.state_dict()
    assert found.keys() == state.keys()
    return all(torch.equal(tensor, state[name]) for name, tensor in found.items())
