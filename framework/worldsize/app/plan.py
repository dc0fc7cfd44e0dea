"""``worldsize plan [OPTION ...]``: which rank does what in a run that ``train`` would start; nothing is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from worldsize.app.leave import leave
from worldsize.app.train import CONFIG_ERROR
from worldsize.config.compose import compose_and_call
from worldsize.core import Cluster
from worldsize.errors import WorldsizeError


def main() -> None:
    leave(plan(sys.argv[1:]))


def plan(arguments: Sequence[str]) -> int:
    """Exit code: 0, or that of a configuration that cannot run."""
    refused: list[WorldsizeError] = []

    def task(cfg: DictConfig) -> None:
        try:
            _show(cfg)
        except WorldsizeError as error:  # Hydra would print where it was raised
            refused.append(error)

    try:
        compose_and_call(task, arguments)
    except WorldsizeError as error:
        refused.append(error)
    for each in refused:
        print(each, file=sys.stderr)
    return CONFIG_ERROR if refused else 0


def _show(cfg: DictConfig) -> None:
    from worldsize.app.execute import settings_of  # imports torch, which takes seconds

    settings = settings_of(cfg)
    table = rank_table(settings.cluster, settings.strategy.groups(settings.cluster))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


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
