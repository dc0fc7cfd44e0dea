"""Sets up the World of a process: threads, device, and process groups."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.core import Cluster, ConfigError, Role, World
from worldsize.devices import device_count
from worldsize.world.environments import Placement, host_name
from worldsize.world.pinning import pin_process
from worldsize.world.roles import can_heal, find_role, role_ranks

# Up to this many ranks, gloo connects all pairs when a group is created, at the cost of a store message per pair. In a
# larger initial gang, it connects two ranks when they first communicate.
_ALL_CONNECTED, _CONNECTS_LATE = 32, "TORCH_GLOO_LAZY_INIT"


@contextmanager
def open_world(placement: Placement, cluster: Cluster, roles: Mapping[str, Role]) -> Iterator[World]:
    """Join the run: set the device, cores and threads, and create the process groups.

    A run with one process does not use process groups. The groups are destroyed on exit, but not after an error.

    Raises:
        ConfigError: the launcher started a different number of processes than planned.
    """
    check_size(placement, roles)
    _let_torch_record(debug=cluster.debug)
    device, threads = select_device(placement, cluster), threads_per_process(placement.local_world_size)
    has_launcher = placement.heartbeat is not None  # launched by worldsize
    pin = pin_process(
        cluster, local_rank=placement.local_rank, processes=placement.local_world_size, has_launcher=has_launcher
    )
    torch.set_num_threads(cluster.threads or min(threads, len(pin.cores) if pin else threads))
    gang = list_gang_ranks(roles)
    if len(gang) > _ALL_CONNECTED:  # before any thread reads the environment
        os.environ.setdefault(_CONNECTS_LATE, "1")
    # a healing gang is joined later, when its members are known
    if len(gang) > 1 and placement.rank in gang and not can_heal(roles):
        _init_process_group(placement, cluster, device, gang)
    yield create_world(placement, cluster, roles, device)
    # not after an error: this could wait forever for peers, and the error would not be raised
    if dist.is_initialized():
        dist.destroy_process_group()


def connects_late() -> bool:
    """Return whether gloo groups connect two ranks only when they first communicate."""
    return os.environ.get(_CONNECTS_LATE, "0").lower() in {"1", "y", "yes", "t", "true"}


def create_world(
    placement: Placement,
    cluster: Cluster,
    roles: Mapping[str, Role],
    device: torch.device,
    *,
    host_backend: str = "gloo",
) -> World:
    """Return the World of this process on ``device``, including its process groups for training.

    All members of the default process group must call this; a single process does not have such a group.
    ``host_backend`` is the backend of the groups that exchange data in host memory, such as for checkpoints.
    """
    timeout = timedelta(seconds=cluster.timeout)
    groups = _create_groups(placement, roles, timeout, host_backend, device) if dist.is_initialized() else {}
    if "node" in groups and cluster.tiers:
        groups |= _tier_groups(placement, cluster.tiers, timeout)
    return _build_world(placement, device, roles, groups)


def list_gang_ranks(roles: Mapping[str, Role]) -> list[int]:
    """Return the global ranks of the training processes, which form process groups."""
    ranks = role_ranks(roles)
    return [rank for name, role in roles.items() if not role.serves for rank in ranks[name]]


def check_size(placement: Placement, roles: Mapping[str, Role]) -> None:
    """Raise ConfigError unless the launcher started as many processes as the roles need."""
    planned = sum(role.processes for role in roles.values())
    if placement.world_size != planned:
        raise ConfigError(
            f"the plan has {planned} processes, but the launcher started {placement.world_size}. Set "
            f"cluster.processes={placement.world_size} or start {planned} processes."
        )


def threads_per_process(local_world_size: int) -> int:
    """Return the number of usable cores per process on this node, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def select_device(placement: Placement, cluster: Cluster) -> torch.device:
    """Return this process's device; make an accelerator, chosen by local rank, the current device."""
    if cluster.device == "cpu":
        return torch.device("cpu")
    index = 0 if device_count(cluster.device) == 1 else placement.local_rank  # as with srun --gpus-per-task=1

    device = torch.device(cluster.device, index)
    if cluster.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.accelerator.set_device_index(index)
    return device


def _let_torch_record(*, debug: bool) -> None:
    """Set the environment variables that torch reads when it creates the first process group."""
    if debug:
        os.environ.update(NCCL_DEBUG="INFO", TORCH_DISTRIBUTED_DEBUG="INFO")
        dist.set_debug_level_from_env()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # number of collectives in torch's flight recorder
    for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):  # NCCL's watchdog reads the second
        os.environ.setdefault(name, "0")  # the dump is a pickle; see worker/flight.py


