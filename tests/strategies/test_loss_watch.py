"""A loss that communicates is refused if its value would depend on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as distributed
from torch import Tensor, nn

from worldsize.core import ConfigError, MicroBatch, Recipe, Reduction, RunContext, Strategy, TensorStyle, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.gradient_reducer import Backward, GradientReducer
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.loss_watch import LossWatch
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.zero import ZeRO
from worldsize.testing.loops import Loop
from worldsize.testing.worlds import run_in_worlds

_DEPRECATED = pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")  # programs still use them


@dataclass(frozen=True)
class Gathered(Loop):
    """Compares each output with the outputs of all processes, as contrastive losses do."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        others = [torch.empty_like(outputs) for _ in range(dist.get_world_size() if dist.is_initialized() else 1)]
        if dist.is_initialized():
            dist.all_gather(others, outputs.detach())
        loss: Tensor = super().loss(model, batch) + 0.1 * (outputs - torch.cat(others).mean()).square().mean()
        return loss


@dataclass(frozen=True)
class Summed(Loop):
    """Adds the mean output of all processes, with a collective that torch dispatches to function modes."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mean = model(batch[0]).detach().mean()
        dist.all_reduce(mean)
        loss: Tensor = super().loss(model, batch) + mean
        return loss


@dataclass(frozen=True)
class Functional(Loop):
    """Communicates with one of torch's functions that return tensors, if there is a group."""

    exchange: Callable[[Tensor], Any]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        others = self.exchange(outputs) if dist.is_initialized() else outputs
        loss: Tensor = super().loss(model, batch) + 0.1 * (others.mean() - outputs).square().mean()
        return loss


@dataclass(frozen=True)
class AloneByNumber(Loop):
    """Omits its exchange if it trains on one rank, as open_clip does."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        if dist.is_initialized() and dist.get_world_size() > 1:
            outputs = torch.cat(distributed.all_gather(outputs))  # type: ignore[no-untyped-call]
        loss: Tensor = super().loss(model, batch) + 0.1 * outputs.mean().square()
        return loss


def _everybody() -> Any:
    return dist.group.WORLD


FUNCTIONAL = (
    Functional(lambda outputs: funcol.all_reduce(outputs, "sum", _everybody())),
    Functional(lambda outputs: funcol.broadcast(outputs, 0, _everybody())),
    Functional(lambda outputs: torch.cat(distributed.all_gather(outputs))),  # type: ignore[no-untyped-call]
    Functional(lambda outputs: distributed.all_reduce(outputs.clone())),  # type: ignore[no-untyped-call]
)


LOST = "another process refuses"


def refusal(strategy: Strategy, world: World, logical_ranks: int, recipe: Recipe = Gathered(), parts: int = 0) -> str:
    """Take a step on ``parts`` processes or groups (0: all form one); return the refusal, or an empty string."""
    replica = strategy.replica(recipe, replace(RunContext(world), logical_ranks=logical_ranks))
    ranks = assign_logical_ranks(
        world.rank % (parts or world.size), parts or world.size, logical_ranks, replica.dealing
    )
    batches = micro_batches(recipe.data("train"), Order(3, 24, logical_ranks, ranks), world.device)
    before = [parameter.detach().clone() for parameter in replica.trained_weights().values()]
    try:
        replica.step(next(batches))
    except ConfigError as error:
        said = str(error)
    except RuntimeError:
        said = LOST
    else:
        return ""
    pairs = zip(before, replica.trained_weights().values(), strict=True)
    held = [(one, other) for one, other in pairs if not one.is_meta]  # the others are on other stages
    assert held
    assert all(bool((one == other).all()) for one, other in held)
    return said


def test_a_loss_that_communicates_is_refused_where_its_value_depends_on_size() -> None:
    def on_two(world: World) -> list[str]:
        ordered = [refusal(strategy(reduce="ordered"), world, 4) for strategy in (DDP, FSDP, ZeRO)]
        summed = refusal(DDP(), world, 4, Summed())
        return [*ordered, summed, refusal(DDP(), world, 4), refusal(DDP(), world, 2), refusal(FSDP(), world, 2)]

    for *ordered, summed, some, ddp, fsdp in run_in_worlds(on_two, 2):
        assert "in Summed.loss" in summed  # in the first step of a process
        assert all("Gathered.loss" in each and "reproducibility=elastic" in each for each in ordered)
        assert "more logical ranks than processes" in some
        assert ddp == fsdp == ""  # a logical rank for each process: the loss sees the whole batch


@dataclass(frozen=True)
class Divided(Loop):
    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        return {"0": "column", "2": "row"}


class GatheredDivided(Divided, Gathered):
    """A :class:`Gathered` whose layers can be sharded."""


class GatheredPiped(Gathered):
    """A :class:`Gathered` whose layers can be stages."""

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def model_inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)


class Exchange(nn.Module):
    """Communicates from its second pass on; a pipeline makes the first to learn the shape of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 1:
            return hidden
        others = hidden.detach().clone()
        dist.all_reduce(others)
        return hidden - others.mean()


