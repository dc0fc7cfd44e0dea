"""A recipe that cannot be built in any process is refused; one that only this host cannot build is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from plugins.parameter_server.strategy import ParameterServer
from recipes.digits.recipe import Digits
from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.core import Cluster, ConfigError, Numerics, Recipe, Reduction, Strategy, TensorStyle
from worldsize.plan.construction import check_construction
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.loss_loops import PartlyOptimized
from worldsize.testing.recipes import AveragedChain, Chain

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Digits(-1, 0.1, SGD), "Digits cannot be built: RuntimeError: Trying to create tensor with negative dimension"),
        (Digits(4, 1.5, SGD), r"ValueError: dropout probability has to be between 0 and 1.*recipe.py, line \d+"),
        (Digits(4, 0.1, partial(torch.optim.SGD, lr=0.1, momentum=-1)), "ValueError: Invalid momentum value: -1"),
        (Digits(4, 0.1, partial(torch.optim.AdamW, lr=0.1, betas=(2, 1))), "Invalid beta parameter at index 0: 2"),
        (Digits(4, 0.1, SGD, partial(ConstantLR, factor=7)), "ConstantLR|multiplicative factor"),
    ],
)
def test_arguments_that_nothing_can_be_built_with_are_refused_in_one_line(recipe: Digits, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_construction(recipe, Single())
    assert len(str(refused.value).splitlines()) == 1
    assert "No process was started" in str(refused.value)


@dataclass(frozen=True)
class Made(Chain):
    """Build a model by a function."""

    make: Callable[[], nn.Module] = nn.Identity
    make_optimizer: Callable[..., Optimizer] = SGD

    def model(self) -> nn.Module:
        return self.make()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model.parameters())


@pytest.mark.parametrize("numerics", [Numerics(clip_norm=0.1), Numerics(nonfinite="skip")], ids=["clips", "skips"])
def test_a_norm_that_would_count_what_nothing_resets_is_refused(numerics: Numerics) -> None:
    with pytest.raises(
        ConfigError,
        match=r"(clip_norm|nonfinite=skip) requires all trainable parameters in the optimizer; missing: 0\.weight",
    ):
        check_construction(PartlyOptimized(), Single(), numerics)
    check_construction(PartlyOptimized(), Single())


def from_values() -> nn.Module:
    """Compute with initial values: the meta device lacks them."""
    layer = nn.Linear(2, 2)
    assert float(layer.weight.sum()) != 0.123
    return layer


def raising(error: Exception) -> Callable[..., Any]:
    def raised(*_: object, **__: object) -> Any:
        raise error

    return raised


@pytest.mark.parametrize(
    "recipe",
    [
        Made(make=from_values),
        Made(make=raising(FileNotFoundError("weights.bin"))),
        Made(make=raising(ImportError("no module flash"))),
        Made(make=raising(RuntimeError("no CUDA GPUs are available"))),
        Made(make=partial(nn.Linear, 2, 2), make_optimizer=raising(ValueError("fused needs parameters on a GPU"))),
    ],
)
def test_what_may_work_where_the_processes_run_is_left_to_them(recipe: Recipe) -> None:
    check_construction(recipe, Single())


def test_random_numbers_of_this_process_stay_as_they_were() -> None:
    def drawing() -> nn.Module:
        random.random()
        return nn.Linear(2, int(torch.randint(1, 5, ())))

    before = random.getstate(), torch.get_rng_state()
    check_construction(Made(make=drawing), Single())
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("strategy", [FSDP(), Mesh(tensor=2)], ids=["fsdp", "mesh"])
def test_gradients_that_cannot_be_sharded_are_refused(strategy: Strategy) -> None:
    def rows() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))

    with pytest.raises(ConfigError, match="^sparse gradients cannot be sharded: 0 is an Embedding with sparse=True"):
        check_construction(Made(make=rows), strategy)
    check_construction(Made(make=rows), Single())


def test_the_schedule_is_built_too() -> None:
    def none(optimizer: Optimizer) -> LRScheduler:
        raise ConfigError("schedule.steps is missing.")

    with pytest.raises(ConfigError, match="^schedule.steps is missing.$"):
        check_construction(Digits(4, 0.1, SGD, none), Single())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            AveragedChain(),
            r"a step hook, AveragedChain.optimizer.<locals>.update_average, which is not supported on parameter",
        ),
        (
            Made(make=lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
            r"the running statistics of 1 \(BatchNorm1d\)",
        ),
    ],
    ids=["hook", "statistics"],
)
def test_what_a_strategy_cannot_carry_is_refused_before_the_start(recipe: Recipe, message: str) -> None:
    check_construction(recipe, Single())
    with pytest.raises(ConfigError, match=message):
        check_construction(recipe, ParameterServer())


class Undivided(StdlibLM):
    """Define how layers divide, but divide none."""

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        return {}


@pytest.mark.parametrize(
    ("kind", "strategy", "message"),
    [
        (Undivided, Mesh(tensor=2), r"Define Recipe.tensor_plan, or set strategy.tensor=1"),
        (StdlibLM, Mesh(tensor=3), "features, not divisible by strategy.tensor=3"),
        (StdlibLM, Mesh(pipeline=6), "5 layers, too few for 6 stages"),
        (StdlibLM, Mesh(pipeline=2, split=[5]), "leaves a stage empty"),
    ],
)
def test_a_model_that_does_not_fit_on_a_mesh_is_refused(kind: type[StdlibLM], strategy: Mesh, message: str) -> None:
    recipe = kind(16, 3, 2, 12, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.AdamW, lr=0.003))
    with pytest.raises(ConfigError, match=message):
        check_construction(recipe, strategy)
    check_construction(recipe, Mesh(data=2))


class Insisting(torch.optim.SGD):
    """An optimizer that requires the optional closure, like many implementations of SAM."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Insisting requires closure, but it was not provided"
        return super().step(closure)


