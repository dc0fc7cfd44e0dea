"""A LightningModule under manual optimization trains as under Lightning."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plugins.lightning_module.positions import RunValues
from plugins.lightning_module.program import LightningProgram
from plugins.lightning_module.recipe import lightning_recipe
from tests.plugins.lightning_gans import BATCH, DCGAN, Images, Pairs, PlainGAN, ToggledGAN
from tests.plugins.lightning_reference import Losses, fitted
from worldsize.core import EvaluationBatches, Recipe, RunContext, World
from worldsize.data.loader import evaluation_batches
from worldsize.seeds import derive_seed, seed_generators
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.single import Single
from worldsize.strategies.synchronous import create_local_replica
from worldsize.strategies.zero import ZeRO
from worldsize.testing import PortConfig, same_losses
from worldsize.testing.port import train_in_processes
from worldsize.testing.port_runs import initial_model, load_steps, recipe_trained, reference_trained
from worldsize.testing.worlds import run_in_worlds

ALONE = World.create_single(torch.device("cpu"))
STEPS = 24
CONFIG = PortConfig(batch_size=BATCH, steps=STEPS)


def recipe(module: Any, datamodule: Any = Images) -> Recipe:
    run = RunValues(steps=STEPS, batch_size=BATCH, evaluate_batch_size=32, seed=0)
    return lightning_recipe(LightningProgram(module, datamodule, run))


@pytest.mark.heavy
@pytest.mark.parametrize("module", [DCGAN, ToggledGAN])
def test_a_gan_trains_as_under_lightning(module: Any) -> None:
    """Including noise, dropout, BatchNorm's statistics, schedules, conditional steps and accumulated losses."""
    same_losses(recipe(module), fitted(module, steps=STEPS), CONFIG)


def whole_batches(model: nn.Module, batches: Iterator[Any]) -> Losses:
    """Let Lightning train on two micro-batches at once."""
    pairs = (tuple(map(torch.cat, zip(one, next(batches), strict=True))) for one in batches)
    return fitted(PlainGAN, steps=STEPS)(model, pairs)


