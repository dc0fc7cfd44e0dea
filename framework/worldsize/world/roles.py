"""Assigns roles to processes, by their global rank."""

from __future__ import annotations

from collections.abc import Mapping

from worldsize.core import ConfigError, Plan, Role


def role_ranks(roles: Mapping[str, Role]) -> dict[str, range]:
    """Return the global ranks of each role: consecutive, in the order of ``roles``."""
    ranks, start = {}, 0
    for name, role in roles.items():
        ranks[name] = range(start, start + role.processes)
        start += role.processes
    return ranks


def heals(roles: Mapping[str, Role]) -> bool:
    """Return whether processes go on without those of their gang that die."""
    return any(role.restart == "heal" for role in roles.values())


def block_of(roles: Mapping[str, Role]) -> int:
    """Return how many processes train one part of the data together; those of a gang that heals come in such blocks."""
    return max(role.block for role in roles.values())


def together_of(roles: Mapping[str, Role]) -> int:
    """Return how many processes of a block must be on one host."""
    return max(role.together for role in roles.values())


def whole_blocks(processes: int | None, block: int) -> int:
    """Return so many processes, or 1, rounded up to whole blocks."""
    return -(-(processes or 1) // block) * block


def fewest(roles: Mapping[str, Role]) -> int:
    """Return the least number of processes, in whole blocks, with which a gang that heals goes on."""
    healing = [role for role in roles.values() if role.restart == "heal"]
    return max(whole_blocks(role.min_processes, role.block) for role in healing)


def place_of(global_rank: int, plan: Plan) -> tuple[int, int]:
    """Return the node of a process, and its rank on that node.

    Those of the plan and of spare nodes are in the order of the nodes. Of those that join later each node gets as many
    as must be on one host, in turn; in a gang that does not heal they are all on the first node.
    """
    cluster, per_node = plan.cluster, plan.cluster.processes_per_node
    later = global_rank - cluster.all_nodes * per_node
    if later < 0:
        return global_rank // per_node, global_rank % per_node
    together, nodes = together_of(plan.roles), cluster.all_nodes if heals(plan.roles) else 1
    turn, node = divmod(later // together, nodes)
    return node, per_node + turn * together + later % together


def role_of(global_rank: int, roles: Mapping[str, Role]) -> tuple[str, int]:
    """Return the role of a process and its rank in that role.

    A process with a rank beyond the plan joined later, in the last role. Raises ConfigError if that role cannot grow.
    """
    ranks = role_ranks(roles)
    for name, members in ranks.items():
        if global_rank in members:
            return name, global_rank - members.start
    if not roles[name].serves and roles[name].restart != "heal":
        raise ConfigError(f"rank {global_rank} has no role in a run of {members.stop} processes.")
    return name, global_rank - members.start