class Hasty(torch.optim.SGD):
    """An optimizer that raises its own error without gradients."""

    def step(self, closure: Any = None) -> Any:
        raise ValueError("there is no gradient yet")


@pytest.mark.parametrize("make", [torch.optim.LBFGS, Insisting], ids=["LBFGS", "one that asks for it in its step"])
@pytest.mark.parametrize("strategy", [Single(), ParameterServer()], ids=["single", "parameter server"])
def test_an_optimizer_that_needs_a_closure_is_refused(make: Any, strategy: Strategy) -> None:
    recipe = Digits(4, 0.1, partial(make, lr=0.1))
    with pytest.raises(ConfigError, match=f"{make.__name__} is not supported, because it requires a closure"):
        check_construction(recipe, strategy)


def test_an_optimizer_that_needs_gradients_is_left_to_the_run() -> None:
    check_construction(Digits(4, 0.1, partial(Hasty, lr=0.1)), Single())


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, sparse=True))


@pytest.mark.parametrize("strategy", [DDP, ZeRO])
@pytest.mark.parametrize("reduce", ["ordered", "hierarchical"])
def test_sparse_gradients_are_refused_where_dense_buckets_are_summed(strategy: Any, reduce: Reduction) -> None:
    recipe, laptop = Made(make=embedding), Cluster("laptop", 2, 2, "cpu", "gloo")
    with pytest.raises(
        ConfigError, match=f"strategy.reduce={reduce} does not support sparse gradients: 0 has sparse=True"
    ):
        check_construction(recipe, strategy(reduce=reduce), cluster=laptop)
    check_construction(recipe, strategy(reduce=reduce), cluster=replace(laptop, nodes=1, processes=1))


def test_sparse_gradients_are_refused_where_they_would_be_compressed() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy\.compress=int8 does not support sparse gradients: 0 has sparse=True"
    ):
        check_construction(Made(make=embedding), DDP(compress="int8"))


@pytest.mark.parametrize("strategy", [DDP(), ZeRO()])
def test_sparse_gradients_are_refused_where_nccl_would_sum_them(strategy: Strategy) -> None:
    recipe = Made(make=embedding)
    gpus = Cluster("node", 1, 2, "cuda", "nccl")
    with pytest.raises(
        ConfigError, match=r"NCCL does not support sparse gradients: 0 has sparse=True\. Set sparse=False"
    ):
        check_construction(recipe, strategy, cluster=gpus)
    for cluster in (replace(gpus, backend="gloo"), replace(gpus, processes=1), Cluster("laptop", 1, 2, "cpu", "gloo")):
        check_construction(recipe, strategy, cluster=cluster)
    check_construction(recipe, Single(), cluster=gpus)
