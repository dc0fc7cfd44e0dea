"""Reads a process's rank and host from environment variables; no other module does."""

from __future__ import annotations

import json
import re
import socket
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from os import pathsep
from pathlib import Path
from typing import Any

from worldsize.errors import ConfigError, neighbours
from worldsize.world.topology import Topology, address_towards, expand_hosts

Environ = Mapping[str, str]
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the kernel's ephemeral ports


@dataclass(frozen=True)
class Placement:
    """Ranks, rendezvous and host of one process, as assigned by its launcher.

    Attributes:
        rank: Global rank in the run, from 0.
        world_size: Number of processes in the run.
        local_rank: Rank on this host, from 0.
        local_world_size: Number of processes on this host.
        store: Rendezvous of the ranks, an ``init_method`` for torch.distributed.
        attempt: Number of this attempt at the run, from 1.
        heartbeat: Path of the process's progress file.
        starts: Number of individual restarts of this process.
        address: Address at which other hosts reach this host.
        node: Index of this host in the run, from 0. None if it can be derived from the rank (equally filled hosts).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: str
    attempt: int = 1
    heartbeat: Path | None = None
    starts: int = 0
    address: str = "127.0.0.1"
    node: int | None = None

    @property
    def node_rank(self) -> int:
        """Index of this host in the run, from 0."""
        return self.rank // self.local_world_size if self.node is None else self.node

    def variables(self) -> dict[str, str]:
        """Return environment variables for :func:`placement`, with torchrun's names."""
        numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        names = dict(zip(_TORCHRUN, map(str, numbers), strict=True))
        beat = {"WORLDSIZE_HEARTBEAT": str(self.heartbeat)} if self.heartbeat else {}
        own = {"WORLDSIZE_STORE": self.store, "WORLDSIZE_ATTEMPT": str(self.attempt), **beat}
        own |= {"WORLDSIZE_STARTS": str(self.starts), "WORLDSIZE_ADDRESS": self.address}
        return {**names, "GROUP_RANK": str(self.node_rank), **own}


@dataclass(frozen=True)
class Node:
    """One of ``count`` hosts; ``first``: address of rank 0's host (None for a single host).

    ``absent``: names of the last hosts, lost by a healing gang that continues without them.
    """

    rank: int = 0
    count: int = 1
    first: str | None = None
    absent: tuple[str, ...] = ()

    @property
    def expected(self) -> range:
        """Node ranks of the hosts that connect to host 0, without absent ones."""
        return range(1, self.count - len(self.absent))


def derive_port(name: str, attempt: int = 1) -> int:
    """Derive a port from the run's name and attempt, identical on all nodes."""
    return _FIRST_PORT + zlib.crc32(f"{name}/{attempt}".encode()) % _PORTS


# ---------------------------------------------------------------- one process


def placement(environ: Environ, kind: str = "auto") -> Placement:
    """Read this process's placement; a process without a launcher is rank 0 of 1.

    ``kind`` is "torchrun", "openmpi", "slurm" (srun tasks) or "alone". "auto" selects the innermost launcher, such as
    torchrun inside Slurm. ``WORLDSIZE_STORE`` (a torch.distributed init method) takes precedence over MASTER_ADDR and
    MASTER_PORT.

    Raises:
        ConfigError: variables are missing, are not numbers, or contradict each other.
    """
    if kind == "auto":
        kind = next((name for name, (present, _) in _KINDS.items() if present(environ)), "alone")
    if kind not in _KINDS:
        raise ConfigError(f"cluster.environment={kind!r} is unknown{neighbours(kind, ('auto', *_KINDS))}")
    return _KINDS[kind][1](environ)


def _place_alone(environ: Environ) -> Placement:
    return Placement(rank=0, world_size=1, local_rank=0, local_world_size=1, store="env://")


def _torchrun(environ: Environ) -> Placement:
    numbers = _read_numbers(environ, _TORCHRUN)
    agents, tasks = environ.get("GROUP_WORLD_SIZE"), environ.get("SLURM_NTASKS")
    if "SLURM_STEP_ID" in environ and agents is not None and tasks is not None and agents != tasks:
        raise ConfigError(
            f"srun started {tasks} torchrun agents (SLURM_NTASKS), but GROUP_WORLD_SIZE={agents}, so the run would "
            f"start more than once. Pass --nnodes={tasks} and --rdzv-endpoint to torchrun, or set "
            "cluster.environment=torchrun to allow this."
        )
    attempt = _read_number(environ, "WORLDSIZE_ATTEMPT") if "WORLDSIZE_ATTEMPT" in environ else 1
    beat = Path(environ["WORLDSIZE_HEARTBEAT"]) if "WORLDSIZE_HEARTBEAT" in environ else None
    starts = _read_number(environ, "WORLDSIZE_STARTS") if "WORLDSIZE_STARTS" in environ else 0
    address = environ.get("WORLDSIZE_ADDRESS") or address_towards(environ.get("MASTER_ADDR", "127.0.0.1"))
    return _create_placement(numbers, environ.get("WORLDSIZE_STORE", "env://"), attempt, beat, starts, address)


