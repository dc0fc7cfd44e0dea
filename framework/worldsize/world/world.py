"""Opens the World of a process: its threads, device, and process groups by role, node and local rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from worldsize.core import Cluster, ConfigError, Role, World
from worldsize.devices import device_count
from worldsize.world.environments import Placement, host_name
from worldsize.world.pinning import pin_process
from worldsize.world.roles import heals, role_of, role_ranks

# Up to this many ranks gloo connects all pairs when a group is made, with a store message for each pair. In a gang that
# begins with more it connects two ranks when they first communicate.
_ALL_CONNECTED, _CONNECTS_LATE = 32, "TORCH_GLOO_LAZY_INIT"


@contextmanager
def open_world(placement: Placement, cluster: Cluster, roles: Mapping[str, Role]) -> Iterator[World]:
    """Join the run: set device, cores and threads, and make the process groups, which are destroyed at the end.

    A run of one process makes no process group.

    Raises:
        ConfigError: the number of processes that the launcher started is not that of the plan.
    """
    check_size(placement, roles)
    _let_torch_record(debug=cluster.debug)
    device, threads = device_of(placement, cluster), threads_per_process(placement.local_world_size)
    has_launcher = placement.heartbeat is not None  # one of worldsize
    pin = pin_process(
        cluster, local_rank=placement.local_rank, processes=placement.local_world_size, has_launcher=has_launcher
    )
    torch.set_num_threads(cluster.threads or min(threads, len(pin.cores) if pin else threads))
    gang = gang_of(roles)
    if len(gang) > _ALL_CONNECTED:  # once, before there are threads that read the environment
        os.environ.setdefault(_CONNECTS_LATE, "1")
    # one that heals is joined when its members are known
    if len(gang) > 1 and placement.rank in gang and not heals(roles):
        _join(placement, cluster, device, gang)
    yield world_of(placement, cluster, roles, device)
    # not after an error: it could wait for peers that will never arrive, and the error must be raised
    if dist.is_initialized():
        dist.destroy_process_group()


def regrouped(world: World, members: Sequence[int], cluster: Cluster, store: Store, *, copies: bool = False) -> World:
    """Leave the process groups of ``world`` and join those of the processes ``members``, all of which must call it.

    Args:
        world: The place of this process until now.
        members: Global ranks of the processes that train together from now on, ascending.
        cluster: The machines.
        store: The rendezvous of these members, which no others have used; the caller keeps it alive.
        copies: Whether there is a group "copies/" of the role, too, in which members send each other copies of shards.

    Returns:
        The place of this process among the members: its rank is its place in the list.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
    rank, groups = members.index(world.global_rank), dict[str, ProcessGroup]()
    if len(members) > 1:
        timeout = timedelta(seconds=cluster.timeout)
        dist.init_process_group(
            cluster.backend,
            store=store,
            rank=rank,
            world_size=len(members),
            timeout=timeout,
            device_id=world.device if world.device.type == "cuda" else None,
        )
        everyone = range(len(members))
        groups = {name: _group(everyone, everyone, timeout) for name in ("all", world.role)}
        own = dist.new_group(list(everyone), timeout, backend="gloo")
        groups[f"checkpoint/{world.role}"] = cast("ProcessGroup", own)
        if world.device.type != "cpu":
            own = dist.new_group(list(everyone), timeout, backend="gloo")
            groups[f"host/{world.role}"] = cast("ProcessGroup", own)
        if copies:
            own = dist.new_group(list(everyone), timeout, backend="gloo")
            groups[f"copies/{world.role}"] = cast("ProcessGroup", own)
    return replace(world, rank=rank, size=len(members), world_size=len(members), groups=groups)


def connects_late() -> bool:
    """Return whether groups of gloo connect two ranks when they first communicate, not all when they are made."""
    return os.environ.get(_CONNECTS_LATE, "0").lower() in {"1", "y", "yes", "t", "true"}


def _forget_meshes() -> None:
    """Clear torch's caches of operations on DTensors, which keep the meshes of groups that are destroyed."""
    if "torch.distributed.tensor" not in sys.modules:  # importing it takes long
        return
    with suppress(ImportError, AttributeError):  # another version of torch has other caches
        from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, _sharding_prop

        # what torch.distributed.tensor.debug does, which takes long to import
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
        torch._C._clear_DTensor_sharding_propagator_cache()
        _sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def existing_groups() -> list[ProcessGroup]:
    """Return all process groups of this process."""
    return [*dist.distributed_c10d._world.pg_map]


def world_of(
    placement: Placement,
    cluster: Cluster,
    roles: Mapping[str, Role],
    device: torch.device,
    *,
    host_backend: str = "gloo",
) -> World:
    """Return the World of this process on ``device``, with groups of the processes that it trains with.

    All members of the default process group must call it; a process that is alone has none.
    ``host_backend`` is the backend of the group with which ranks coordinate checkpoints.
    """
    timeout = timedelta(seconds=cluster.timeout)
    groups = _groups(placement, roles, timeout, host_backend, device) if dist.is_initialized() else {}
    if "node" in groups and cluster.tiers:
        groups |= _tier_groups(placement, cluster.tiers, timeout)
    return _world(placement, device, roles, groups)


