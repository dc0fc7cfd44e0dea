"""One process of a run: run folder → World → training. ``python -m worldsize.worker RUN_DIR``."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from worldsize.config.places import make_importable
from worldsize.config.settings import Settings, load_settings
from worldsize.core import (
    Evaluated,
    Event,
    Listener,
    Replica,
    RunEnded,
    RunFailed,
    RunStarted,
    StateDict,
    StepDone,
    World,
)
from worldsize.engine.data import micro_batches
from worldsize.engine.evaluate import evaluate
from worldsize.engine.fit import fit
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.observe.aside import Aside
from worldsize.observe.jsonl import JsonLines, metrics_digest
from worldsize.observe.timing import Timing
from worldsize.reproducibility.digest import state_digest, tensor_digests
from worldsize.reproducibility.manifest import read_manifest
from worldsize.reproducibility.redact import missing, restore
from worldsize.reproducibility.seeds import seed_generators, stream
from worldsize.run_directory import RunDirectory
from worldsize.world.environments import Placement, from_torchrun, withheld_secrets
from worldsize.world.world import check_size, open_world, role_of


def main() -> None:
    """Entry of a process that a launcher outside this machine started."""
    play(RunDirectory(Path(sys.argv[1])), from_torchrun(os.environ))


def play(run: RunDirectory, placement: Placement) -> None:
    """Play this process's role until the run ends. What ends it early is also left beside the process's log."""
    settings, listeners = None, list[Listener]()
    try:
        settings = read_settings(run)
        check_size(placement, settings.roles)
        listeners = _listeners(settings, run, *role_of(placement.rank, settings.roles))
        _play(settings, run, placement, listeners)
    except BaseException as error:
        _leave_error(_error_file(run, placement, settings), error)
        for listener in listeners:  # after the error is out: a logger may take its time
            listener(RunFailed(f"{type(error).__name__}: {error}"))
        raise


def _error_file(run: RunDirectory, placement: Placement, settings: Settings | None) -> Path:
    try:
        return run.error(*role_of(placement.rank, settings.roles if settings else {}))
    except StopIteration:  # it is not known which role this process was to play
        return run.error("process", placement.rank)


def read_settings(run: RunDirectory) -> Settings:
    """The run's settings from its ``config.yaml``, which is all that a process is told, secrets apart."""
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(run.config))  # type: ignore[assignment]
    restore(config, withheld_secrets(os.environ))
    if lost := missing(config):
        names = ", ".join(".".join(map(str, keys)) for keys in lost)
        raise ConfigError(f"{names}: the value is in no file of the run. Start it with `worldsize resume` or train.py.")
    make_importable(Path(folder) for folder in config["run"]["import_path"])
    return load_settings(config)


def _leave_error(path: Path, error: BaseException) -> None:
    text = f"{error}\n" if isinstance(error, WorldsizeError) else traceback.format_exc()
    cause = {"time_ns": time.time_ns(), "cause": f"{type(error).__name__}: {error}", "traceback": text}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cause))


def _play(settings: Settings, run: RunDirectory, placement: Placement, listeners: Sequence[Listener]) -> None:
    settings.determinism.apply(settings.cluster.device)
    with open_world(placement, settings.cluster, settings.roles) as world:
        seed_generators(stream(settings.seed, "init"), world.device)
        if world.role == "worker":
            _train(settings, run, world, listeners)
        else:
            settings.strategy.serve(settings.recipe, world)


def _train(settings: Settings, run: RunDirectory, world: World, listeners: Sequence[Listener]) -> None:
    history = _History()

    def emit(event: Event) -> None:
        history(event)
        for listener in listeners:
            listener(event)

    emit(RunStarted(run.id, settings.pace.steps))
    replica = settings.strategy.replica(settings.recipe, world)
    _fit(settings, replica, world, emit)
    model = replica.state()["model"]  # of every rank: sharded state is gathered
    summary = _result(settings, model, run, history) if world.rank == 0 else {}
    if summary:
        run.result.write_text(json.dumps(summary, indent=2) + "\n")
    emit(RunEnded(settings.pace.steps, "completed", summary))
    replica.close()


def _fit(settings: Settings, replica: Replica, world: World, emit: Listener) -> None:
    recipe, order = settings.recipe, settings.order(world.rank, world.size)
    test = recipe.data("test")
    fit(
        replica,
        micro_batches(recipe.data("train"), order, world.device, workers=settings.data_workers),
        world,
        order=order,
        pace=settings.pace,
        evaluate=partial(evaluate, replica, test, world, batch_size=settings.evaluate_batch_size),
        emit=emit,
        stop_on_nonfinite=settings.stops_on_nonfinite,
    )


def _listeners(settings: Settings, run: RunDirectory, role: str, rank: int) -> list[Listener]:
    """Every worker writes its own timing; only rank 0 logs what is global."""
    if role != "worker":
        return []
    own: list[Listener] = [Timing(run.timing(rank), rank=rank)]
    if rank != 0:
        return own
    config = read_manifest(run.manifest)["config"]  # without secrets
    facts = {"run_id": run.id, "folder": run.path, "config": config, "manifest": run.manifest}
    remote = [Aside(partial(settings.logger, **facts, group=settings.group))] if settings.logger else []
    return [*own, JsonLines(run.metrics), *remote]


@dataclass
class _History:
    """A listener that keeps what the result needs."""

    started: float = field(default_factory=time.perf_counter)
    first_step_at: float | None = None  # Unix time
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        match event:
            case StepDone():
                self.first_step_at = self.first_step_at or time.time()
            case Evaluated(metrics=metrics):
                self.metrics = metrics


def _result(settings: Settings, model: StateDict, run: RunDirectory, history: _History) -> dict[str, Any]:
    seconds, tensors = time.perf_counter() - history.started, tensor_digests(model)
    samples = settings.pace.steps * settings.batch_size
    return {
        "state_digest": state_digest(tensors),
        "tensors": tensors,
        "metrics_digest": metrics_digest(run.metrics),
        "metrics": dict(history.metrics),
        "steps": settings.pace.steps,
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "first_step_at": history.first_step_at,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "exit_reason": "completed",
    }


if __name__ == "__main__":
    main()
