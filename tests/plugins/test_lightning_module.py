"""A LightningModule trains under worldsize as under Lightning, or is refused in a sentence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from plugins.lightning_module.building import no_datamodule
from plugins.lightning_module.positions import Positions, RunValues
from plugins.lightning_module.program import LightningProgram
from plugins.lightning_module.recipe import lightning_recipe
from tests.plugins.lightning_programs import BATCH, SAMPLES, VAE, Classifier, Points, points
from tests.plugins.lightning_reference import fitted, trainer, validated
from worldsize.checkpoint.weights import open_weights
from worldsize.core import ConfigError, EvaluationBatches, Recipe, RunContext, World
from worldsize.data.loader import evaluation_batches, micro_batches
from worldsize.data.order import Order
from worldsize.seeds import derive_seed, seed_generators
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.synchronous import create_local_replica
from worldsize.strategies.zero import ZeRO
from worldsize.testing import PortConfig, compose_recipe, same_losses
from worldsize.testing.port import train_in_processes
from worldsize.testing.port_runs import initial_model, load_steps, recipe_trained
from worldsize.testing.worlds import run_in_worlds

ALONE = World.create_single(torch.device("cpu"))
CONFIG = PortConfig(batch_size=BATCH)
PROGRAMS = "tests.plugins.lightning_programs"


def program(
    module: Any, datamodule: Any = Points, *, batch_size: int = BATCH, steps: int = 20, **options: Any
) -> LightningProgram:
    run = RunValues(steps=steps, batch_size=batch_size, evaluate_batch_size=32, seed=0)
    return LightningProgram(module, datamodule, run, **options)


def recipe(module: Any, datamodule: Any = Points, **options: Any) -> Recipe:
    return lightning_recipe(program(module, datamodule, **options))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"interval": "step", "frequency": 3}, {"frequency": 2}],
    ids=["each epoch", "each third step", "each second epoch"],
)
def test_a_classifier_with_a_schedule_trains_as_under_lightning(arguments: dict[str, Any]) -> None:
    """Dropout draws the same numbers, and learning rates change after the same steps."""
    same_losses(recipe(Classifier, module_args=arguments), fitted(lambda: Classifier(**arguments)), CONFIG)


def test_an_autoencoder_trains_as_under_lightning() -> None:
    """It calls submodules directly, draws noise, and reads the epoch, the batch, the step and the run's length."""
    same_losses(recipe(VAE), fitted(VAE), CONFIG)


