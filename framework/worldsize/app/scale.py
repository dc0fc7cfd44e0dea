"""``worldsize scale [OPTION ...] world_sizes=1,2,4,8``: how a step's time falls as processes are added, measured.

Each point is a separate run, started as by train, next to the prediction of plan.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from worldsize.app import exit_process
from worldsize.app.train import train
from worldsize.config.compose import choices, compose_and_call
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.messages import refuse
from worldsize.planning.advice import time_text
from worldsize.planning.scaling import PHASES, Point, efficiencies, knees, read_timed
from worldsize.records.redaction import redacted_arguments

if TYPE_CHECKING:
    from worldsize.config.settings import Settings
    from worldsize.planning.predictor import Predictor

_LENGTH = ("steps=50", "epochs=null")  # unless another one is typed
_QUIET = ("log_every=1", "evaluate_every=0", "checkpoint=none", "logger=none")
_FEWEST = 5  # steps
_LISTS = ("world_sizes", "strategies", "accumulations")


@dataclass(frozen=True)
class Planned:
    """A point before it is measured: ``words`` of its command line, and ``predicted`` seconds per step."""

    strategy: str
    world_size: int
    accumulation: int
    words: tuple[str, ...]
    settings: Settings
    recipe: str
    predicted: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize scale", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", help="as of train, and world_sizes=, strategies=, accumulations=: lists"
    )
    parser.add_argument(
        "--mode", choices=("strong", "weak"), default="strong", help="the batch is global, or a process's"
    )
    parser.add_argument("--links", type=Path, metavar="FILE", help="measured by worldsize doctor --json FILE")
    options = parser.parse_intermixed_args()
    try:
        code = scale(options.overrides, mode=options.mode, links=options.links)
    except WorldsizeError as error:
        code = refuse(error)
    exit_process(code)


def scale(overrides: Sequence[str], *, mode: str, links: Path | None) -> int:
    """Measure every point and print the table; return 0, or the exit code of the first run that failed.

    Raises:
        WorldsizeError: a point cannot run; nothing was started.
    """
    import torch  # takes seconds, as what follows

    from worldsize.planning.predictor import Given, Predictor, links_of
    from worldsize.records.run_directory import planned

    torch.set_num_threads(1)  # this process forks: it must not have an OpenMP pool
    command = shlex.join(["worldsize", "scale", *redacted_arguments(sys.argv[1:])])
    predictor = Predictor(Given(links=links_of(links) if links else {}))
    points = planned_points(overrides, mode, predictor)
    first = points[0]
    folder = planned(first.settings.run.root, "scaling", None).path
    study = {"schema": 1, "recipe": first.recipe, "mode": mode, "command": command}
    study["cluster"] = {**asdict(predictor.cluster(first.settings)), "processes": None}
    done: list[Point] = []
    for number, point in enumerate(points, 1):
        print(f"{number}/{len(points)}: {point.strategy}, world size {point.world_size}", file=sys.stderr, flush=True)
        run = folder / point.recipe / f"{point.strategy}_{point.world_size}_{point.accumulation}"
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            code = train([*point.words, f"run.root={folder}", f"run.name={run.name}"])
        if code:
            break
        done.append(_measured(point, run))
        (folder / "scaling.json").write_text(json.dumps({**study, **_outcome(done)}, indent=2) + "\n")
    if done:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table(done, title=f"{first.recipe}, {mode} scaling"))
        console.print(f"{folder / 'scaling.json'}", highlight=False, markup=False, soft_wrap=True)
    return code


# ---------------------------------------------------------------- the points to measure


def planned_points(overrides: Sequence[str], mode: str, predictor: Predictor) -> list[Planned]:
    """Check and predict every point of a scaling study, before any of them is measured."""
    lists = {name: _list(overrides, name) for name in _LISTS}
    if not lists["world_sizes"]:
        raise ConfigError("no world sizes. Give some, e.g. world_sizes=1,2,4.")
    given = [word for word in overrides if word.partition("=")[0] not in _LISTS]
    has_epochs = any(word.startswith("epochs=") and word != "epochs=null" for word in given)
    words = [*(_QUIET if has_epochs else (*_LENGTH, *_QUIET)), *given]
    others = [word for word in words if not word.startswith(("strategy=", "+strategy="))]
    named = {name: [*others, f"strategy={name}"] for name in lists["strategies"]} or {"": words}
    sizes, counts = (sorted(map(_number, lists[name])) for name in ("world_sizes", "accumulations"))
    points = product(named.values(), sizes, counts or [1])
    return [
        _point([*words, f"cluster.processes={size}"], size, count, mode, predictor) for words, size, count in points
    ]


def _point(words: Sequence[str], size: int, accumulation: int, mode: str, predictor: Predictor) -> Planned:
    places = []

    def task(cfg: DictConfig) -> None:
        from worldsize.config.composed import has_own_batches, settings_of
        from worldsize.core import BatchLauncher

        own_batches = has_own_batches(cfg)
        if mode == "weak" and not own_batches:
            cfg.batch_size *= size
        settings = settings_of(cfg)
        if accumulation > 1:
            cfg.logical_ranks = accumulation * settings.logical_ranks
            cfg.batch_size = None if own_batches else cfg.batch_size
            settings = settings_of(cfg)
        if isinstance(settings.launcher, BatchLauncher) and not settings.launcher.wait:
            raise ConfigError(
                f"{type(settings.launcher).__name__} submits runs and does not wait for them. Set launcher.wait=true, "
                "where there is such an option, or run scale inside the job; nothing was started."
            )
        if settings.training.steps < _FEWEST:
            raise ConfigError(
                f"steps={settings.training.steps} are too few to tell their spread. Set {_FEWEST} or more."
            )
        batch = "null" if own_batches else settings.training.batch_size
        shape = (f"batch_size={batch}", f"logical_ranks={settings.logical_ranks}")
        place = Planned(choices()["strategy"], size, accumulation, (*words, *shape), settings, choices()["recipe"])
        places.append(replace(place, predicted=_predicted(predictor, settings)))

    compose_and_call(task, words)
    return places[0]


def _predicted(predictor: Predictor, settings: Settings) -> float | None:
    try:
        return predictor.forecast(settings).step_seconds
    except ConfigError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


def _list(overrides: Sequence[str], name: str) -> list[str]:
    values = [word.partition("=")[2] for word in overrides if word.startswith(f"{name}=")]
    return values[-1].strip("[]").split(",") if values else []


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{text!r} is not a number of processes or micro-batches. Write e.g. world_sizes=1,2,4.")
    return int(text)


# ---------------------------------------------------------------- the results


def _measured(point: Planned, run: Path) -> Point:
    batch_size = point.settings.training.batch_size
    timed = read_timed(run, batch_size)
    return Point(
        strategy=point.strategy,
        world_size=point.world_size,
        accumulation=point.accumulation,
        step_seconds=timed.step_seconds,
        spread_seconds=timed.spread_seconds,
        phases=timed.phases,
        samples_per_second=batch_size / timed.step_seconds,
        predicted_seconds=point.predicted,
        run=str(run),
    )


def _outcome(points: Sequence[Point]) -> dict[str, Any]:
    rows = [{**asdict(point), "efficiency": share} for point, share in zip(points, efficiencies(points), strict=True)]
    return {"points": rows, "knee": knees(points)}


def table(points: Sequence[Point], *, title: str) -> Table:
    """Build the table of points; the knee of each strategy is marked."""
    knee = knees(points)
    drawn = Table("strategy", "processes", "micro-batches", "step", "spread", *PHASES, title=title)
    for column in ("samples/s", "efficiency", "predicted", "error"):
        drawn.add_column(column)
    for point, share in zip(points, efficiencies(points), strict=True):
        bends = point.world_size == knee[point.strategy]
        cells = [point.strategy, f"{point.world_size}{' (knee)' if bends else ''}", str(point.accumulation)]
        cells += [time_text(point.step_seconds), f"± {time_text(point.spread_seconds / 2)}"]
        cells += [time_text(point.phases[phase]) if phase in point.phases else "" for phase in PHASES]
        cells += [f"{point.samples_per_second:,.0f}", f"{share:.0%}"]
        if point.predicted_seconds is not None:
            cells += [time_text(point.predicted_seconds), f"{point.error:+.0%}"]
        drawn.add_row(*cells, style="bold" if bends else None)
    return drawn
