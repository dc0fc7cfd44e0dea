"""``worldsize scale [OPTION ...] world_sizes=1,2,4,8``: measure the step time at several world sizes.

Each point is a separate run, started as by train, and is shown next to the prediction of plan. World sizes may also be
given as nodes x processes per node: world_sizes=1x1,1x2,2x2,4x2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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

from worldsize.cli import exit_process
from worldsize.cli.train import train
from worldsize.config.arguments import build_number_parser
from worldsize.config.compose import compose_and_call, read_group_choices
from worldsize.core.limits import Range
from worldsize.errors import ConfigError, WorldsizeError, neighbours
from worldsize.messages import report_error
from worldsize.plan.advice import time_text
from worldsize.plan.scaling import (
    PHASES,
    Point,
    boundary_text,
    efficiencies,
    find_knees,
    marginal_text,
    marginals,
    predict_efficiencies,
    read_timed,
)
from worldsize.record.redaction import redact_arguments

if TYPE_CHECKING:
    from worldsize.config.settings import Settings
    from worldsize.plan.predictor import Predictor

_LENGTH = ("steps=50", "epochs=null")  # unless overridden on the command line
_QUIET = ("log_every=1", "evaluate_every=0", "checkpoint=none", "logger=none")
_FEWEST = 5  # minimum number of steps
_LISTS = ("world_sizes", "strategies", "accumulations")


@dataclass(frozen=True)
class Planned:
    """A point to measure: the ``words`` of the command line, and ``predicted`` seconds per step."""

    strategy: str
    world_size: int
    accumulation: int
    words: tuple[str, ...]
    settings: Settings
    recipe: str
    on_nodes: str  # suffix of the run's name
    predicted: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize scale", description=__doc__)
    parser.add_argument(
        "overrides",
        nargs="*",
        help="overrides as for train, and the lists world_sizes=, strategies= and accumulations=",
    )
    parser.add_argument(
        "--mode",
        choices=("strong", "weak"),
        default="strong",
        help="strong: batch_size is global; weak: batch_size is per process",
    )
    parser.add_argument(
        "--knee",
        type=build_number_parser(Range(least=0, most=1)),
        metavar="SHARE",
        help="minimum speedup per added process, relative to one process (default: the knee is at the maximum of "
        "efficiency x speedup)",
    )
    parser.add_argument(
        "--one-machine",
        action="store_true",
        help="predict for nodes that share the cores of this machine, as with worldsize.testing.hosts",
    )
    parser.add_argument("--links", type=Path, metavar="FILE", help="links measured by worldsize doctor --json FILE")
    options = parser.parse_intermixed_args()
    try:
        code = scale(options)
    except WorldsizeError as error:
        code = report_error(error)
    exit_process(code)


def scale(options: argparse.Namespace) -> int:
    """Measure every point and print the table; return 0, or the exit code of the first run that failed.

    Raises:
        WorldsizeError: a point cannot run; nothing was started.
    """
    from worldsize.plan.predictor import Given, Predictor, read_links
    from worldsize.record.run_directory import plan_run_directory
    from worldsize.world.processes import will_fork

    will_fork()
    command = shlex.join(["worldsize", "scale", *redact_arguments(sys.argv[1:])])
    links = read_links(options.links) if options.links else {}
    predictor = Predictor(Given(links=links, one_machine=options.one_machine))
    points = plan_points(options.overrides, options.mode, predictor)
    first = points[0]
    folder = plan_run_directory(first.settings.run.root, "scaling", None).path
    study = {"schema": 1, "recipe": first.recipe, "mode": options.mode, "command": command}
    study["cluster"] = {**asdict(predictor.resolve_cluster(first.settings)), "processes": None, "nodes": None}
    done: list[Point] = []
    for place, point in enumerate(points, 1):
        print(f"{place}/{len(points)}: {point.strategy}, world size {point.world_size}", file=sys.stderr, flush=True)
        run = folder / point.recipe / f"{point.strategy}_{point.world_size}_{point.accumulation}{point.on_nodes}"
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            code = train([*point.words, f"run.root={folder}", f"run.name={run.name}"])
        if code:
            break
        done.append(_read_point(point, run))
        (folder / "scaling.json").write_text(
            json.dumps({**study, **build_outcome(done, options.knee)}, indent=2) + "\n"
        )
    if done:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(build_scaling_table(done, title=f"{first.recipe}, {options.mode} scaling", least=options.knee))
        for line in boundary_text(done):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(f"{folder / 'scaling.json'}", highlight=False, markup=False, soft_wrap=True)
    return code


# ---------------------------------------------------------------- the points to measure


def plan_points(overrides: Sequence[str], mode: str, predictor: Predictor) -> list[Planned]:
    """Check and predict all points of a scaling study before the first measurement."""
    lists = {name: _parse_list(overrides, name) for name in _LISTS}
    if not lists["world_sizes"]:
        raise ConfigError("world_sizes is missing. Set e.g. world_sizes=1,2,4.")
    given = [word for word in overrides if word.partition("=")[0] not in _LISTS]
    has_epochs = any(word.startswith("epochs=") and word != "epochs=null" for word in given)
    words = [*(_QUIET if has_epochs else (*_LENGTH, *_QUIET)), *given]
    others = [word for word in words if not word.startswith(("strategy=", "+strategy="))]
    named = _group_by_strategy(others, lists["strategies"]) or {"": words}
    sizes, counts = (
        sorted({*map(_parse_shape, lists["world_sizes"])}),
        sorted({*map(_parse_number, lists["accumulations"])}),
    )
    points = product(named.values(), sizes, counts or [1])
    return [
        _plan_point([*words, *_format_cluster_options(shape)], shape, count, mode, predictor)
        for words, shape, count in points
    ]


def _group_by_strategy(words: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the words for each strategy; options under ``strategy`` go only to strategies that have the key.

    Raises:
        ConfigError: a strategy does not exist, or a key exists in none of them.
    """
    typed = {word: re.split("[.=]", word)[1] for word in words if word.startswith("strategy.")}
    known = {name: _list_strategy_keys(name) for name in names} if typed else {}
    for key in typed.values():
        if known and not any(key in keys for keys in known.values()):
            raise ConfigError(
                f"unknown key 'strategy.{key}' of {', '.join(names)}{neighbours(key, set().union(*known.values()))}"
            )
    return {
        name: [*(word for word in words if word not in typed or typed[word] in known[name]), f"strategy={name}"]
        for name in names
    }


