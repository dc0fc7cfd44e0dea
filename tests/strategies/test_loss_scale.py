"""Several updates of a step share one loss scale, updated as in the usual loop with torch's GradScaler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from worldsize.core import MicroBatch, MultiUpdateRecipe, Numerics, RunContext, Update, World
from worldsize.strategies.single import Single

STEPS, GROWTH = 14, 3
OVERFLOWS = {2, 9}  # steps where the generator's gradient exceeds the range of float16


@dataclass(frozen=True)
class Pair(MultiUpdateRecipe):
    """Two layers; the critic is updated ``critics`` times a step."""

    critics: int

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.ModuleDict({"critic": nn.Linear(2, 1), "generator": nn.Linear(2, 2)})

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        return {name: SGD(module.parameters(), lr=0.05) for name, module in model.named_children()}

    def data(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(batch_of(1)[0])

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        assert isinstance(model, nn.ModuleDict)
        for _ in range(self.critics):
            yield "critic", critic_loss(model, batch[0])
        yield "generator", generator_loss(model, batch[0], step)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


def batch_of(step: int) -> tuple[Tensor]:
    return (torch.linspace(-1, 1, 8).view(4, 2) * (1 + step % 3) / 4,)


def critic_loss(model: nn.ModuleDict, real: Tensor) -> Tensor:
    with torch.no_grad():
        fake = model["generator"](real)
    loss: Tensor = (model["critic"](real) - 1).square().mean() + model["critic"](fake).square().mean()
    return loss.float() / 100


def generator_loss(model: nn.ModuleDict, real: Tensor, step: int) -> Tensor:
    loss: Tensor = (model["critic"](model["generator"](real)) - 1).square().mean().float() / 100
    return loss * 1e6 if step in OVERFLOWS else loss


def original(recipe: Pair) -> tuple[list[float], Mapping[str, Tensor]]:
    """Train like a loop with one GradScaler, updated after all optimizers of an iteration have stepped.

    A critic's further updates are separate iterations: GradScaler refuses a second step without an update between.
    """
    model, scaler, scales = recipe.model(), GradScaler("cpu", growth_interval=GROWTH), []
    assert isinstance(model, nn.ModuleDict)
    optimizers = recipe.optimizers(model)

    def step_of(name: str, loss: Tensor) -> None:
        optimizers[name].zero_grad()
        scaler.scale(loss).backward(inputs=list(model[name].parameters()))  # type: ignore[no-untyped-call]
        scaler.step(optimizers[name])

    for step in range(1, STEPS + 1):
        (real,) = batch_of(step)
        for again in range(recipe.critics):
            if again:
                scaler.update()
            with torch.autocast("cpu", torch.float16):
                loss = critic_loss(model, real)
            step_of("critic", loss)
        with torch.autocast("cpu", torch.float16):
            loss = generator_loss(model, real, step)
        step_of("generator", loss)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model.state_dict()


@pytest.mark.parametrize("numerics", [Numerics("fp16"), Numerics("fp16", nonfinite="skip")], ids=["stop", "skip"])
@pytest.mark.parametrize("critics", [1, 2])
def test_the_loss_scale_and_the_weights_are_those_of_the_loop_with_one_gradscaler(
    numerics: Numerics, critics: int
) -> None:
    recipe = Pair(critics)
    scales, weights = original(recipe)
    assert len({*scales}) > 2, "the scale has grown and fallen"
    replica: Any = Single().replica(recipe, RunContext(World.create_single(torch.device("cpu")), numerics))
    replica.scaler.set_growth_interval(GROWTH)
    found, overflows = [], set()
    for step in range(1, STEPS + 1):
        if replica.step([MicroBatch(batch_of(step), seed=1, step=step)]).overflowed:
            overflows.add(step)
        found.append(replica.scaler.get_scale())
    assert found == scales
    assert not overflows if numerics.nonfinite == "skip" else overflows >= OVERFLOWS
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, replica.state()["model"][name])] == []
