"""The process groups over which gradients are summed tier by tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.core import World


@final
@dataclass(frozen=True)
class Tiers:
    """Groups of this rank.

    Attributes:
        inner: The ranks of its node, then of each tier up to the last but one those with the same place below.
        across: Those of the last tier, whose links are the slowest.
    """

    inner: Sequence[ProcessGroup]
    across: ProcessGroup

    @staticmethod
    def of(world: World) -> Tiers | None:
        """Return the groups of ``world``; None if it is on one node."""
        if "node" not in world.groups:
            return None
        named = [group for name, group in world.groups.items() if name.startswith("tier/")]
        *inner, across = [world.groups["node"], *(named or [world.groups["across"]])]
        return Tiers([group for group in inner if dist.get_world_size(group) > 1], across)

    @property
    def shares(self) -> int:
        """Number of ranks that divide a bucket before it crosses the last tier."""
        ranks = 1
        for group in self.inner:
            ranks *= dist.get_world_size(group)
        return ranks