@pytest.mark.parametrize(("strategy", "processes"), [(Single(), 1), (DDP(), 2)], ids=["single", "ddp"])
def test_weights_under_a_strategy_are_those_of_lightning(strategy: Any, processes: int) -> None:
    config = PortConfig(batch_size=BATCH, steps=STEPS, micro_batches=processes)
    reference = fitted(PlainGAN, steps=STEPS) if processes == 1 else whole_batches
    own = recipe(PlainGAN, Pairs)
    expected = reference_trained(own, reference, config).weights
    trained = train_in_processes(own, config, strategy, processes)
    assert trained.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(trained.weights[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("strategy", [FSDP(), ZeRO(), DDP()], ids=str)
def test_every_step_of_two_processes_is_that_of_one(strategy: Any) -> None:
    own, config = recipe(DCGAN), PortConfig(batch_size=BATCH, micro_batches=2, steps=8)
    expected = recipe_trained(own, config)
    trained = train_in_processes(own, config, strategy, 2)
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(trained.weights[name], tensor, rtol=1e-4, atol=1e-5)


def test_ordered_sums_have_the_same_bits_on_one_process_and_on_two() -> None:
    own, config = recipe(DCGAN), PortConfig(batch_size=BATCH, micro_batches=2, steps=8)

    def alone_in_a_process(world: World) -> dict[str, Tensor]:
        seed_generators(derive_seed(config.seed, "init"), world.device)
        replica = DDP(reduce="ordered").replica(own, RunContext(world, logical_ranks=2))
        for step in load_steps(own, config):
            replica.step(step)
        return dict(replica.state()["model"])

    two = train_in_processes(own, config, DDP(reduce="ordered"), 2)
    (one,) = run_in_worlds(alone_in_a_process, 1)
    assert [name for name, tensor in one.items() if not torch.equal(tensor, two.weights[name])] == []


def test_a_gan_goes_on_where_it_was_saved() -> None:
    """This includes its schedules: it advances them itself within steps and at the ends of epochs."""
    own = recipe(DCGAN)
    config = PortConfig(batch_size=BATCH, micro_batches=2, steps=9)
    whole, second = (
        create_local_replica(own, initial_model(own, config), RunContext(ALONE, logical_ranks=2)) for _ in range(2)
    )
    for number, step in enumerate(load_steps(own, config), 1):
        result = whole.step(step)
        if number == 5:
            saved = {name: torch.utils._pytree.tree_map(_copied, part) for name, part in whole.state().items()}
            second.load(saved)
        elif number > 5:
            assert torch.equal(torch.stack([*second.step(step).losses]), torch.stack([*result.losses]))
    for name, tensor in whole.state()["model"].items():
        assert torch.equal(second.state()["model"][name], tensor)
    rates = [group["lr"] for group in whole.state()["optimizer"]["param_groups"]]
    assert rates == pytest.approx([0.002 * 0.9**2, 0.002 * 0.9**5])  # two epochs; batches 0 and 3 of these, and 0


def test_schedules_come_in_the_order_of_configure_optimizers_as_under_lightning() -> None:
    """Their order may differ from the optimizers'."""
    schedules = torch.optim.lr_scheduler

    class Reversed(PlainGAN):
        def configure_optimizers(self) -> Any:
            generator, critic = PlainGAN.configure_optimizers(self)
            return [generator, critic], [schedules.StepLR(critic, 1, 0.5), schedules.StepLR(generator, 1, 0.9)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.lr_schedulers()[0].step()  # type: ignore[index]
            rates.append([each.param_groups[0]["lr"] for each in self.optimizers()])  # type: ignore[union-attr]

    rates: list[list[float]] = []
    own, config = recipe(Reversed, Pairs), PortConfig(batch_size=BATCH, steps=4)
    reference_trained(own, fitted(Reversed, steps=4), config)
    expected, rates = rates, []
    recipe_trained(own, config)
    assert expected[-1] == pytest.approx([0.05, 0.05 * 0.5**4])
    assert rates == expected


def test_no_batch_outlives_its_step() -> None:
    """A step leaves no reference cycles, so that batches are freed without garbage collection."""
    own = recipe(PlainGAN, Pairs)
    replica = create_local_replica(own, initial_model(own, CONFIG), RunContext(ALONE))
    steps, batches = load_steps(own, CONFIG), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            step = next(steps)
            batches.append(weakref.ref(step[0].data[0]))
            replica.step(step)
            del step
        next(steps)
        assert [each() for each in batches] == [None] * 3
    finally:
        gc.enable()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_what_a_training_step_logs_and_its_losses_are_metrics_of_the_step() -> None:
    own = recipe(PlainGAN, Pairs)
    replica = create_local_replica(own, initial_model(own, CONFIG), RunContext(ALONE))
    result = replica.step(next(load_steps(own, CONFIG)))
    assert sorted(result.metrics) == ["distance", "loss/critic", "loss/generator", "lr/critic"]
    ((total, count),) = result.metrics["distance"].tolist()
    ((loss, updates),) = result.metrics["loss/generator"].tolist()
    assert count == BATCH
    assert updates == 1
    assert total / count == pytest.approx(loss)
    assert result.metrics["loss/critic"][0, 1] == 2


def evaluated_alone(world: World) -> dict[str, float]:
    own = recipe(PlainGAN, Pairs)
    model = own.model()
    replica = (Single() if world.size == 1 else DDP()).replica(own, RunContext(world, logical_ranks=world.size))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = list(evaluation_batches(own.data("test"), world, batch_size=8))
    assert batches
    metrics = replica.evaluate(EvaluationBatches(lambda: iter(batches)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return dict(metrics)


@pytest.mark.parametrize("processes", [1, 2])
def test_without_a_validation_step_nothing_is_evaluated_as_under_lightning(processes: int) -> None:
    assert run_in_worlds(evaluated_alone, processes) == [{}] * processes


def test_an_evaluation_draws_the_same_noise_each_time() -> None:
    """A world of a different size has drawn different numbers before; training then draws as if not interrupted."""

    class Noisy(PlainGAN):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("noise", torch.randn(()))

    class Validated(Pairs):
        def val_dataloader(self) -> Any:
            return DataLoader(self.dataset, batch_size=32)

    own = recipe(Noisy, Validated)
    replica = create_local_replica(own, initial_model(own, CONFIG), RunContext(ALONE))
    batches = list(evaluation_batches(own.data("test"), ALONE, batch_size=32))
    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        values.append(replica.evaluate(EvaluationBatches(lambda: iter(batches))))
        assert torch.equal(torch.get_rng_state(), before)
    assert values[0].keys() == {"noise"}
    assert values[0] == values[1]
