"""Process groups as ranks that never meet can compare them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch.distributed as dist
from torch.distributed import ProcessGroup


@final
@dataclass(frozen=True)
class Group:
    """A process group.

    Attributes:
        ranks: The global ranks of its members.
        number: How many groups of the same members were made before it.
    """

    ranks: tuple[int, ...]
    number: int


def identified(group: ProcessGroup) -> Group:
    """Identify a group that this process has made, as any other member does."""
    made = [each for each in dist.distributed_c10d._world.pg_group_ranks if isinstance(each, ProcessGroup)]
    members = dist.get_process_group_ranks(group)
    same = [each for each in made if dist.get_process_group_ranks(each) == members]
    return Group(tuple(members), same.index(group))