@pytest.mark.parametrize(
    ("strategy", "module"),
    [(DDP(), Classifier), (DDP(find_unused_parameters=True), VAE), (FSDP(), Classifier), (FSDP(), VAE), (ZeRO(), VAE)],
    ids=str,
)
def test_every_step_of_two_processes_is_that_of_one(strategy: Any, module: Any) -> None:
    own, config = recipe(module), PortConfig(batch_size=BATCH, micro_batches=2)
    expected = recipe_trained(own, config)
    trained = train_in_processes(own, config, strategy, 2)
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    assert trained.weights.keys() == expected.weights.keys() == module().state_dict().keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(trained.weights[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [Classifier, VAE])
def test_ordered_sums_have_the_same_bits_on_one_process_and_on_two(module: Any) -> None:
    own, config = recipe(module), PortConfig(batch_size=BATCH, micro_batches=2)

    def alone_in_a_process(world: World) -> dict[str, Tensor]:
        seed_generators(derive_seed(config.seed, "init"), world.device)
        replica = DDP(reduce="ordered").replica(own, RunContext(world, logical_ranks=2))
        for step in load_steps(own, config):
            replica.step(step)
        return dict(replica.state()["model"])

    two = train_in_processes(own, config, DDP(reduce="ordered"), 2)
    (one,) = run_in_worlds(alone_in_a_process, 1)
    assert [name for name, tensor in one.items() if not torch.equal(tensor, two.weights[name])] == []


def test_what_validation_logs_is_weighed_by_samples_as_lightning_does() -> None:
    own = recipe(Classifier)
    model = initial_model(own, CONFIG)
    batches = evaluation_batches(own.data("test"), ALONE, batch_size=32)
    replica = create_local_replica(own, model, RunContext(ALONE))
    found = replica.evaluate(EvaluationBatches(lambda: batches))
    module = Classifier()
    module.load_state_dict(model.state_dict())
    expected = validated(module, DataLoader(points(), batch_size=40))
    assert dict(found) == pytest.approx(expected, abs=1e-6)


def test_what_training_logs_comes_with_the_loss() -> None:
    own = recipe(Classifier)
    replica = create_local_replica(own, initial_model(own, CONFIG), RunContext(ALONE))
    batches = micro_batches(own.data("train"), Order(0, BATCH, 1, (0,)), ALONE.device)
    (pair,) = replica.step(next(batches)).metrics["train_accuracy"].tolist()
    assert pair[1] == BATCH
    assert pair[0] == int(pair[0])


def test_a_schedule_goes_on_where_it_was_saved() -> None:
    own = recipe(Classifier)
    whole, first, second = (create_local_replica(own, initial_model(own, CONFIG), RunContext(ALONE)) for _ in range(3))
    for replica, begin, steps in ((whole, 0, 9), (first, 0, 6)):
        batches = micro_batches(own.data("train"), Order(0, BATCH, 1, (0,)), ALONE.device, first=begin)
        for _ in range(steps):
            replica.step(next(batches))
    second.load(first.state())
    batches = micro_batches(own.data("train"), Order(0, BATCH, 1, (0,)), ALONE.device, first=6)
    for _ in range(3):
        rate = second.step(next(batches)).lr
    assert rate == 0.01 * 0.25
    for name, tensor in whole.state()["model"].items():
        assert torch.equal(second.state()["model"][name], tensor)


def test_the_command_line_makes_the_recipe() -> None:
    words = (f"recipe.module={PROGRAMS}.Classifier", f"recipe.datamodule={PROGRAMS}.Points", f"batch_size={BATCH}")
    own, config = compose_recipe("recipe=lightning_module", *words, "+recipe.module_args.hidden=5", "epochs=3")
    assert config.batch_size == BATCH
    assert config.steps == 3 * SAMPLES // BATCH
    assert own.model().state_dict()["net.0.weight"].shape == (5, 8)


def test_a_step_has_a_place_in_its_epoch() -> None:
    positions = Positions(samples=10, batch_size=4)  # 0-3, 4-7, 8-1 | 2-5, 6-9 | 0-3
    steps = range(1, 7)
    assert [positions.find_epoch(step) for step in steps] == [0, 0, 0, 1, 1, 2]
    assert [positions.batch_index(step) for step in steps] == [0, 1, 2, 0, 1, 0]
    assert [positions.ends_epoch(step) for step in steps] == [False, False, True, False, True, False]
    assert [positions.count_epochs(step) for step in (1, 2, 3, 5)] == [1, 1, 2, 2]


def test_weights_of_a_checkpoint_of_lightning_can_begin_a_run(tmp_path: Path) -> None:
    module = Classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = trainer(max_epochs=1, limit_val_batches=0)
        fit.fit(module, train_dataloaders=DataLoader(points(), batch_size=BATCH))
    torch.use_deterministic_algorithms(False)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["hidden"] == 16
    assert saved["optimizer_states"]
    weights = open_weights(tmp_path / "last.ckpt")
    assert {name: tuple(entry.shape) for name, entry in weights.entries.items()} == {
        name: tuple(tensor.shape) for name, tensor in recipe(Classifier).model().state_dict().items()
    }
    for name, tensor in module.state_dict().items():
        assert torch.equal(weights.read_tensor(name), tensor)


def changed(**names: Any) -> Any:
    return type("Changed", (Classifier,), names)


def nothing(self: Any, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("on_before_zero_grad", "register_step_post_hook"),
        ("optimizer_step", "the optimizer steps once"),
        ("configure_gradient_clipping", "set clip_norm"),
        ("on_train_epoch_end", "Log values in the step itself"),
        ("on_train_start", "Move it to setup or configure_model"),
        ("configure_callbacks", "see early_stopping"),
        ("on_save_checkpoint", "a module buffer"),
        ("training_epoch_end", "Lightning 2 does not call it"),
        ("state_dict", "parameters and buffers"),
        ("backward", "Return the loss"),
        ("on_validation_start", "Remove it"),
    ],
)
def test_a_hook_that_would_not_be_called_is_refused(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"Changed\.{name} is not called by worldsize. .*{remedy}"):
        recipe(changed(**{name: nothing}))


