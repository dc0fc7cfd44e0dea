"""Opens a world with a single real rank: torch's fake process group answers as if all had the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._C._distributed_c10d import FakeProcessGroup, FakeStore

from worldsize.config.settings import Settings
from worldsize.core import ConfigError, World
from worldsize.world.environments import Placement
from worldsize.world.world import world_of

_BACKEND = "fake"


@contextmanager
def world_seen_by(rank: int, settings: Settings, device: torch.device) -> Iterator[World]:
    """Open the world of a run for its rank ``rank`` on ``device``; a run of one process has no group."""
    cluster = settings.cluster
    per_node = cluster.processes_per_node
    joins = cluster.processes > 1
    if joins:
        options = FakeProcessGroup.Options()
        options.simulate_uniform_ranks = True
        dist.init_process_group(
            _BACKEND, store=FakeStore(), rank=rank, world_size=cluster.processes, pg_options=options
        )
    try:
        place = Placement(rank, cluster.processes, rank % per_node, per_node, store="")
        yield world_of(place, cluster, settings.roles, device, host_backend=_BACKEND)
    finally:
        if joins and dist.is_initialized():
            dist.destroy_process_group()


def check_alone(settings: Settings) -> None:
    """Raise ConfigError for runs in which a rank depends on data of its peers.

    Raises:
        ConfigError: processes serve, or a rank is a stage of a pipeline.
    """
    kind = type(settings.strategy).__name__
    if any(role.serves for role in settings.roles.values()):
        raise ConfigError(
            f"{kind} has processes that serve, whose peers decide what they do: none can be tried by itself. Choose a "
            "strategy whose processes all train, such as ddp, zero, fsdp, hsdp or mesh."
        )
    if any(len(stages) > 1 for stages in settings.strategy.groups(settings.cluster).get("pipeline", ())):
        raise ConfigError(
            "the stages of a pipeline wait for what only their neighbours have: none can be tried by itself. Set "
            "strategy.pipeline=1 to try the other axes."
        )