def _list_strategy_keys(strategy: str) -> set[str]:
    """Return the keys of a strategy's options."""
    keys: set[str] = set()
    compose_and_call(lambda cfg: keys.update(map(str, cfg.strategy)), [f"strategy={strategy}"])
    return keys


def _format_cluster_options(shape: tuple[int, int]) -> list[str]:
    """Return the cluster options of a point; with 0 nodes, the configuration determines them."""
    size, nodes = shape
    if not nodes:
        return [f"cluster.processes={size}"]
    return [f"cluster.nodes={nodes}", "cluster.processes=null", f"cluster.processes_per_node={size // nodes}"]


def _plan_point(
    words: Sequence[str], shape: tuple[int, int], accumulation: int, mode: str, predictor: Predictor
) -> Planned:
    places = []
    size, nodes = shape

    def plan_with_config(cfg: DictConfig) -> None:
        from worldsize.config.composed import build_settings, has_own_batches, override_values
        from worldsize.core import BatchLauncher

        own_batches = has_own_batches(cfg)
        hosts = _first_hosts(cfg, nodes) if nodes else []
        weak = {} if own_batches or mode == "strong" else {"batch_size": cfg.batch_size * size}
        cfg = override_values(cfg, {**weak, **({"cluster.hosts": hosts} if hosts else {})})
        settings = build_settings(cfg)
        if accumulation > 1:
            settings = build_settings(override_values(cfg, {"logical_ranks": accumulation * settings.logical_ranks}))
        if isinstance(settings.launcher, BatchLauncher) and not settings.launcher.wait:
            raise ConfigError(
                f"{type(settings.launcher).__name__} submits runs without waiting for them. Set launcher.wait=true if "
                "available, or run scale inside the job; nothing was started."
            )
        if settings.training.steps < _FEWEST:
            raise ConfigError(
                f"steps={settings.training.steps} is too small to measure the spread. Set steps={_FEWEST} or more."
            )
        batch = "null" if own_batches else settings.training.batch_size
        shared = (f"batch_size={batch}", f"logical_ranks={settings.logical_ranks}")
        on_nodes = f"_{nodes}" if nodes else ""
        run = (*words, *([f"cluster.hosts=[{','.join(hosts)}]"] if hosts else []), *shared)
        place = Planned(
            read_group_choices()["strategy"],
            size,
            accumulation,
            run,
            settings,
            read_group_choices()["recipe"],
            on_nodes,
        )
        places.append(replace(place, predicted=_predict_step(predictor, settings)))

    compose_and_call(plan_with_config, words)
    return places[0]