def _read_openmpi(environ: Environ) -> Placement:
    return _create_placement(
        _read_numbers(environ, _OPENMPI), _choose_store(environ, environ.get("PMIX_NAMESPACE", "openmpi"))
    )


def _read_slurm(environ: Environ) -> Placement:
    numbers = _read_numbers(environ, _SLURM)
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(numbers[1])
    spread = _expand_counts(counts)
    if len(set(spread)) > 1:
        raise ConfigError(f"Slurm distributes the tasks unevenly over the nodes: {spread}. Set --ntasks-per-node.")
    return _create_placement([*numbers, spread[0]], _choose_store(environ, environ.get("SLURM_JOB_ID", "slurm")))


_KINDS: Mapping[str, tuple[Callable[[Environ], bool], Callable[[Environ], Placement]]] = {
    "torchrun": (lambda environ: any(name in environ for name in _TORCHRUN), _torchrun),
    "openmpi": (lambda environ: _OPENMPI[0] in environ, _read_openmpi),
    # inside an srun step; SLURM_PROCID alone is not enough, since a job's batch script has it, too
    "slurm": (lambda environ: "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ, _read_slurm),
    "alone": (lambda environ: True, _place_alone),
}
ENVIRONMENTS = tuple(_KINDS)  # allowed values for ``cluster.environment``, in addition to "auto"


def _create_placement(numbers: list[int], store: str, *rest: Any) -> Placement:
    rank, size, local_rank, local_size = numbers
    if not 0 <= rank < size or not 0 <= local_rank < local_size or size % local_size:
        raise ConfigError(
            f"invalid rank {rank} of {size} or local rank {local_rank} of {local_size}. Start workers with a launcher."
        )
    return Placement(rank, size, local_rank, local_size, store, *rest)


def _choose_store(environ: Environ, job: str) -> str:
    """Return the rendezvous; by default, the first host at a port derived from the job."""
    if "WORLDSIZE_STORE" in environ:
        return environ["WORLDSIZE_STORE"]
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return "env://"
    return f"tcp://{_first_of_slurm(environ) or '127.0.0.1'}:{derive_port(job)}"


# ---------------------------------------------------------------- one host


def read_node(
    environ: Environ,
    topology: Topology | None = None,
    tiers: Mapping[str, int] | None = None,
    *,
    spare_nodes: int = 0,
) -> Node:
    """Read this node's rank from Kubernetes (indexed job), SkyPilot or Slurm (a task per node).

    Without any of these, it is the only host. ``WORLDSIZE_NODE_RANK``, ``WORLDSIZE_NODES`` and ``WORLDSIZE_FIRST`` take
    precedence. Slurm's hosts are ordered by ``topology``; all but the last ``spare_nodes`` must form the ``tiers``.

    Raises:
        ConfigError: variables are missing, are not numbers, or contradict each other or the topology.
    """
    if "WORLDSIZE_NODES" in environ:
        own = "WORLDSIZE_NODE_RANK" if "WORLDSIZE_NODE_RANK" in environ else "JOB_COMPLETION_INDEX"
        rank, count = _read_numbers(environ, (own, "WORLDSIZE_NODES"))
        rank += int(environ.get("WORLDSIZE_NODE_OFFSET", "0"))  # a separate job counts its hosts from 0
        absent = tuple(filter(None, environ.get("WORLDSIZE_ABSENT", "").split(",")))
        if len(absent) >= count:
            raise ConfigError(
                f"WORLDSIZE_ABSENT lists {len(absent)} of {count} nodes; at least one node must be present."
            )
        return replace(_create_node(rank, count, environ.get("WORLDSIZE_FIRST")), absent=absent)
    if "SKYPILOT_NODE_RANK" in environ:
        rank, count = _read_numbers(environ, ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"))
        hosts = environ.get("SKYPILOT_NODE_IPS", "").split()
        if len(hosts) != count:
            raise ConfigError(f"SKYPILOT_NUM_NODES={count}, but SKYPILOT_NODE_IPS lists {len(hosts)} hosts: {hosts}.")
        return _create_node(rank, count, hosts[0])
    if "SLURM_STEP_ID" in environ and "SLURM_NODEID" in environ:
        rank, count, tasks = _read_numbers(environ, ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"))
        if tasks != count:
            raise ConfigError(
                f"srun started {tasks} tasks on {count} nodes; expected one task per node. Set --ntasks-per-node=1."
            )
        if topology is not None and count > 1:
            hosts = topology.order_hosts(expand_hosts(environ["SLURM_STEP_NODELIST"]))
            topology.check_tiers(hosts[: count - spare_nodes], tiers or {})
            return _create_node(hosts.index(host_name(environ)), count, hosts[0])
        return _create_node(rank, count, _first_of_slurm(environ))
    return Node()


def _create_node(rank: int, count: int, first: str | None) -> Node:
    if not 0 <= rank < count:
        raise ConfigError(f"invalid node rank {rank} of {count}. Start agents with a launcher.")
    if count > 1 and not first:
        raise ConfigError(f"the name of the first of {count} nodes is not set. Set WORLDSIZE_FIRST.")
    return Node(rank, count, first)


def _first_of_slurm(environ: Environ) -> str | None:
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    return first_host(names) if names else None


def first_host(names: str) -> str:
    """Return the first host of a Slurm node list such as "gpu[03-07,12],cpu1"."""
    host = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", names)
    return "".join(part or "" for part in host.groups()) if host else names


def _expand_counts(text: str) -> list[int]:
    """Expand Slurm's task counts: "2(x3),1" becomes [2, 2, 2, 1]."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]


_JOB = {
    "id": "SLURM_JOB_ID",
    "array": "SLURM_ARRAY_JOB_ID",
    "array_task": "SLURM_ARRAY_TASK_ID",
    "partition": "SLURM_JOB_PARTITION",
    "nodes": "SLURM_JOB_NODELIST",
}


def read_job(environ: Environ) -> dict[str, Any] | None:
    """Describe this process's scheduler job for the manifest; None without a scheduler."""
    if "SKYPILOT_TASK_ID" in environ:  # unchanged after a recovery
        return {"scheduler": "skypilot", "id": environ["SKYPILOT_TASK_ID"]}
    if "SLURM_JOB_ID" not in environ:
        return None
    facts = {key: environ[name] for key, name in _JOB.items() if name in environ}
    return {"scheduler": "slurm", **facts, "requeues": int(environ.get("SLURM_RESTART_COUNT", "0"))}


# ---------------------------------------------------------------- other variables


def host_name(environ: Environ) -> str:
    """Return the scheduler's name for this host, or else the host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_lost_first(environ: Environ) -> str | None:
    """Return the previous attempt's first host if it was lost and a different host now leads."""
    return environ.get("WORLDSIZE_LOST_FIRST") or None


def read_image_name(environ: Environ) -> str | None:
    """Return the name of this process's container image, if its launcher has set it."""
    return environ.get("WORLDSIZE_IMAGE") or None


def meeting_name(run_id: str, environ: Environ) -> str:
    """Return the name that determines the rendezvous port; it changes at a requeue.

    Leftover processes of the previous start may still hold the old port.
    """
    return run_id + environ.get("SLURM_RESTART_COUNT", "")


def _read_numbers(environ: Environ, names: tuple[str, ...]) -> list[int]:
    missing = [name for name in names if name not in environ]
    if missing:
        present = [name for name in names if name in environ]
        raise ConfigError(
            f"missing environment variables: {', '.join(missing)} (set: {', '.join(present) or 'none'}). "
            "Start workers with torchrun or a launcher, or unset all of these variables."
        )
    return [_read_number(environ, name) for name in names]


def _read_number(environ: Environ, name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} is not a number. Start workers with a launcher.") from None


def plugin_folders(environ: Environ) -> list[Path]:
    """Return the folders listed in ``WORLDSIZE_PLUGINS``, which uses the same separator as PATH."""
    return [Path(entry) for entry in environ.get("WORLDSIZE_PLUGINS", "").split(pathsep) if entry]


def withheld_secrets(environ: MutableMapping[str, str]) -> list[tuple[list[str | int], Any]]:
    """Pop the configuration's secrets, which are not written to files, from ``WORLDSIZE_SECRETS``.

    Child processes do not inherit the variable. Returns pairs of a configuration key path and its value.
    """
    return [(keys, value) for keys, value in json.loads(environ.pop("WORLDSIZE_SECRETS", "[]"))]
