"""Placement → World: threads, device, process group and groups by role, node and leaders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.core import Cluster, ConfigError, Role, World
from worldsize.world.environments import Placement


@contextmanager
def open_world(placement: Placement, cluster: Cluster, roles: Mapping[str, Role]) -> Iterator[World]:
    """Join the run: set threads and device, make the process groups; leave them at the end.

    A run of one process makes no process group.

    Raises:
        ConfigError: the launcher started another number of processes than the plan has.
    """
    check_size(placement, roles)
    torch.set_num_threads(cluster.threads or threads_per_process(placement.local_world_size))
    device = device_of(placement, cluster)
    if placement.world_size > 1:
        _join(placement, cluster, device)
    yield _world(placement, device, roles, timedelta(seconds=cluster.timeout))
    # not after an error: it can wait for peers that will never come, and the error must get out
    if dist.is_initialized():
        dist.destroy_process_group()


def check_size(placement: Placement, roles: Mapping[str, Role]) -> None:
    """Raise ConfigError unless the launcher started as many processes as the roles need."""
    planned = sum(role.processes for role in roles.values())
    if placement.world_size != planned:
        raise ConfigError(
            f"the plan has {planned} processes, but the launcher started {placement.world_size}. "
            f"Set cluster.processes={placement.world_size} or start {planned}."
        )


def threads_per_process(local_world_size: int) -> int:
    """The cores that this process may use, shared among the processes of the node; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def device_of(placement: Placement, cluster: Cluster) -> torch.device:
    if cluster.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    return device


def _join(placement: Placement, cluster: Cluster, device: torch.device) -> None:
    dist.init_process_group(
        cluster.backend,
        init_method=placement.store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=cluster.timeout),
        device_id=device if device.type == "cuda" else None,
    )


def _world(placement: Placement, device: torch.device, roles: Mapping[str, Role], timeout: timedelta) -> World:
    ranks = role_ranks(roles)
    role, rank = role_of(placement.rank, roles)
    return World(
        role=role,
        rank=rank,
        size=len(ranks[role]),
        global_rank=placement.rank,
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        node_rank=placement.node_rank,
        device=device,
        groups=_groups(placement, ranks, timeout) if placement.world_size > 1 else {},
    )


def role_ranks(roles: Mapping[str, Role]) -> dict[str, range]:
    """Global ranks by role: consecutive, in the order in which the strategy names its roles."""
    ranks, start = {}, 0
    for name, role in roles.items():
        ranks[name] = range(start, start + role.processes)
        start += role.processes
    return ranks


def role_of(global_rank: int, roles: Mapping[str, Role]) -> tuple[str, int]:
    """The role of a process, and its rank among those of that role."""
    ranks = role_ranks(roles)
    role = next(name for name, members in ranks.items() if global_rank in members)
    return role, global_rank - ranks[role].start


def _groups(placement: Placement, ranks: Mapping[str, range], timeout: timedelta) -> dict[str, ProcessGroup]:
    # every rank must create every group, members or not
    everyone = range(placement.world_size)
    groups = {"all": _group(everyone, everyone, timeout)}
    for name, members in ranks.items():
        groups[name] = _group(members, everyone, timeout)
        # a checkpoint is written by a thread, while the role's own group is in use
        groups[f"checkpoint/{name}"] = cast("ProcessGroup", dist.new_group(list(members), timeout, backend="gloo"))
    if placement.local_world_size < placement.world_size:
        groups |= _node_groups(placement, timeout)
    return groups


def _node_groups(placement: Placement, timeout: timedelta) -> dict[str, ProcessGroup]:
    size = placement.local_world_size
    starts = range(0, placement.world_size, size)
    everyone = range(placement.world_size)
    nodes = [_group(range(start, start + size), everyone, timeout) for start in starts]
    leaders = _group(starts, everyone, timeout)
    return {"node": nodes[placement.node_rank], "leaders": leaders}


def _group(members: range, everyone: range, timeout: timedelta) -> ProcessGroup:
    if members == everyone and dist.group.WORLD is not None:
        return dist.group.WORLD
    return cast("ProcessGroup", dist.new_group(list(members), timeout))  # where this rank is no member, a placeholder