def test_what_training_never_calls_is_no_reason_to_refuse() -> None:
    recipe(changed(predict_step=nothing, on_predict_end=nothing, teardown=nothing, my_own_method=nothing))


def printing(self: Any) -> None:
    print("not called")


class PrintingPoints(Points):
    """Prints when a batch is moved to the device."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Print, and return the batch."""
        print("not called")
        return batch


def test_hooks_that_the_user_ignores_change_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    loud = changed(on_train_start=printing, on_train_epoch_end=printing, on_validation_epoch_end=printing)
    with pytest.raises(ConfigError) as refused:
        recipe(loud, PrintingPoints, ignore_hooks=["on_train_start"])
    assert "on_train_start is not called" not in str(refused.value)
    names = ["on_train_epoch_end", "on_train_start", "on_validation_epoch_end", "transfer_batch_to_device"]
    assert str(refused.value).endswith(f"set recipe.ignore_hooks=[{','.join(names)}].")
    own = recipe(loud, PrintingPoints, ignore_hooks=names)
    assert recipe_trained(own, CONFIG).losses == recipe_trained(recipe(Classifier), CONFIG).losses
    assert "not called" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("on_train_epoch_ends", "unknown hook 'on_train_epoch_ends'; did you mean 'on_train_epoch_end'"),
        ("state_dict", "unknown hook 'state_dict'"),
        ("training_step", "worldsize calls training_step"),
    ],
)
def test_only_hooks_that_are_not_called_can_be_ignored(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        recipe(Classifier, ignore_hooks=[name])


def test_the_command_line_names_the_hooks_to_ignore() -> None:
    words = (f"recipe.module={PROGRAMS}.Classifier", f"recipe.datamodule={PROGRAMS}.Points", f"batch_size={BATCH}")
    compose_recipe("recipe=lightning_module", *words, "recipe.ignore_hooks=[on_train_start]")
    for value, why in (
        ("[on_start]", "unknown hook 'on_start'"),
        ("on_train_start", "ignore_hooks='on_train_start' has the wrong type"),
    ):
        with pytest.raises(ConfigError, match=why):
            compose_recipe("recipe=lightning_module", *words, f"recipe.ignore_hooks={value}")


def iterator_step(self: Any, dataloader_iter: Any) -> None: ...


def test_every_hook_of_lightning_is_carried_irrelevant_or_refused() -> None:
    """A hook added by a later Lightning is refused until its support is decided."""
    import lightning as L

    hooks = [name for name in dir(L.LightningModule) if name.startswith(("on_", "configure_", "optimizer_"))]
    kept = ("on_predict", "on_gpu", "on_before_batch_transfer", "on_after_batch_transfer")
    wanted = [
        name for name in hooks if not name.startswith(kept) and name not in ("configure_model", "configure_optimizers")
    ]
    for name in wanted:
        with pytest.raises(ConfigError, match=rf"Changed\.{name} is not called"):
            recipe(changed(**{name: nothing}))


def several(self: Any) -> Any:
    return [DataLoader(points(), batch_size=BATCH), DataLoader(points(), batch_size=BATCH)]


def weighted(self: Any) -> Any:
    return DataLoader(points(), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))


