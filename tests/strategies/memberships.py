"""Leads a process through memberships of a gang without a launching process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore

from worldsize.core import Cluster, World
from worldsize.healing.groups import rebuild_groups


def worlds_in(memberships: Sequence[Sequence[int]], world: World, cluster: Cluster, folder: Path) -> Iterator[World]:
    """Yield this process's place in each of the ``memberships`` (global ranks) that it belongs to."""
    for number, members in enumerate(memberships):
        if world.global_rank not in members:
            if dist.is_initialized():
                dist.destroy_process_group()
            continue
        store = FileStore(str(folder / str(number)), len(members))
        store.set_timeout(timedelta(seconds=60))
        world = rebuild_groups(world, tuple(members), cluster, store)
        yield world
