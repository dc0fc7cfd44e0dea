"""Optimizer hooks that a strategy does not support are refused before the start, and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from plugins.parameter_server.hybrid import HybridParameterServer
from plugins.parameter_server.strategy import ParameterServer
from worldsize.core import ConfigError, MicroBatch, Recipe, RunContext, Strategy, World
from worldsize.plan.construction import check_construction
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.testing.recipes import AveragedChain
from worldsize.testing.worlds import run_in_worlds

Hook = Callable[..., Any]


class Net(nn.Module):
    """Two layers with an average of the first, a copy of it as a frozen parameter, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.image = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.average: Tensor
        self.steps: Tensor
        self.register_buffer("average", torch.zeros(4, 4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(inputs).tanh())
        return outputs


def in_a_buffer(model: Net) -> Hook:
    return lambda *_: model.average.lerp_(model.first.weight.detach(), 0.1)


def in_a_buffer_at_once(model: Net) -> Hook:
    return lambda *_: torch._foreach_lerp_([model.average], [model.first.weight.detach()], 0.1)


def with_a_mask(model: Net) -> Hook:
    mask = torch.ones(4, 4).triu()
    return lambda *_: model.first.weight.data.mul_(mask)


def in_a_frozen_parameter(model: Net) -> Hook:
    return lambda *_: model.image.lerp_(model.first.weight.detach(), 0.1)


def in_copies_beside(model: Net) -> Hook:
    copies = [parameter.detach().clone() for parameter in model.parameters()]

    def average(*_: object) -> None:
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.mul_(0.9).add_(parameter.data, alpha=0.1)

    return average


def clipping(model: Net) -> Hook:
    return lambda *_: [parameter.data.clamp_(-0.1, 0.1) for parameter in model.second.parameters()]


def counting(model: Net) -> Hook:
    return lambda *_: model.first.weight.data.mul_(1 - 0.01 / model.steps.add_(1))


@dataclass(frozen=True)
class Hooked(Recipe):
    """A recipe whose optimizer has a hook."""

    make_hook: Callable[[Net], Hook]

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return Net()

    def optimizer(self, model: nn.Module) -> Optimizer:
        assert isinstance(model, Net)
        optimizer = SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        optimizer.register_step_post_hook(self.make_hook(model))
        return optimizer

    def data(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(torch.eye(4))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


def is_refused(recipe: Recipe, strategy: Strategy) -> bool:
    try:
        check_construction(recipe, strategy)
    except ConfigError as refusal:
        assert "the optimizer has a step hook, " in str(refusal)  # noqa: PT017 - it may be refused or not
        return True
    return False


def fails(recipe: Recipe, world: World) -> bool:
    replica = FSDP().replica(recipe, RunContext(world))
    try:
        replica.step([MicroBatch((torch.eye(4),), seed=1)])
    except RuntimeError as error:
        assert "mixed torch.Tensor and DTensor" in str(error)  # noqa: PT017
        return True
    return False


@pytest.mark.parametrize(
    ("make_hook", "refused"),
    [
        (in_a_buffer, True),
        (in_a_buffer_at_once, True),
        (with_a_mask, True),
        (in_a_frozen_parameter, False),
        (in_copies_beside, False),
        (clipping, False),
        (counting, False),
    ],
)
def test_fsdp_refuses_the_hooks_that_fail_in_its_processes_and_no_others(
    make_hook: Callable[[Net], Hook], *, refused: bool
) -> None:
    recipe = Hooked(make_hook)
    assert run_in_worlds(lambda world: fails(recipe, world), 2) == [refused, refused]
    assert is_refused(recipe, FSDP()) == refused
    assert is_refused(recipe, Mesh()) == refused
    assert not is_refused(recipe, DDP())
    assert not is_refused(recipe, HybridParameterServer())
    assert is_refused(recipe, ParameterServer())


def test_the_refusal_names_the_hook_the_buffer_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_construction(AveragedChain(in_buffer=True), FSDP())
    assert str(refusal.value) == (
        "the optimizer has a step hook, AveragedChain.optimizer.<locals>.update_average, that combines sharded weights "
        "with the buffer 5.average. Keep the tensor as a frozen parameter, nn.Parameter(..., requires_grad=False), so "
        "that it is sharded like the weights; set ema.decay to average all weights; or use strategy=ddp or zero."
    )


@dataclass(frozen=True)
class Rows(Hooked):
    """A recipe with a table."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"table": nn.Embedding(5, 4, sparse=True), "net": Net()})

    def optimizer(self, model: nn.Module) -> Optimizer:
        assert isinstance(model, nn.ModuleDict)
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.make_hook(model))  # type: ignore[arg-type]
        return optimizer


def test_servers_of_tables_refuse_hooks_that_compute_with_a_table() -> None:
    def of_all(model: nn.Module) -> Hook:
        return lambda *_: [parameter.data.clamp_(-1, 1) for parameter in model.parameters()]

    def of_net(model: nn.Module) -> Hook:
        return lambda *_: [parameter.data.clamp_(-1, 1) for parameter in model["net"].parameters()]  # type: ignore[index]

    check_construction(Rows(of_net), HybridParameterServer())
    with pytest.raises(ConfigError, match="uses table.weight, but its rows are on servers. Remove the hook, set"):
        check_construction(Rows(of_all), HybridParameterServer())
