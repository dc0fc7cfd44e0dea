"""Draws which rank does what: its node, and its place on each axis of a strategy's mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.table import Table

from worldsize.core import Cluster

_MOST, _SHOWN = 64, 16  # ranks to show; of more, the first and the last


def rank_table(cluster: Cluster, groups: Mapping[str, Sequence[Sequence[int]]]) -> Table:
    """Build a table of processes: node, and on each axis the coordinate and the ranks of its group."""
    table = Table("rank", "node", "local rank", *(f"{axis}: ranks" for axis in groups))
    places = {axis: _places(members) for axis, members in groups.items()}
    omitted = range(_SHOWN // 2, cluster.processes - _SHOWN // 2) if cluster.processes > _MOST else range(0)
    for rank in range(cluster.processes):
        if rank in omitted:
            if rank == omitted[0]:
                table.add_row("...")
            continue
        node, local = divmod(rank, cluster.processes_per_node)
        table.add_row(*map(str, (rank, node, local)), *(places[axis].get(rank, "") for axis in groups))
    return table


def _places(groups: Sequence[Sequence[int]]) -> dict[int, str]:
    shown = ((group, _short(group)) for group in groups)
    return {rank: f"{place}: {text}" for group, text in shown for place, rank in enumerate(group)}


def _short(ranks: Sequence[int]) -> str:
    """Format ranks at equal distances as "0 8 .. 56"."""
    even = len({after - before for before, after in pairwise(ranks)}) == 1
    return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}" if even and len(ranks) > 4 else " ".join(map(str, ranks))
