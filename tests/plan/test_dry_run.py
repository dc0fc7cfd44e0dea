"""A strategy computes a step in one process, without its peers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from worldsize.config.compose import compose_and_call
from worldsize.config.composed import build_settings
from worldsize.config.settings import Settings
from worldsize.core import ConfigError, Replica, RunContext, World
from worldsize.data.loader import micro_batches
from worldsize.plan.dry_run import slowdown, world_seen_by
from worldsize.strategies.synchronous import create_local_replica

CPU, RANKS = torch.device("cpu"), 4
SHAPE = ("cluster.nodes=2", f"cluster.processes={RANKS}", "cluster.threads=1", "optimizer=sgd", "clip_norm=null")


def isolated(work: Callable[[Settings], Any], *options: str) -> Any:
    """Call ``work`` in a process with separate process groups and threads."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(_composed, work, options).result()


def _composed(work: Callable[[Settings], Any], options: tuple[str, ...]) -> Any:
    results = []

    def task(cfg: DictConfig) -> None:
        results.append(work(build_settings(cfg)))

    compose_and_call(task, ["recipe=digits", *SHAPE, *options])
    return results[0]


def _steps(settings: Settings) -> tuple[list[Tensor], list[Tensor]]:
    """Return each parameter's change in one step: in a single process, and on DDP's first rank."""
    recipe = settings.recipe
    with world_seen_by(0, settings, CPU) as world:
        data = next(micro_batches(recipe.data("train"), settings.create_order(0, world.size), CPU))
        torch.manual_seed(0)
        single = create_local_replica(recipe, recipe.model(), RunContext(World.create_single(CPU)))
        torch.manual_seed(0)
        first = settings.strategy.replica(recipe, RunContext(world))
        return _changed(single, data), _changed(first, data)


def _changed(replica: Replica, data: Any) -> list[Tensor]:
    before = [value.clone() for value in replica.state()["model"].values()]
    replica.step(data)
    return [new - old for new, old in zip(replica.state()["model"].values(), before, strict=True)]


@pytest.mark.parametrize("width", [32, 128])  # small gradients are gathered in one round, large ones all-reduced
def test_a_rank_whose_peers_have_equal_gradients_takes_the_step_of_one_process(width: int) -> None:
    single, first = isolated(_steps, "strategy=ddp", "recipe=stdlib_lm", "recipe.depth=1", f"recipe.width={width}")
    for one, other in zip(single, first, strict=True):
        torch.testing.assert_close(other, one)
    assert max(one.abs().max() for one in single) > 0


def _slowdown(settings: Settings) -> float:
    return slowdown(settings, "cpu", threads=1)


@pytest.mark.parametrize(
    "options",
    [
        ("strategy=ddp", "strategy.reduce=hierarchical", "strategy.compress=int8"),
        ("strategy=zero",),
        ("strategy=fsdp",),
        ("strategy=hsdp",),
        ("strategy=mesh", "strategy.tensor=2", "recipe=stdlib_lm", "recipe.depth=2", "recipe.width=32"),
        ("strategy=fsdp", "strategy.on_failure=heal", "reproducibility=elastic", "cluster.nodes=1"),
    ],
    ids=" ".join,
)
def test_a_strategy_can_be_timed_without_other_ranks(options: tuple[str, ...]) -> None:
    assert isolated(_slowdown, *options) > 0


def test_pipelines_cannot_be_timed_without_other_ranks() -> None:
    with pytest.raises(ConfigError, match="a pipeline stage cannot run without its neighbours"):
        isolated(
            _slowdown, "strategy=mesh", "strategy.pipeline=2", "recipe=stdlib_lm", "recipe.depth=2", "recipe.width=32"
        )
