"""An optimizer's state describes itself: before its first step, it records only that it is new."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, Rprop

from worldsize.core import ONE_UPDATE
from worldsize.optimizers.muon import muon
from worldsize.strategies.reducers import _split_buckets
from worldsize.strategies.sharded_state import meta_states
from worldsize.strategies.train_state import OptimizerPart, TrainState, load_weights
from worldsize.testing.recipes import Chain

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": lambda model: Adam(model.parameters(), lr=0.1, weight_decay=0.1),
    "Adam, amsgrad": lambda model: Adam(model.parameters(), lr=0.1, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, weight_decay=0.1),
    "SGD, momentum": lambda model: SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9),
    "SGD, dampening": lambda model: SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9, dampening=0.3),
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda model: Adagrad(model.parameters(), lr=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
    "NAdam": lambda model: NAdam(model.parameters(), lr=0.1, weight_decay=0.1),
    "Rprop": lambda model: Rprop(model.parameters(), lr=0.1),
    "AdamW, fused": lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True),
    "Muon": lambda model: muon(model.parameters(), lr=0.1),
    "ASGD": lambda model: ASGD(model.parameters(), lr=0.1, weight_decay=0.1),
}


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def take_steps(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_a_loaded_optimizer_trains_as_one_that_never_was_saved(
    make: Callable[[nn.Module], Optimizer], before: int
) -> None:
    """Compare all bits with plain PyTorch, also for an optimizer saved before its first step."""
    plain, saved, loaded = model(), model(), model()
    optimizer = make(plain)
    take_steps(plain, optimizer, before)
    first, then = (TrainState(each, {ONE_UPDATE: OptimizerPart(each, make(each))}) for each in (saved, loaded))
    take_steps(saved, first.optimizer, before)
    state = copy.deepcopy(first.state())
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(2)
    then.load(state)
    for own, part in ((plain, optimizer), (saved, first.optimizer), (loaded, then.optimizer)):
        take_steps(own, part, 3)
    assert same(saved, plain)
    assert same(loaded, plain)


class Growing(nn.Module):
    """Omits a part of itself until it ``grows``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.late, self.grows = model(), nn.Linear(3, 1), False

    def forward(self, inputs: Tensor) -> Tensor:
        return cast("Tensor", self.inner(inputs) + self.late(inputs) if self.grows else self.inner(inputs))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"SGD, dampening"}))  # its first step is unlike the others
def test_a_parameter_that_has_had_no_gradient_is_saved_and_loaded_like_others(name: str) -> None:
    plain, saved, loaded = Growing(), Growing(), Growing()
    optimizers = [OPTIMIZERS[name](each) for each in (plain, saved, loaded)]
    states = [
        TrainState(each, {ONE_UPDATE: OptimizerPart(each, own)})
        for each, own in zip((plain, saved, loaded), optimizers, strict=True)
    ]
    fresh = states[2].state()["optimizer"]
    for place in (0, 1):
        take_steps((plain, saved)[place], optimizers[place], 2)
    gradients = [each.grad for each in saved.parameters()]
    state = copy.deepcopy(states[1].state())
    assert state["optimizer"]["state"].keys() == fresh["state"].keys()
    if name != "SGD":  # it never has any state
        assert [each.grad for each in saved.parameters()] == gradients
    states[2].load(state)
    for each, own in zip((plain, saved, loaded), optimizers, strict=True):
        each.grows = True
        take_steps(each, own, 2)
    assert same(plain, saved)
    assert same(plain, loaded)


def test_the_state_of_an_optimizer_that_has_not_stepped_keeps_its_options_and_has_moments_of_zero() -> None:
    own = model()
    state = OptimizerPart(own, OPTIMIZERS["Adam"](own)).state()
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1]
    moments = [values[name] for values in state["state"].values() for name in ("step", "exp_avg", "exp_avg_sq")]
    assert len(moments) == 3 * 4
    assert all(int(torch.count_nonzero(moment)) == 0 for moment in moments)


def test_weights_are_loaded_but_for_those_that_were_filled_in_place() -> None:
    own = model()
    weights = own.state_dict()
    weights["0.bias"] = torch.ones(4)
    before = {name: parameter._version for name, parameter in own.named_parameters()}
    load_weights(own, weights)
    assert own.state_dict()["0.bias"].tolist() == [1.0] * 4
    assert {name for name, parameter in own.named_parameters() if parameter._version > before[name]} == {"0.bias"}
    del weights["0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight"'):
        load_weights(own, weights)


def test_weights_are_loaded_beside_sparse_buffers_which_have_no_address() -> None:
    own, other = model(), model()
    for each, value in (own, 1.0), (other, 2.0):
        each.register_buffer("adjacency", torch.eye(2).mul(value).to_sparse())
    load_weights(own, other.state_dict())
    assert own.state_dict()["adjacency"].to_dense().tolist() == [[2.0, 0.0], [0.0, 2.0]]


class _Fused(Chain):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize("fused", [True, False])
def test_the_state_of_a_whole_model_is_described_without_its_memory(*, fused: bool) -> None:
    """Fused optimizers refuse the meta device, where the description is made."""
    recipe = _Fused() if fused else Chain()
    own = recipe.model()
    described = meta_states(recipe, own)[ONE_UPDATE]["state"]
    state = TrainState.from_recipe(recipe, own).state()["optimizer"]["state"]
    assert {name: {key: value.shape for key, value in each.items()} for name, each in described.items()} == {
        name: {key: value.shape for key, value in each.items()} for name, each in state.items()
    }
    assert all(value.is_meta and type(value) is Tensor for each in described.values() for value in each.values())


@pytest.mark.parametrize("name", ["Adam", "SGD"])
@pytest.mark.parametrize("before", [0, 2])
def test_hooks_of_an_optimizer_run_in_its_steps_alone(name: str, before: int) -> None:
    """Neither saving nor loading is a step; both leave the hooks unchanged."""
    calls: list[str] = []
    own = model()
    optimizer = OPTIMIZERS[name](own)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    take_steps(own, optimizer, before)
    calls.clear()
    state = TrainState(own, {ONE_UPDATE: OptimizerPart(own, optimizer)})
    state.load(copy.deepcopy(state.state()))
    assert calls == []
    take_steps(own, optimizer, 1)
    assert calls == ["before", "after"]
    handle.remove()
    take_steps(own, optimizer, 1)
    assert calls == ["before", "after", "before"]


class Sized(Tensor):
    """A tensor that counts reads of its size."""

    reads = 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        Sized.reads += 1
        return super().nbytes


def test_buckets_of_many_tensors_are_cut_in_time_that_grows_with_their_number() -> None:
    tensors = [torch.empty(1).as_subclass(Sized) for _ in range(4000)]
    assert [len(each) for each in _split_buckets(tensors, 4 * 1000)] == [1000] * 4
    assert Sized.reads < 3 * 4000  # a sum over the bucket for each tensor would read 500 times as often
