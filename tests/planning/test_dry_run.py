"""What a strategy computes when nobody else is there."""

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
from worldsize.config.settings import Settings
from worldsize.core import Replica, RunContext, World
from worldsize.data.loader import micro_batches
from worldsize.driver.execute import settings_of
from worldsize.planning.dry_run import silent_world, slowdown
from worldsize.strategies.synchronous import alone

CPU, RANKS = torch.device("cpu"), 4
SHAPE = ("cluster.nodes=2", f"cluster.processes={RANKS}", "cluster.threads=1", "optimizer=sgd", "clip_norm=null")


def elsewhere(work: Callable[[Settings], Any], *options: str) -> Any:
    """In a process whose groups and threads are its own."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(_composed, work, options).result()


def _composed(work: Callable[[Settings], Any], options: tuple[str, ...]) -> Any:
    found = []

    def task(cfg: DictConfig) -> None:
        found.append(work(settings_of(cfg)))

    compose_and_call(task, ["recipe=digits", *SHAPE, *options])
    return found[0]


def _steps(settings: Settings) -> tuple[list[Tensor], list[Tensor]]:
    """By how much one step changes each parameter: of one process alone, and of DDP's first rank."""
    recipe = settings.recipe
    with silent_world(settings.cluster, CPU) as world:
        data = next(micro_batches(recipe.data("train"), settings.order(0, world.size), CPU))
        torch.manual_seed(0)
        single = alone(recipe, recipe.model(), RunContext(World.alone(CPU)))
        torch.manual_seed(0)
        first = settings.strategy.replica(recipe, RunContext(world))
        return _changed(single, data), _changed(first, data)


def _changed(replica: Replica, data: Any) -> list[Tensor]:
    before = [value.clone() for value in replica.state()["model"].values()]
    replica.step(data)
    return [new - old for new, old in zip(replica.state()["model"].values(), before, strict=True)]


@pytest.mark.parametrize("width", [32, 128])  # gathered in one round; all-reduced
def test_a_rank_whose_peers_have_the_same_takes_the_step_of_one_process(width: int) -> None:
    single, first = elsewhere(_steps, "strategy=ddp", "recipe=stdlib_lm", "recipe.depth=1", f"recipe.width={width}")
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
    ],
    ids=" ".join,
)
def test_a_strategy_is_tried_without_others(options: tuple[str, ...]) -> None:
    assert elsewhere(_slowdown, *options) > 0


def test_pipelines_cannot_be_tried() -> None:
    with pytest.raises(RuntimeError, match="No backend"):
        elsewhere(
            _slowdown, "strategy=mesh", "strategy.pipeline=2", "recipe=stdlib_lm", "recipe.depth=2", "recipe.width=32"
        )
