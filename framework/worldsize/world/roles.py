"""Maps global ranks to roles and hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worldsize.core import Block, ConfigError, Plan, Role


def role_ranks(roles: Mapping[str, Role]) -> dict[str, range]:
    """Return the global ranks of each role; they are consecutive, in the order of ``roles``."""
    ranks, start = {}, 0
    for name, role in roles.items():
        ranks[name] = range(start, start + role.processes)
        start += role.processes
    return ranks


def can_heal(roles: Mapping[str, Role]) -> bool:
    """Return whether a gang with these roles continues after some of its processes die."""
    return any(role.restart == "heal" for role in roles.values())


def get_blocks(roles: Mapping[str, Role]) -> Sequence[Block]:
    """Return the possible data-parallel replicas of a healing gang, the preferred one first."""
    return next((role.blocks for role in roles.values() if role.restart == "heal"), (Block(),))


def find_block(processes: int, blocks: Sequence[Block]) -> Block | None:
    """Return the kind of block that ``processes`` form: the first whose size divides ``processes``, or None."""
    return next((block for block in blocks if processes % block.size == 0), None)


def round_down(processes: int, blocks: Sequence[Block], parts: int) -> int:
    """Return the largest number of processes up to ``processes`` that form at most ``parts`` whole blocks."""
    return max(min(processes // block.size, parts) * block.size for block in blocks)


def count_at_most(blocks: Sequence[Block], parts: int) -> int:
    """Return the largest number of processes that form at most ``parts`` whole blocks."""
    return parts * max(block.size for block in blocks)


def round_up(processes: int | None, blocks: Sequence[Block]) -> int:
    """Return the smallest number of processes from ``processes`` (None counts as 1) that form whole blocks."""
    return min(-(-(processes or 1) // block.size) * block.size for block in blocks)


def get_min_processes(roles: Mapping[str, Role]) -> int:
    """Return the minimum number of processes of a healing gang, in whole blocks."""
    healing = [role for role in roles.values() if role.restart == "heal"]
    return max(round_up(role.min_processes, role.blocks) for role in healing)


def locate_rank(global_rank: int, plan: Plan) -> tuple[int, int]:
    """Return the node and the local rank of a process.

    Initial and spare ranks are numbered node by node. Ranks that join later are assigned to the nodes round-robin, in
    groups that must share a host (see :class:`Block`); if the gang does not heal, all go to the first node."""
    cluster, per_node = plan.cluster, plan.cluster.processes_per_node
    later = global_rank - cluster.all_nodes * per_node
    if later < 0:
        return global_rank // per_node, global_rank % per_node
    together, nodes = get_blocks(plan.roles)[0].together, cluster.all_nodes if can_heal(plan.roles) else 1
    turn, node = divmod(later // together, nodes)
    return node, per_node + turn * together + later % together


def find_role(global_rank: int, roles: Mapping[str, Role]) -> tuple[str, int]:
    """Return a process's role and its rank in that role.

    A rank beyond the plan joined the last role later. Raises ConfigError if that role cannot grow.
    """
    ranks = role_ranks(roles)
    for name, members in ranks.items():
        if global_rank in members:
            return name, global_rank - members.start
    if not roles[name].serves and roles[name].restart != "heal":
        raise ConfigError(f"rank {global_rank} has no role in a run of {members.stop} processes.")
    return name, global_rank - members.start