def _init_process_group(placement: Placement, cluster: Cluster, device: torch.device, gang: Sequence[int]) -> None:
    dist.init_process_group(
        cluster.backend,
        init_method=placement.store,
        rank=gang.index(placement.rank),
        world_size=len(gang),
        timeout=timedelta(seconds=cluster.timeout),
        device_id=device if device.type == "cuda" else None,
    )


def _build_world(
    placement: Placement, device: torch.device, roles: Mapping[str, Role], groups: Mapping[str, ProcessGroup]
) -> World:
    role, rank = find_role(placement.rank, roles)
    return World(
        role=role,
        rank=rank,
        size=roles[role].processes,
        global_rank=placement.rank,
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        node_rank=placement.node_rank,
        device=device,
        groups=groups,
    )


def _create_groups(
    placement: Placement, roles: Mapping[str, Role], timeout: timedelta, host_backend: str, device: torch.device
) -> dict[str, ProcessGroup]:
    # every rank must create each of these groups, even if it is not a member
    training = role_ranks({name: role for name, role in roles.items() if not role.serves})
    everyone = range(sum(len(members) for members in training.values()))
    groups = {"all": _create_group(everyone, everyone, timeout)}
    for name, members in training.items():
        groups[name] = _create_group(members, everyone, timeout)
        # a separate group, since a thread writes checkpoints while training uses the role's group
        own = dist.new_group(list(members), timeout, backend=host_backend)
        groups[f"checkpoint/{name}"] = cast("ProcessGroup", own)
        if device.type != "cpu":
            own = dist.new_group(list(members), timeout, backend=host_backend)
            groups[f"host/{name}"] = cast("ProcessGroup", own)
    if placement.local_world_size < placement.world_size == len(everyone):
        groups |= _node_groups(placement, timeout)
    return groups


def _node_groups(placement: Placement, timeout: timedelta) -> dict[str, ProcessGroup]:
    size, everyone = placement.local_world_size, range(placement.world_size)
    first = placement.node_rank * size
    return {
        "node": _own_group(everyone[first : first + size], everyone, timeout),
        "across": _own_group(everyone[placement.local_rank :: size], everyone, timeout),
    }


def _tier_groups(placement: Placement, tiers: Mapping[str, int], timeout: timedelta) -> dict[str, ProcessGroup]:
    """Return this rank's group per tier: the ranks of the unit with the same index within their sub-unit."""
    everyone, below = range(placement.world_size), placement.local_world_size
    units = {name: nodes * placement.local_world_size for name, nodes in tiers.items()}
    groups = {}
    for name, unit in {**units, "network": placement.world_size}.items():
        first = placement.rank // unit * unit
        members = everyone[first + placement.rank % below : first + unit : below]
        groups[f"tier/{name}"] = _own_group(members, everyone, timeout)
        below = unit
    return groups


def _create_group(members: range, everyone: range, timeout: timedelta) -> ProcessGroup:
    if members == everyone and dist.group.WORLD is not None:
        return dist.group.WORLD
    return cast("ProcessGroup", dist.new_group(list(members), timeout))  # a placeholder on non-members


def _own_group(members: range, everyone: range, timeout: timedelta) -> ProcessGroup:
    """Return a group that only ``members`` create; a world has one such group per node.

    All ranks must create the same number of groups this way, since torch names groups by a counter.
    """
    if members == everyone and dist.group.WORLD is not None:
        return dist.group.WORLD
    return cast("ProcessGroup", dist.new_group(list(members), timeout, use_local_synchronization=True))


def publish_place(world: World) -> Callable[[int], tuple[str, str]]:
    """Publish this rank's host and device to all ranks; all ranks of the role must call this.

    Returns:
        A function from a rank to its host (the scheduler's name) and device. It waits until that rank has published
        them.
    """
    mine = host_name(os.environ), str(world.device)
    if not dist.is_initialized():
        return lambda rank: mine
    store, key = dist.distributed_c10d._get_default_store(), f"place/{world.role}"
    store.set(f"{key}/{world.rank}", json.dumps(mine))

    def wait_for_place(rank: int) -> tuple[str, str]:
        host, device = json.loads(store.get(f"{key}/{rank}"))
        return host, device

    return wait_for_place
