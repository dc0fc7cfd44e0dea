"""8-bit AdamW and schedule-free optimizers train, save and evaluate like their own libraries."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchao.optim import AdamW8bit as PlainAdamW8bit

from plugins.parameter_server.strategy import ParameterServer
from recipes.digits.recipe import Digits
from worldsize.core import ConfigError, EvaluationBatch, EvaluationBatches, MicroBatch, Numerics, RunContext, World
from worldsize.loop.schedules import warmup_cosine
from worldsize.optimizers.eight_bit import adamw_8bit
from worldsize.optimizers.schedule_free import adamw_schedule_free, use_evaluation_weights
from worldsize.plan.construction import check_construction
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.synchronous import create_local_replica
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain

STEPS = 7
KINDS = {"codes": "torch.uint8", "scale": "torch.float32"}
EIGHT_BITS = partial(adamw_8bit, lr=0.01, weight_decay=0.1, compile=False)
FREE = partial(adamw_schedule_free, lr=0.02, weight_decay=0.1, warmup_steps=3)


def recipe(make: Any, **options: Any) -> Digits:
    """Return a recipe with parameters that are large enough for 8 bits, and others that are not."""
    return Digits(32, 0.0, make, **options)


def batches() -> list[tuple[Tensor, Tensor]]:
    images, labels = recipe(EIGHT_BITS).data("train").tensors
    return [(images[20 * step : 20 * step + 20], labels[20 * step : 20 * step + 20]) for step in range(STEPS)]


def model_of(own: Digits) -> nn.Module:
    torch.manual_seed(3)
    return own.model()


def trained(model: nn.Module, optimizer: Optimizer, data: list[Any], schedule: LambdaLR | None = None) -> list[Tensor]:
    """Train in plain PyTorch, and return the weights."""
    for images, labels in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


# ---------------------------------------------------------------- 8 bits


def test_adamw_of_8_bits_has_the_weights_of_torchaos_under_a_schedule() -> None:
    plain = model_of(recipe(EIGHT_BITS))
    own = copy.deepcopy(plain)
    theirs = PlainAdamW8bit(plain.parameters(), lr=0.01, weight_decay=0.1)
    ours = EIGHT_BITS(own.parameters())
    with torch.compiler.set_stance("force_eager"):
        expected = trained(plain, theirs, batches(), LambdaLR(theirs, lambda step: 1 / (1 + step)))
    assert equal(expected, trained(own, ours, batches(), LambdaLR(ours, lambda step: 1 / (1 + step))))
    assert ours.param_groups[0]["lr"] == pytest.approx(0.01 / (1 + STEPS))


def test_moments_of_8_bits_are_saved_as_plain_tensors_and_go_on_with_the_same_bits() -> None:
    own = recipe(EIGHT_BITS)
    model = model_of(own)
    state = TrainState.from_recipe(own, model)
    trained(model, state.optimizer, batches()[:3])
    saved = copy.deepcopy(state.state())
    moments = saved["optimizer"]["state"]["2.weight"]
    assert {name: str(each.dtype) for name, each in moments.items()} == {
        "step": "torch.float32",
        **{f"{name}.{inner}": kind for name in ("exp_avg", "exp_avg_sq") for inner, kind in KINDS.items()},
    }
    assert saved["optimizer"]["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}  # too small
    assert all(type(each) is Tensor for values in saved["optimizer"]["state"].values() for each in values.values())
    other = model_of(own)
    resumed = TrainState.from_recipe(own, other)
    before = resumed.state()["optimizer"]["state"]["2.weight"]
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in moments.items()}
    resumed.load(saved)
    whole = trained(model, state.optimizer, batches()[3:])
    assert equal(whole, trained(other, resumed.optimizer, batches()[3:]))


@pytest.mark.parametrize(("compiles", "graphs"), [(True, 2), (False, 1)])
def test_an_update_is_compiled_if_that_is_wanted_and_what_comes_after_it_in_any_case(
    compiles: bool, graphs: int
) -> None:
    compiled = list[Any]()

    def kept(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    parameter = nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    torch.compiler.reset()
    with torch.compiler.set_stance(force_backend=kept):
        adamw_8bit([parameter], compile=compiles).step()
        torch.compile(lambda x: x + 1)(parameter)
    torch.compiler.reset()
    assert len(compiled) == graphs


# ---------------------------------------------------------------- schedule-free


def evaluations(data: list[Any]) -> EvaluationBatches:
    def draw() -> Iterator[EvaluationBatch]:
        yield from (EvaluationBatch(index, batch) for index, batch in enumerate(data))

    return EvaluationBatches(draw, "test", 1)


def test_schedule_free_training_is_that_of_a_plain_loop_and_evaluations_change_no_bit() -> None:
    """The plain loop is evaluated only at its end, since its way back and forth would round its weights."""
    own, device = recipe(FREE), torch.device("cpu")
    plain = model_of(own)
    theirs = schedulefree.AdamWScheduleFree(plain.parameters(), lr=0.02, weight_decay=0.1, warmup_steps=3)
    theirs.train()
    model = model_of(own)
    replica = create_local_replica(own, model, RunContext(World.create_single(device), Numerics()))
    replica.evaluate(evaluations(batches()[:1]))
    for step, batch in enumerate(batches(), 1):
        replica.state()  # a save: its probe must not leave a trace
        replica.step([MicroBatch(batch, seed=step, step=step)])
        found = replica.evaluate(evaluations(batches()))
    with pytest.raises(InterruptedError), use_evaluation_weights(replica.train_state.optimizers, model):
        raise InterruptedError  # as in a gang that loses a member during an evaluation
    assert equal(trained(plain, theirs, batches()), list(model.parameters()))
    assert theirs.param_groups[0]["k"] == replica.train_state.optimizers[0].param_groups[0]["k"] == STEPS
    theirs.eval()
    evaluated, training = total_loss(plain), total_loss(model)
    assert found["loss"] == pytest.approx(evaluated / (20 * STEPS), rel=1e-6)
    assert abs(training - evaluated) > 1e-3 * evaluated


@torch.no_grad()
def total_loss(model: nn.Module) -> float:
    return sum(
        float(nn.functional.cross_entropy(model(images), labels, reduction="sum")) for images, labels in batches()
    )


def test_a_schedule_free_optimizer_that_has_not_stepped_starts_from_the_weights_that_were_loaded() -> None:
    own = recipe(FREE)
    model, other = model_of(own), model_of(own)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    state = TrainState.from_recipe(own, other)
    state.load({**state.state(), "model": model.state_dict()})  # as init_from does
    plain = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, weight_decay=0.1, warmup_steps=3)
    plain.train()
    assert equal(trained(model, plain, batches()), trained(other, state.optimizer, batches()))


def test_a_schedule_free_state_goes_on_with_the_same_bits() -> None:
    own = recipe(FREE)
    model, other = model_of(own), model_of(own)
    state, resumed = TrainState.from_recipe(own, model), TrainState.from_recipe(own, other)
    trained(model, state.optimizer, batches()[:3])
    resumed.state()
    resumed.load(copy.deepcopy(state.state()))
    whole = trained(model, state.optimizer, batches()[3:])
    assert equal(whole, trained(other, resumed.optimizer, batches()[3:]))


# ---------------------------------------------------------------- refusals


@dataclass(frozen=True)
class Normed(Chain):
    """A chain with BatchNorm."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), nn.BatchNorm1d(3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return FREE(model.parameters())


@pytest.mark.parametrize("make", [EIGHT_BITS, FREE])
@pytest.mark.parametrize("strategy", [FSDP(), Mesh(), ParameterServer(), ZeRO(), Single(), DDP()])
def test_strategies_that_do_not_train_an_optimizer_refuse_it_before_the_start(strategy: Any, make: Any) -> None:
    trains = (Single, DDP, ZeRO) if make is EIGHT_BITS else (Single, DDP, FSDP)
    if isinstance(strategy, trains):
        check_construction(recipe(make), strategy)
        return
    with pytest.raises(
        ConfigError, match=rf"is not supported with {type(strategy).__name__}: .*\. Set strategy=single"
    ):
        check_construction(recipe(make), strategy)


def test_what_contradicts_a_schedule_free_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not support a learning-rate schedule\. Set schedule=constant"):
        check_construction(recipe(FREE, make_schedule=partial(warmup_cosine, steps=9)), Single())
    with pytest.raises(ConfigError, match=r"already averages weights\. Remove ema\.decay"):
        check_construction(recipe(FREE), Single(), averages=True)
    with pytest.raises(ConfigError, match=r"running statistics of 1 \(BatchNorm1d\)"):
        check_construction(Normed(), Single())
