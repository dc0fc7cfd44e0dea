"""Says which tier of the cluster each axis of a mesh of processes crosses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worldsize.core import Cluster
from worldsize.dist.cost.cluster import levels

Groups = Mapping[str, Sequence[Sequence[int]]]  # by axis, see Strategy.groups


def axis_tiers(cluster: Cluster, groups: Groups) -> dict[str, str]:
    """Return, by axis, the outermost tier whose links its groups use; axes of one rank are left out."""
    return {axis: _tier(cluster, lines) for axis, lines in groups.items() if any(len(line) > 1 for line in lines)}


def _tier(cluster: Cluster, lines: Sequence[Sequence[int]]) -> str:
    used = [
        level.name
        for level in levels(cluster)
        if any(len({rank // level.ranks for rank in line}) > 1 for line in lines)
    ]
    return used[-1]


def crossings_text(cluster: Cluster, groups: Groups) -> str:
    """Say in a line what each axis of a mesh crosses; "" if there is one axis, or one node."""
    if cluster.nodes == 1 or len(groups) == 1:
        return ""
    return f"mesh: {', '.join(f'{axis} {_place(cluster, tier)}' for axis, tier in axis_tiers(cluster, groups).items())}"


def _place(cluster: Cluster, tier: str) -> str:
    if tier == "network":
        return f"across {['node', *cluster.tiers][-1]}s"
    return f"within a {tier}"