def _first_hosts(cfg: DictConfig, nodes: int) -> list[str]:
    """Return the first ``nodes`` hosts; empty if the cluster does not list its hosts."""
    if "hosts" not in cfg.cluster:
        return []
    if nodes > len(cfg.cluster.hosts):
        raise ConfigError(
            f"world_sizes requires {nodes} nodes, but cluster.hosts has {len(cfg.cluster.hosts)}. Add hosts; nothing "
            "was started."
        )
    return list(cfg.cluster.hosts)[:nodes]


def _predict_step(predictor: Predictor, settings: Settings) -> float | None:
    try:
        return predictor.forecast(settings).step_seconds
    except ConfigError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


def _parse_list(overrides: Sequence[str], name: str) -> list[str]:
    values = [word.partition("=")[2] for word in overrides if word.startswith(f"{name}=")]
    return values[-1].strip("[]").split(",") if values else []


def _parse_shape(text: str) -> tuple[int, int]:
    """Return the numbers of processes and nodes; 0 nodes if ``text`` is only a number of processes."""
    nodes, by, each = text.partition("x")
    return (_parse_number(nodes) * _parse_number(each), _parse_number(nodes)) if by else (_parse_number(text), 0)


def _parse_number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"{text!r} is not a number of processes or micro-batches. Write e.g. world_sizes=1,2,4, or "
            "world_sizes=1x1,1x2,2x2 for nodes x processes per node."
        )
    return int(text)


# ---------------------------------------------------------------- the results


def _read_point(point: Planned, run: Path) -> Point:
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
        nodes=point.settings.cluster.nodes,
    )


def build_outcome(points: Sequence[Point], least: float | None) -> dict[str, Any]:
    """Return the content of ``scaling.json`` for measured points; see :func:`find_knees` for ``least``."""
    predicted: Sequence[float | None] = predict_efficiencies(points) or [None] * len(points)
    columns = zip(points, efficiencies(points), predicted, marginals(points), strict=True)
    rows = [
        {**asdict(point), "efficiency": share, "predicted_efficiency": expected, "marginal": further}
        for point, share, expected, further in columns
    ]
    return {"points": rows, "knee": find_knees(points, least=least), "least": least}


def build_scaling_table(points: Sequence[Point], *, title: str, least: float | None = None) -> Table:
    """Build the table of points, with the knee of each strategy marked."""
    knee, on_nodes = find_knees(points, least=least), any(point.nodes > 1 for point in points)
    shape = ["micro-batches"] if any(point.accumulation > 1 for point in points) else []
    drawn = Table("strategy", "nodes × processes/node" if on_nodes else "processes", title=title)
    for column in (*shape, "step", "spread", *PHASES, "samples/s", "efficiency", "marginal", "predicted", "error"):
        drawn.add_column(column)
    expected: Sequence[float | None] = predict_efficiencies(points) or [None] * len(points)
    rows = zip(points, efficiencies(points), expected, marginals(points), strict=True)
    for point, share, foreseen, further in rows:
        bends = point.world_size == knee[point.strategy]
        size = point.shape if on_nodes else str(point.world_size)
        cells = [point.strategy, f"{size}{' (knee)' if bends else ''}", *([str(point.accumulation)] if shape else [])]
        cells += [time_text(point.step_seconds), f"± {time_text(point.spread_seconds / 2)}"]
        cells += [time_text(point.phases[phase]) if phase in point.phases else "" for phase in PHASES]
        cells += [f"{point.samples_per_second:,.0f}", f"{share:.0%}", marginal_text(further)]
        if point.predicted_seconds is not None:
            of_that = "" if foreseen is None else f" ({foreseen:.0%})"
            cells += [f"{time_text(point.predicted_seconds)}{of_that}", f"{point.error:+.0%}"]
        drawn.add_row(*cells, style="bold" if bends else None)
    return drawn
