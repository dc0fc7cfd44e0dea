"""A recipe with several updates per step, supported by a parameter server, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

from worldsize.core import MultiUpdateRecipe
from worldsize.data.batches import fetch_batch
from worldsize.data.order import Order
from worldsize.seeds import seed_generators

SAMPLES, BATCH, SEED, NOISE, WIDTH = 96, 16, 3, 6, 24
LIMIT = -5.0  # in step 2 the sum of the first micro-batch is below it, and the second one's is above
MADE: list[Mapping[str, Optimizer]] = []  # by this process; the last ones are in use


CONFIG = """# @package _global_
steps: 12
batch_size: 16
recipe:
  _target_: recipes.players.recipe.Players
  kind: exact
"""


def write_project(folder: Path) -> None:
    """Write this recipe into the project in ``folder``, as ``recipe=players``."""
    own = folder / "recipes" / "players"
    (own / "conf" / "recipe").mkdir(parents=True)
    (own / "conf" / "recipe" / "players.yaml").write_text(CONFIG)
    (own / "recipe.py").write_text(Path(__file__).read_text())


def decay(count: int) -> float:
    return 1 / (1 + count / 9)


@dataclass(frozen=True)
class Players(MultiUpdateRecipe):
    """A generator and a critic with a falling learning rate, updated twice in every third step.

    The generator's loss is a sum with its weight; while it is computed the critic is frozen and drops nothing,
    and the generator is frozen in the critic's updates. An observer learns the generator's output from step 5 on. A
    parameter without an optimizer never changes. Kinds other than "exact" break a rule for recipes in step 2.
    """

    kind: str = "exact"

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
        generator[0].requires_grad_(self.kind != "thaws")
        critic = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        parts = {"generator": generator, "critic": critic, "observer": nn.Linear(8, 1), "idle": nn.Linear(3, 1)}
        return nn.ModuleDict(parts)

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, nn.ModuleDict)
        made: dict[str, Optimizer] = {
            "critic": Adam(model["critic"].parameters(), lr=0.01, betas=(0.5, 0.9)),
            "generator": SGD(model["generator"].parameters(), lr=0.02, momentum=0.5),
            "observer": Adam(model["observer"].parameters(), lr=0.01, weight_decay=0.1),
        }
        MADE.append(made)
        return made

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        return {"critic": LambdaLR(optimizers["critic"], decay)}

    def data(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.rand(SAMPLES, 8, generator=generator) * 2 - 1)

    def updates(self, model: nn.Module, batch: Any, step: int) -> Generator[Any, None, Mapping[str, Any]]:
        assert isinstance(model, nn.ModuleDict)
        (real,) = batch
        if step == 2 and self.kind != "exact":
            yield self._impossible(model, real)
        fake = model["generator"](torch.randn(len(real), NOISE))
        model["generator"].requires_grad_(False)
        for _ in range(2 if step % 3 == 0 else 1):
            noisy = real + 0.1 * torch.randn(real.shape)
            yield (
                "critic",
                (model["critic"](noisy) - 1).square().mean() + model["critic"](fake.detach()).square().mean(),
            )
        model["generator"].requires_grad_(True)
        model["critic"].eval().requires_grad_(False)
        yield "generator", ((model["critic"](fake) - 1).square().sum(), torch.tensor(len(real)))
        model["critic"].train().requires_grad_(True)
        if step >= 5:
            yield "observer", (model["observer"](fake.detach()) - model["critic"](real).detach()).square().mean()
        return {"drawn": (fake.detach().double().sum(), fake.numel())}

    def _impossible(self, model: nn.ModuleDict, real: Tensor) -> tuple[str, Tensor]:
        by_data = self.kind == "by data" and float(real.sum()) > LIMIT
        name = "generator" if by_data or self.kind == "thaws" else "critic"
        model["generator"].requires_grad_(True)
        if self.kind == "rates":
            MADE[-1]["critic"].param_groups[0]["lr"] = 1.0
        factor = float("inf") if self.kind == "infinite" else 1.0
        return name, torch.stack([parameter.sum() for parameter in model[name].parameters()]).sum() * factor

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        assert isinstance(model, nn.ModuleDict)
        (real,) = batch
        return {"score": (model["critic"](real).double().sum(), torch.tensor(len(real)))}


def original(steps: int) -> Mapping[str, Tensor]:
    """Train in plain PyTorch on one process, with the documented order and seeds."""
    recipe = Players()
    model, data, order = recipe.model(), recipe.data("train"), Order(SEED, BATCH, 1, (0,))
    assert isinstance(model, nn.ModuleDict)
    critic, generator, observer = model["critic"], model["generator"], model["observer"]
    of_critic, of_generator, of_observer = recipe.optimizers(model).values()
    schedule = LambdaLR(of_critic, decay)
    for step in range(1, steps + 1):
        seed_generators(order.step_seed(step, 0), torch.device("cpu"))
        (real,) = fetch_batch(data, order.compute_indices(step, 0, SAMPLES))
        fake = generator(torch.randn(len(real), NOISE))
        for _ in range(2 if step % 3 == 0 else 1):
            noisy = real + 0.1 * torch.randn(real.shape)
            critic.zero_grad()
            loss = (critic(noisy) - 1).square().mean() + critic(fake.detach()).square().mean()
            loss.backward()
            of_critic.step()
            schedule.step()
        generator.zero_grad()
        critic.eval().requires_grad_(False)
        ((critic(fake) - 1).square().sum() / len(real)).backward()
        of_generator.step()
        critic.train().requires_grad_(True)
        if step >= 5:
            observer.zero_grad()
            (observer(fake.detach()) - critic(real).detach()).square().mean().backward()
            of_observer.step()
    return model.state_dict()
