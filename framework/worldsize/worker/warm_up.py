"""Does once, alone, what a process that joins a gang will do while the members of the gang wait for it.

What a process does for the first time takes it several times as long as afterwards.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from worldsize.config.settings import Settings
from worldsize.strategies.deferred.model import describe
from worldsize.world.environments import Placement


def joins_later(placement: Placement) -> bool:
    """Return whether a gang begins without this process, which replaces another, was added, or is a spare."""
    return placement.starts > 0 or placement.rank >= placement.world_size


def warm_up(settings: Settings) -> None:
    """Make a process group of this process alone, and describe the model if the strategy shards it; keep neither."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    if settings.strategy.shards_state:
        describe(settings.recipe.model)