class ExchangePiped(GatheredPiped):
    """Communicates in the first layer, not in the loss."""

    def build_net(self) -> nn.Module:
        return nn.Sequential(Exchange(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return Loop.loss(self, model, batch)


class Teacher(Divided):
    """Assigns a weight in the loss, like programs that average others."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = next(model.parameters())
        weight.data = 0.5 * weight.data
        return super().loss(model, batch)


def test_ranks_that_compute_a_pass_together_are_no_others_for_its_loss() -> None:
    def on_two(world: World) -> list[str]:
        return [refusal(Mesh(tensor=2), world, 1, recipe, parts=1) for recipe in (GatheredDivided(), Teacher())]

    for gathers, assigns in run_in_worlds(on_two, 2):
        assert "Gathered.loss" in gathers
        assert "2 processes compute each pass together" in gathers
        assert "the loss modifies the parameter" in assigns


@pytest.mark.parametrize(
    ("recipe", "reduce", "stage"),
    [(GatheredPiped(), "flat", 1), (GatheredPiped(), "ordered", 1), (ExchangePiped(), "flat", 0)],
    ids=["loss", "loss of ordered sums", "layer"],
)
def test_a_stage_of_a_pipeline_refuses_to_communicate_and_none_updates(
    recipe: Recipe, reduce: Reduction, stage: int
) -> None:
    said = run_in_worlds(lambda world: refusal(Mesh(pipeline=2, reduce=reduce), world, 2, recipe, parts=1), 2)
    where = "Gathered.loss" if stage else "Exchange.forward"
    assert f"the loss calls a collective in {where} of " in said[stage]
    assert "use strategy=ddp or fsdp with reproducibility=seeded" in said[stage]
    assert said[1 - stage] == LOST


@_DEPRECATED
def test_functional_collectives_of_a_loss_are_refused_as_others_are() -> None:
    def on_two(world: World) -> list[str]:
        return [
            refusal(DDP(reduce=reduce), world, 4, recipe) for reduce in ("ordered", "flat") for recipe in FUNCTIONAL
        ]

    for said in run_in_worlds(on_two, 2):
        assert all("in <lambda> of " in each for each in said), said


@_DEPRECATED
@pytest.mark.parametrize(
    "recipe",
    [Gathered(), AloneByNumber(), *FUNCTIONAL],
    ids=["gathered", "by number", "functional sum", "broadcast", "differentiable gather", "differentiable sum"],
)
def test_one_process_refuses_the_exchange_that_a_loss_leaves_out_when_it_is_alone(recipe: Recipe) -> None:
    alone = World.create_single(torch.device("cpu"))
    said = refusal(Single(reduce="ordered"), alone, 4, recipe)
    assert "the loss calls a collective in " in said
    assert "reproducibility=elastic" in said
    assert refusal(Single(reduce="ordered"), alone, 1, recipe) == refusal(Single(), alone, 4, recipe) == ""
    assert not dist.is_initialized()


class OwnMean(GradientReducer):
    """A strategy's own exchange of gradients, as written in plugins."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        losses = [backward(batch, 1 / len(batches)) for batch in batches]
        for parameter in self._model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self._world.group)
            parameter.grad /= self._world.size
        return losses


def test_collectives_of_a_strategy_are_not_taken_for_those_of_the_loss() -> None:
    def on_two(world: World) -> list[Tensor]:
        recipe, context = Loop(), replace(RunContext(world), logical_ranks=4)
        state = TrainState.from_recipe(recipe, recipe.model().to(world.device))
        replica = SynchronousReplica(recipe, context, train_state=state, reducer=OwnMean(state.model, world))
        ranks = assign_logical_ranks(world.rank, world.size, 4, replica.dealing)
        for batches in islice(micro_batches(recipe.data("train"), Order(3, 24, 4, ranks), world.device), 2):
            replica.step(batches)
        return [parameter.detach() for parameter in state.model.parameters()]

    one, other = run_in_worlds(on_two, 2)
    assert all(bool((mine == yours).all()) for mine, yours in zip(one, other, strict=True))


@pytest.mark.parametrize("when", range(3))
def test_data_written_in_any_pass_of_the_first_step_are_seen(when: int) -> None:
    model = nn.Linear(2, 1)
    watch = LossWatch(model, processes=2, logical_ranks=2, ordered=True)

    def advance(index: int) -> None:
        with watch.watching():
            if index == when:
                model.weight.data.mul_(0.5)

    for index in range(when):
        advance(index)
    with pytest.raises(ConfigError, match="the loss modifies the parameter weight"):
        advance(when)
