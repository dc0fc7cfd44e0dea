"""Each port of examples/ trains like its original program, under every strategy in its row."""

from __future__ import annotations

import ast
import re
from collections.abc import Generator, Iterator, Mapping
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.parameter_server.strategy import ParameterServer
from tests.ports.lines import count_lines
from worldsize.core import ConfigError, LossOutput, MultiUpdateRecipe, Recipe, Strategy, Update
from worldsize.record.determinism import tensor_digests
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.testing import PortConfig, compose_recipe, same_losses
from worldsize.testing.port import train_in_processes

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "examples" / "recipes" / "ports"
PORTS = sorted(path.stem for path in FOLDER.glob("conf/recipe/*.yaml"))
STRATEGIES: Mapping[str, tuple[Strategy, int]] = {  # and the number of processes
    "ddp": (DDP(), 2),
    "fsdp": (FSDP(), 2),
    "parameter_server": (ParameterServer(), 3),
}
IMPOSSIBLE = {  # and the reason for the refusal
    ("diffusion", "parameter_server"): "does not support weight averaging",
    ("resnet", "parameter_server"): "are not supported on parameter servers",
    ("wgan", "parameter_server"): "has a step hook",
}
LIGHT = {("dpo", "parameter_server"), ("gcn", "ddp"), ("wgan", "fsdp")}  # the others are heavy
PAIRS = [
    pytest.param(name, strategy, marks=[] if (name, strategy) in LIGHT else pytest.mark.heavy)
    for name in PORTS
    for strategy in STRATEGIES
]
PAGE = REPOSITORY / "docs" / "howto" / "ports.md"
LINES = 60  # of a recipe


@pytest.fixture(autouse=True)
def _ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("WORLDSIZE_PLUGINS", str(REPOSITORY / "examples"))
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))


def original(name: str) -> Any:
    return import_module(f"recipes.ports.{name}").original


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy if name == "masked_lm" else []) for name in PORTS]
)  # importing transformers takes long
def test_the_recipe_trains_as_the_program_does(name: str) -> None:
    recipe, config = compose_recipe(f"recipe={name}")
    assert config.steps == 20
    same_losses(recipe, original(name), config)


class Accumulating:
    """A plain PyTorch loop that accumulates the gradients of a step's micro-batches."""

    def __init__(self, recipe: Recipe, config: PortConfig) -> None:
        self.recipe, self.config = recipe, config

    def __call__(self, model: nn.Module, batches: Iterator[Any]) -> Generator[float, None, Mapping[str, Tensor]]:
        optimizer, average = self.recipe.optimizer(model), self.config.average
        schedule = self.recipe.schedule(optimizer)
        means = {name: each.detach().clone() for name, each in model.named_parameters() if average}
        for step in range(1, self.config.steps + 1):
            optimizer.zero_grad()
            yield self._backward(model, batches)
            if self.config.numerics.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), self.config.numerics.clip_norm)
            optimizer.step()
            if schedule:
                schedule.step()
            if average and step % average.every == 0:
                for name, parameter in model.named_parameters():
                    means[name].lerp_(parameter.detach(), 1 - average.decay if step > average.every else 1.0)
        return {**model.state_dict(), **{f"ema/{name}": mean for name, mean in means.items()}}

    def _backward(self, model: nn.Module, batches: Iterator[Any]) -> float:
        """Leave one step's gradient in the parameters; each micro-batch begins with the same statistics."""
        before = {name: each.clone() for name, each in model.named_buffers() if name in model.state_dict()}
        changed, total, weights = [], 0.0, 0.0
        for _ in range(self.config.micro_batches):
            model.load_state_dict(before, strict=False)
            loss = LossOutput.from_loss(self.recipe.loss(model, next(batches))).loss
            summed, weight = loss if isinstance(loss, tuple) else (loss, torch.ones(()))
            summed.backward()  # type: ignore[no-untyped-call]
            total, weights = total + float(summed.detach()), weights + float(weight)
            changed.append({name: model.state_dict()[name].clone() for name in before})
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / weights
        mean = {name: torch.stack([each[name] for each in changed]).double().mean(0) for name in before}
        model.load_state_dict(mean, strict=False)
        return total / weights


