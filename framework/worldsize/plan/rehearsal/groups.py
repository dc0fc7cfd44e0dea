"""Identifies process groups so that ranks rehearsed in separate processes can compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.spans import named


@final
@dataclass(frozen=True)
class Group:
    """Identity of a process group.

    Attributes:
        ranks: The global ranks of its members.
        number: How many groups of the same members were created before it.
    """

    ranks: tuple[int, ...]
    number: int


def identified(group: ProcessGroup) -> Group:
    """Return the identity of a group that this process has created, which is the same on all members."""
    members = dist.get_process_group_ranks(group)
    return Group(tuple(members), _made_of(members).index(group))


def next_of(members: Sequence[int]) -> Group:
    """Return the identity of the next group of ``members``."""
    return Group(tuple(members), len(_made_of(list(members))))


def _made_of(members: list[int]) -> list[ProcessGroup]:
    made = [each for each in dist.distributed_c10d._world.pg_group_ranks if isinstance(each, ProcessGroup)]
    return [each for each in made if dist.get_process_group_ranks(each) == members]


def described(group: Group) -> str:
    """Name a group for people."""
    which = f", number {group.number + 1} of them" if group.number else ""
    return f"the group of {named(group.ranks)}{which}"
