"""``worldsize plan [OPTION ...]``: which rank does what, and what a step will cost under every strategy.

Nothing is started; the recipe takes a few steps on this machine, unless --model-size and --compute say what it needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from worldsize.app.leave import leave
from worldsize.app.train import refuse
from worldsize.config.compose import compose_and_call, task_overrides
from worldsize.core import Cluster, Numerics, Workload
from worldsize.errors import ConfigError, WorldsizeError

if TYPE_CHECKING:
    from worldsize.config.settings import Settings
    from worldsize.planning.forecast import Forecast

_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Given:
    """What the user knows: bytes of the parameters, seconds that a rank computes in a step; ``overlap``: share of
    them behind which communication hides.
    """

    parameter_bytes: float | None = None
    compute_seconds: float | None = None
    overlap: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize plan", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as of train, e.g. +cluster=slurm cluster.nodes=4 strategy=mesh")
    parser.add_argument("--model-size", type=float, metavar="N", help="parameters, e.g. 1e9, instead of the recipe's")
    parser.add_argument("--precision", choices=_SIZES, default="fp32", help="with --model-size: of the gradients sent")
    parser.add_argument("--compute", type=_seconds, metavar="TIME", help="of a rank in a step, e.g. 250ms")
    parser.add_argument("--overlap", type=float, default=0.0, help="share of compute behind which bytes travel, 0 to 1")
    options = parser.parse_args()
    size = None if options.model_size is None else options.model_size * _SIZES[options.precision]
    leave(plan(options.overrides, Given(size, options.compute, options.overlap)))


def _seconds(text: str) -> float:
    unit = next((unit for unit in _UNITS if text.endswith(unit)), None)
    if unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: write e.g. 250ms")
    return float(text.removesuffix(unit)) * _UNITS[unit]


def plan(arguments: Sequence[str], given: Given) -> int:
    """Exit code: 0, or that of a configuration that cannot run."""
    codes = [0]

    def task(cfg: DictConfig) -> None:
        try:
            _show(cfg, given)
        except WorldsizeError as error:  # Hydra would print where it was raised
            codes.append(refuse(error))

    try:
        compose_and_call(task, arguments)
    except WorldsizeError as error:
        codes.append(refuse(error))
    return max(codes)


def _show(cfg: DictConfig, given: Given) -> None:
    from worldsize.app.execute import settings_of  # imports torch, which takes seconds

    settings = settings_of(cfg)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(rank_table(settings.cluster, settings.strategy.groups(settings.cluster)))
    found, refused = _forecasts(_workload(settings, given), measured=given.compute_seconds is None)
    console.print(_cost_table(found, settings))
    for name, why in refused.items():
        console.print(f"{name}: {why}", highlight=False, soft_wrap=True)


# ---------------------------------------------------------------- what it costs


def _workload(settings: Settings, given: Given) -> Workload:
    """Of one rank's step, if all ranks share the batch evenly."""
    if given.parameter_bytes is not None:
        if given.compute_seconds is None:
            raise ConfigError("--model-size says nothing of time. Give --compute too, e.g. --compute 250ms.")
        size = given.parameter_bytes
        return Workload(size, 2 * size, compute_seconds=given.compute_seconds, overlap=given.overlap)
    from worldsize.engine.data import Order
    from worldsize.planning.calibrate import calibrate

    order = Order(settings.seed, settings.batch_size, settings.logical_ranks, (0,))
    numerics = getattr(settings.strategy, "numerics", Numerics())
    work = calibrate(settings.recipe, numerics, order, settings.cluster.device)
    seconds = given.compute_seconds or work.compute_seconds * settings.logical_ranks / settings.cluster.processes
    return replace(work, compute_seconds=seconds, overlap=given.overlap)


def _forecasts(work: Workload, *, measured: bool) -> tuple[dict[str, Forecast], dict[str, str]]:
    """By strategy: the forecast, or why there is none. Where compute was measured, fewer workers have more to do."""
    from worldsize.planning.forecast import forecast

    found: dict[str, Forecast] = {}
    refused: dict[str, str] = {}
    for name, settings in _strategies(refused):
        cost = settings.strategy.cost(work, settings.cluster)
        if cost is None:
            refused[name] = "it does not say what it costs"
            continue
        share = settings.cluster.processes / settings.roles["worker"].processes if measured else 1.0
        found[name] = forecast(cost, replace(work, compute_seconds=work.compute_seconds * share))
    return found, refused


def _strategies(refused: dict[str, str]) -> Iterator[tuple[str, Settings]]:
    """The run under each strategy with its defaults, and as it was typed under the chosen one."""
    from worldsize.app.execute import settings_of

    typed = task_overrides()
    chosen = next((word.partition("=")[2] for word in typed if word.startswith("strategy=")), "")
    others = [word for word in typed if not word.startswith(("strategy=", "strategy.", "+strategy."))]
    for name in GlobalHydra.instance().config_loader().get_group_options("strategy"):
        words = typed if name == chosen else [*others, f"strategy={name}"]
        try:
            yield name, settings_of(compose("config", overrides=words))
        except WorldsizeError as error:
            refused[name] = str(error)


def _cost_table(found: Mapping[str, Forecast], settings: Settings) -> Table:
    title = f"{settings.cluster.processes} processes on {settings.cluster.nodes} nodes"
    columns = ("memory a rank", "sent a rank", "leaves a node", "communication", "step", "efficiency")
    table = Table("strategy", *columns, title=title)
    best = min((each.step_seconds for each in found.values()), default=0.0)
    for name, each in sorted(found.items(), key=lambda item: item[1].step_seconds):
        cost = each.cost
        sizes = (_size(size) for size in (cost.memory_bytes, cost.sent_bytes, cost.across_bytes))
        times = (_time(cost.communication_seconds), _time(each.step_seconds), f"{each.efficiency:.1%}")
        table.add_row(name, *sizes, *times, style="bold" if each.step_seconds == best else None)
    return table


def _size(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1e3 * seconds:.2f} ms"


# ---------------------------------------------------------------- which rank does what


def rank_table(cluster: Cluster, groups: Mapping[str, Sequence[Sequence[int]]]) -> Table:
    """A row a process: its node, and on each axis its coordinate and the ranks that it works with there."""
    table = Table("rank", "node", "local rank", *(f"{axis}: ranks" for axis in groups))
    places = {axis: _places(members) for axis, members in groups.items()}
    for rank in range(cluster.processes):
        node, local = divmod(rank, cluster.processes_per_node)
        table.add_row(*map(str, (rank, node, local)), *(places[axis].get(rank, "") for axis in groups))
    return table


def _places(groups: Sequence[Sequence[int]]) -> dict[int, str]:
    return {rank: f"{place}: {_short(group)}" for group in groups for place, rank in enumerate(group)}


def _short(ranks: Sequence[int]) -> str:
    """Ranks at equal distances as "0 8 .. 56"."""
    even = len({after - before for before, after in pairwise(ranks)}) == 1
    return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}" if even and len(ranks) > 4 else " ".join(map(str, ranks))
