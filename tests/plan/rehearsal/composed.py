"""Settings of runs to rehearse, in a separate process, and the same runs in real processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from omegaconf import DictConfig

from worldsize.config.compose import compose_and_call
from worldsize.config.composed import build_settings
from worldsize.config.settings import Settings
from worldsize.core import World
from worldsize.plan.rehearsal.calls import CallRecorder
from worldsize.plan.rehearsal.memory import MemoryRecorder, Peak
from worldsize.plan.rehearsal.rank import Recorders, RehearsedPart, load_splits, take_part
from worldsize.testing.worlds import run_in_worlds


def isolated(work: Callable[..., Any], *options: str, given: tuple[Any, ...] = ()) -> Any:
    """Call ``work(settings, *given)`` with the settings of ``options``, in a separate process."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(_composed, work, options, given).result()


def _composed(work: Callable[..., Any], options: tuple[str, ...], given: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    results: list[Any] = []

    def task(cfg: DictConfig) -> None:
        results.append(work(build_settings(cfg), *given))

    compose_and_call(task, ["logger=none", "cluster.threads=1", *options])
    return results[0]


@dataclass(frozen=True)
class Real:
    """The calls of a real process, in order, and its peak memory in each part of the run."""

    calls: list[str]
    building: Peak
    peak: Peak
    evaluation: Peak | None

    @property
    def most(self) -> int:
        return max(each.nbytes for each in (self.building, self.peak, self.evaluation) if each is not None)


def really(settings: Settings, part: RehearsedPart, ranks: int) -> list[Real]:
    """Train in real processes, and evaluate."""
    data = load_splits(settings, part)

    def body(world: World) -> Real:
        calls, memory = CallRecorder(), MemoryRecorder()
        with memory.recording(), calls:
            take_part(settings, world, part, data, Recorders(calls, memory))
        log = memory.log
        return Real(
            [call.described for call in calls.calls],
            log.building_peak(),
            log.compute_training_peak(),
            log.evaluation_peak(),
        )

    return run_in_worlds(body, ranks, local_size=ranks // settings.cluster.nodes)