def gang_of(roles: Mapping[str, Role]) -> list[int]:
    """Return the global ranks of the processes that train, which form process groups."""
    ranks = role_ranks(roles)
    return [rank for name, role in roles.items() if not role.serves for rank in ranks[name]]


def check_size(placement: Placement, roles: Mapping[str, Role]) -> None:
    """Raise ConfigError unless the launcher started as many processes as the roles need.

    A process with a higher rank joined later, in a role that can grow.
    """
    planned = sum(role.processes for role in roles.values())
    if placement.world_size != planned:
        raise ConfigError(
            f"the plan has {planned} processes, but the launcher started {placement.world_size}. "
            f"Set cluster.processes={placement.world_size} or start {planned}."
        )


def threads_per_process(local_world_size: int) -> int:
    """Return the number of usable cores divided by the processes of the node; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def device_of(placement: Placement, cluster: Cluster) -> torch.device:
    """Return the device of this process; an accelerator, chosen by local rank, becomes the current one."""
    if cluster.device == "cpu":
        return torch.device("cpu")
    index = 0 if device_count(cluster.device) == 1 else placement.local_rank  # srun --gpus-per-task=1 shows one to each
    device = torch.device(cluster.device, index)
    if cluster.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.accelerator.set_device_index(index)
    return device


def _let_torch_record(*, debug: bool) -> None:
    """Set what torch reads when the first process group is made."""
    if debug:
        os.environ.update(NCCL_DEBUG="INFO", TORCH_DISTRIBUTED_DEBUG="INFO")
        dist.set_debug_level_from_env()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # collectives that torch's flight recorder keeps
    for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):  # NCCL's watchdog reads the second
        os.environ.setdefault(name, "0")  # its dump is a pickle; see worker/flight.py


def _join(placement: Placement, cluster: Cluster, device: torch.device, gang: Sequence[int]) -> None:
    dist.init_process_group(
        cluster.backend,
        init_method=placement.store,
        rank=gang.index(placement.rank),
        world_size=len(gang),
        timeout=timedelta(seconds=cluster.timeout),
        device_id=device if device.type == "cuda" else None,
    )


def _world(
    placement: Placement, device: torch.device, roles: Mapping[str, Role], groups: Mapping[str, ProcessGroup]
) -> World:
    role, rank = role_of(placement.rank, roles)
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


def _groups(
    placement: Placement, roles: Mapping[str, Role], timeout: timedelta, host_backend: str, device: torch.device
) -> dict[str, ProcessGroup]:
    # every rank must create each of these groups, members or not
    training = role_ranks({name: role for name, role in roles.items() if not role.serves})
    everyone = range(sum(len(members) for members in training.values()))
    groups = {"all": _group(everyone, everyone, timeout)}
    for name, members in training.items():
        groups[name] = _group(members, everyone, timeout)
        # a thread writes checkpoints while training uses the role's own group
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
    """Return this rank's group of each tier: the ranks of one unit that have the same place in the units below."""
    everyone, below = range(placement.world_size), placement.local_world_size
    units = {name: nodes * placement.local_world_size for name, nodes in tiers.items()}
    groups = {}
    for name, unit in {**units, "network": placement.world_size}.items():
        first = placement.rank // unit * unit
        members = everyone[first + placement.rank % below : first + unit : below]
        groups[f"tier/{name}"] = _own_group(members, everyone, timeout)
        below = unit
    return groups


def _group(members: range, everyone: range, timeout: timedelta) -> ProcessGroup:
    if members == everyone and dist.group.WORLD is not None:
        return dist.group.WORLD
    return cast("ProcessGroup", dist.new_group(list(members), timeout))  # a placeholder if this rank is no member


def _own_group(members: range, everyone: range, timeout: timedelta) -> ProcessGroup:
    """Return the group of ``members``, created only by its members, since a world has one such group per node.

    All ranks must create the same number of groups in this way, since torch names groups by a counter.
    """
    if members == everyone and dist.group.WORLD is not None:
        return dist.group.WORLD
    return cast("ProcessGroup", dist.new_group(list(members), timeout, use_local_synchronization=True))


def places(world: World) -> Callable[[int], tuple[str, str]]:
    """Let the other ranks of this role know the place of this one; all of them must call it.

    Returns:
        A function that returns the host (by its scheduler's name) and the device of a rank. Nothing is exchanged until
        it is called.
    """
    mine = host_name(os.environ), str(world.device)
    if not dist.is_initialized():
        return lambda rank: mine
    store, key = dist.distributed_c10d._get_default_store(), f"place/{world.role}"
    store.set(f"{key}/{world.rank}", json.dumps(mine))

    def place(rank: int) -> tuple[str, str]:
        host, device = json.loads(store.get(f"{key}/{rank}"))
        return host, device

    return place
