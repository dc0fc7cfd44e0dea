"""Recorded runs and plugins with earlier names of modules still work."""

from __future__ import annotations

import importlib

import pytest

from worldsize import metrics, seeds
from worldsize.collectives import group, step_timer
from worldsize.config.instantiate import Allowed, build_object, find_bundled_targets, resolve_target
from worldsize.core import Strategy
from worldsize.moved import MOVED, find_current_name, rename_targets
from worldsize.record import determinism
from worldsize.strategies.ddp import DDP

TARGETS = (  # from the YAML files before modules moved, except for a few unchanged names
    "worldsize.checkpoints.retention.Retention",
    "worldsize.config.objective.ObjectiveCheck",
    "worldsize.data.mixture.mixture",
    "worldsize.data.sources.arrow.Arrow",
    "worldsize.data.sources.documents.DocumentWindows",
    "worldsize.data.sources.documents.PackedDocuments",
    "worldsize.data.sources.hf_datasets.HfDataset",
    "worldsize.data.sources.images.ImageFolder",
    "worldsize.data.sources.json_lines.JsonLines",
    "worldsize.data.sources.parquet.Parquet",
    "worldsize.data.sources.tokens.TokenWindows",
    "worldsize.data.sources.webdataset.WebDataset",
    "worldsize.data.storage.cache.Cache",
    "worldsize.engine.chained.chained",
    "worldsize.engine.schedules.warmup_cosine",
    "worldsize.engine.schedules.warmup_inverse_sqrt",
    "worldsize.engine.schedules.warmup_linear",
    "worldsize.engine.schedules.warmup_stable_decay",
    "worldsize.launch.autoscale_policies.FileAutoscaler",
    "worldsize.launch.autoscale_policies.ScheduleAutoscaler",
    "worldsize.launch.kubernetes.Kubernetes",
    "worldsize.launch.skypilot.SkyPilot",
    "worldsize.launch.slurm.Slurm",
    "worldsize.launch.ssh.Ssh",
    "worldsize.launch.torchrun.Torchrun",
    "worldsize.observe.wandb.WandbListener",
    "worldsize.optimizers.eight_bit.adamw_8bit",
    "worldsize.optimizers.muon.muon",
    "worldsize.optimizers.schedule_free.adamw_schedule_free",
    "worldsize.reproducibility.determinism.Determinism",
    "worldsize.strategies.parameter_server.hybrid.HybridParameterServer",
    "worldsize.strategies.parameter_server.strategy.ParameterServer",
)


@pytest.mark.parametrize("path", MOVED)
def test_an_earlier_module_is_importable_and_stands_for_one_that_exists(path: str) -> None:
    before, now = importlib.import_module(path), importlib.import_module(MOVED[path])
    own = {name for name, value in vars(now).items() if getattr(value, "__module__", None) == now.__name__}
    for name in own - {"__getattr__"}:
        with pytest.warns(FutureWarning, match=f"{path} has moved. Import {name} from {MOVED[path]}"):
            assert getattr(before, name) is getattr(now, name)


def test_looking_through_the_loaded_modules_warns_of_nothing() -> None:
    before = importlib.import_module("worldsize.engine")
    assert not hasattr(before, "__file__")
    assert not hasattr(before, "__path__")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_a_record_may_name_is_one_of_the_bundled_ones(target: str) -> None:
    assert find_current_name(target) in find_bundled_targets()
    assert callable(resolve_target(find_current_name(target), Allowed(), "key"))


def test_a_name_of_any_length_is_read_and_prefixes_are_renamed_with_their_targets() -> None:
    assert find_current_name("worldsize." + "a." * 10_000) == "worldsize." + "a." * 10_000
    assert Allowed(("worldsize.engine.faults",)).admits_path("worldsize.engine.faults.inject")


def test_targets_of_a_record_are_renamed_at_every_depth() -> None:
    node = {
        "strategy": {"_target_": "worldsize.strategies.parameter_server.strategy.ParameterServer", "servers": 1},
        "parts": [{"_target_": "worldsize.checkpoints.retention.Retention"}, "worldsize.engine"],
        "recipe": {"_target_": "recipes.digits.recipe.Digits"},
    }
    rename_targets(node)
    assert node == {
        "strategy": {"_target_": "plugins.parameter_server.strategy.ParameterServer", "servers": 1},
        "parts": [{"_target_": "worldsize.checkpoint.format.Retention"}, "worldsize.engine"],
        "recipe": {"_target_": "recipes.digits.recipe.Digits"},
    }
    assert find_current_name("worldsize.strategies.ddp.DDP") == "worldsize.strategies.ddp.DDP"


def test_a_configuration_may_name_a_target_as_before() -> None:
    node = {"_target_": "worldsize.strategies.parameter_server.strategy.ParameterServer"}
    strategy = build_object(node, Strategy, allowed=Allowed(), key="strategy")  # type: ignore[type-abstract]
    assert type(strategy).__module__ == "plugins.parameter_server.strategy"


def test_a_strategy_may_declare_by_earlier_names_what_it_supports() -> None:
    with pytest.warns(FutureWarning) as warned:

        class Earlier(Strategy):
            merges_states = False
            compiles = True
            special_optimizers = ("schedule_free",)

    assert Earlier.supports == {"loss_scale", "compile", "schedule_free"}
    assert "Earlier.compiles is deprecated. Use supports = frozenset({'compile', ...})." in [
        str(each.message) for each in warned
    ]


def test_the_earlier_name_of_optimizers_replaces_those_of_the_base() -> None:
    with pytest.warns(FutureWarning):

        class Narrower(DDP):  # type: ignore[misc]
            special_optimizers = ("schedule_free",)

    assert DDP.supports - Narrower.supports == {"adamw_8bit"}


def test_the_metric_of_a_whole_split_has_its_earlier_name_for_a_release() -> None:
    with pytest.warns(FutureWarning, match="Concatenated has been renamed to WholeSplit"):
        assert metrics.Concatenated is metrics.WholeSplit
    assert not hasattr(metrics, "Concatenate")


def test_seeds_have_their_earlier_names_for_a_release() -> None:
    same = ("GeneratorStates", "STREAMS", "seed_generators")
    changed = {"drawn_apart": "draw_from", "generators_kept": "keep_generators", "stream": "derive_seed"}
    for before, now in {**dict(zip(same, same, strict=True)), **changed}.items():
        with pytest.warns(FutureWarning, match=f"{before} has been renamed to worldsize.seeds.{now}"):
            assert getattr(determinism, before) is getattr(seeds, now)
    assert not hasattr(determinism, "streams")


def test_a_plugin_starts_collectives_and_waits_by_earlier_names_for_a_release() -> None:
    with pytest.warns(
        FutureWarning, match=r"step_timer\.started has been renamed to worldsize\.collectives\.group\.Collective"
    ):
        assert step_timer.started is group.Collective
    with pytest.warns(FutureWarning, match=r"step_timer\.wait has been renamed to worldsize\.collectives\.group\.wait"):
        assert step_timer.wait is group.wait