class AccumulatingUpdates:
    """The same loop for several updates per step, each with the mean gradient of the micro-batches."""

    def __init__(self, recipe: MultiUpdateRecipe, config: PortConfig) -> None:
        self.recipe, self.config = recipe, config

    def __call__(self, model: nn.Module, batches: Iterator[Any]) -> Generator[float, None, nn.Module]:
        optimizers = self.recipe.optimizers(model)
        for step in range(1, self.config.steps + 1):
            total = 0.0
            running = [self._first(iter(self.recipe.updates(model, next(batches), step))) for _ in self._parts]
            for updates in zip(*running, strict=True):
                optimizer = optimizers[updates[0][0]]
                own = [each for group in optimizer.param_groups for each in group["params"]]
                optimizer.zero_grad()
                for _, loss in updates:
                    assert isinstance(loss, Tensor)
                    (loss / len(updates)).backward(inputs=own)  # type: ignore[no-untyped-call]
                    total += float(loss.detach()) / len(updates)
                optimizer.step()
            yield total
        return model

    @property
    def _parts(self) -> range:
        return range(self.config.micro_batches)

    @staticmethod
    def _first(updates: Iterator[Update]) -> Iterator[Update]:
        """Compute the first update now, since it draws the random numbers, and the others on demand."""
        return chain([next(updates)], updates)


def divided(name: str) -> tuple[Recipe, PortConfig, Any]:
    """Compose a port whose steps have two micro-batches, and the loop to compare it with."""
    dense = ["recipe.sparse=false"] if name == "dlrm" else []  # strategies without servers lack sparse gradients
    recipe, config = compose_recipe(f"recipe={name}", "logical_ranks=2", *dense)
    if isinstance(recipe, MultiUpdateRecipe):
        return recipe, config, AccumulatingUpdates(recipe, config)
    return recipe, config, Accumulating(recipe, config)


# dlrm and siamese return a view, but it is not modified in place
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_it_trains_under_every_strategy_that_can(name: str, strategy: str) -> None:
    recipe, config, loop = divided(name)
    own, processes = STRATEGIES[strategy]
    if reason := IMPOSSIBLE.get((name, strategy)):
        with pytest.raises(ConfigError, match=reason):
            train_in_processes(recipe, config, own, processes)
    else:
        same_losses(recipe, loop, config, strategy=own, processes=processes)


@pytest.mark.heavy
@pytest.mark.parametrize("name", PORTS)
def test_one_and_two_processes_have_the_same_bits(name: str) -> None:
    recipe, config, _ = divided(name)
    alone = train_in_processes(recipe, config, DDP(reduce="ordered"), 1)
    two = train_in_processes(recipe, config, DDP(reduce="ordered"), 2)
    assert two.losses == alone.losses
    assert tensor_digests(two.weights) == tensor_digests(alone.weights)


def test_the_page_says_how_large_each_port_is_and_where_it_trains() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(.*?\) \|.*?\| (\d+) \| (\d+) \| (.*?) \|", PAGE.read_text(), re.M)
    assert {(name, int(loop), int(recipe), strategies) for name, loop, recipe, strategies in rows} == {
        (name, *sizes(name), ", ".join(each for each in STRATEGIES if (name, each) not in IMPOSSIBLE)) for name in PORTS
    }
    assert [name for name in PORTS if sizes(name)[1] > LINES] == []


def sizes(name: str) -> tuple[int, int]:
    """Count the non-empty lines of the program's loop, and of the recipe with its YAML."""
    text = (FOLDER / f"{name}.py").read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    (loop,) = (node for node in nodes if node.name == "original")
    yaml = (FOLDER / "conf" / "recipe" / f"{name}.yaml").read_text()
    recipe = ast.get_source_segment(text, nodes[-1]) or ""
    return count_lines(ast.get_source_segment(text, loop) or ""), count_lines(recipe) + count_lines(yaml)