def replacing(self: Any) -> Any:
    return DataLoader(points(), batch_size=BATCH, sampler=RandomSampler(points(), replacement=True))


def batched(self: Any) -> Any:
    return DataLoader(points(), batch_sampler=[[0, 1], [2, 3]])


def unshuffled(self: Any) -> Any:
    return DataLoader(points(), batch_size=BATCH)


def seeded_workers(self: Any) -> Any:
    return DataLoader(points(), batch_size=BATCH, shuffle=True, worker_init_fn=print)


def combined(self: Any) -> Any:
    from lightning.pytorch.utilities import CombinedLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, used by Lightning
        return CombinedLoader([DataLoader(points(), batch_size=BATCH)])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (several, "returned several DataLoaders; only one is supported"),
        (combined, "returned several DataLoaders"),
        (weighted, "sampler WeightedRandomSampler is not supported: worldsize shuffles and shards"),
        (replacing, "sampler RandomSampler is not supported: worldsize shuffles and shards"),
        (batched, "has a batch_sampler, but worldsize assigns samples"),
        (unshuffled, "does not shuffle, but worldsize shuffles every epoch"),
        (seeded_workers, "worker_init_fn is not called"),
    ],
)
def test_a_loader_that_deals_samples_itself_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(changed(train_dataloader=loader), no_datamodule)


def test_batches_of_the_run_are_those_of_the_loaders() -> None:
    message = "the DataLoaders have batch_size=24; the run has batch_size=36. Set batch_size=24, or recipe.run_decides"
    with pytest.raises(ConfigError, match=message):
        recipe(Classifier, batch_size=36)
    lightning_recipe(program(Classifier, batch_size=36), run_decides=True)
    recipe(Classifier, batch_size=2 * BATCH)  # as if there had been two devices


def plateau(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def two_optimizers(self: Any) -> Any:
    return [torch.optim.SGD(self.net[0].parameters()), torch.optim.SGD(self.net[3].parameters())]


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (plateau, "ReduceLROnPlateau is not supported"),
        (two_optimizers, "returned 2 optimizers, but automatic optimization supports one"),
        (nothing, "configure_optimizers returned None"),
    ],
)
def test_optimizers_that_do_not_come_along_are_refused(optimizers: Any, message: str) -> None:
    own = recipe(changed(configure_optimizers=optimizers))
    with pytest.raises(ConfigError, match=message):
        own.optimizer(own.model())


def test_facts_of_the_run_that_are_missing_have_a_name() -> None:
    own = recipe(changed(training_step=lambda self, batch: self.trainer.strategy))
    with pytest.raises(ConfigError, match=r"self.trainer.strategy is not supported.* or use one of .*current_epoch"):
        own.loss(own.model(), next(iter(DataLoader(points()))))


def test_a_step_without_a_loss_says_so() -> None:
    own = recipe(changed(training_step=nothing))
    with pytest.raises(ConfigError, match="training_step returned None. Return the loss"):
        own.loss(own.model(), next(iter(DataLoader(points()))))


def test_values_that_are_no_means_are_refused() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("most", batch[0].max(), reduce_fx="max")

    own = recipe(changed(validation_step=step))
    with pytest.raises(ConfigError, match="metrics are averaged"):
        own.evaluate(own.model(), next(iter(DataLoader(points()))))


def test_arguments_are_those_of_the_class() -> None:
    with pytest.raises(ConfigError, match="unknown key 'recipe.module_args.hiden'; did you mean 'hidden'"):
        recipe(Classifier, module_args={"hiden": 3})
    with pytest.raises(ConfigError, match="recipe.module: Linear is not a LightningModule"):
        recipe(nn.Linear, module_args={"in_features": 1, "out_features": 1})
    with pytest.raises(
        ConfigError, match="does not have a train_dataloader. Define train_dataloader, or set recipe.datamodule"
    ):
        recipe(Classifier, no_datamodule)
