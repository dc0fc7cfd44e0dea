"""Settings of runs to be rehearsed, in a process of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from omegaconf import DictConfig

from worldsize.config.compose import compose_and_call
from worldsize.driver.execute import settings_of


def isolated(work: Callable[..., Any], *options: str, given: tuple[Any, ...] = ()) -> Any:
    """Call ``work(settings, *given)`` with the settings of ``options``, in a process of its own."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(_composed, work, options, given).result()


def _composed(work: Callable[..., Any], options: tuple[str, ...], given: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    results: list[Any] = []

    def task(cfg: DictConfig) -> None:
        results.append(work(settings_of(cfg), *given))

    compose_and_call(task, ["logger=none", "cluster.threads=1", *options])
    return results[0]
