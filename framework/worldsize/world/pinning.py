"""Pins processes to cores and memory near their GPUs, or to exclusive shares of these.

The kernel reports the NUMA nodes of cores, GPUs and InfiniBand adapters.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, final

from worldsize.core import Cluster, Pinning
from worldsize.errors import ConfigError

_logger = logging.getLogger(__name__)

_PREFERRED = 1  # MPOL_PREFERRED of set_mempolicy(2): fall back to other nodes when this one is full
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers


@final
@dataclass(frozen=True)
class Pin:
    """Cores, memory and nearby devices assigned to one process.

    Attributes:
        cores: Logical processors on which the process and its threads may run.
        numa: NUMA node of its memory.
        gpu: PCI address of its GPU; None if it has no GPU.
        adapters: InfiniBand and RoCE adapters at the same NUMA node, for information; NCCL finds them by itself.
    """

    cores: frozenset[int]
    numa: int
    gpu: str | None
    adapters: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return the pin as plain values."""
        near = {"adapters": list(self.adapters)} if self.adapters else {}
        return {
            "cores": format_ranges(self.cores),
            "numa": self.numa,
            **({"gpu": self.gpu} if self.gpu else {}),
            **near,
        }

    def __str__(self) -> str:
        near = " and ".join(filter(None, (self.gpu and f"GPU {self.gpu}", ", ".join(self.adapters))))
        return f"cores {format_ranges(self.cores)}, memory of NUMA node {self.numa}" + (
            f", near {near}" if near else ""
        )


@final
@dataclass(frozen=True)
class Pins:
    """Pins of a machine's processes by local rank, or the ``reason`` for not pinning them."""

    processes: tuple[Pin, ...] = ()
    reason: str = ""

    def get_pin(self, local_rank: int) -> Pin | None:
        """Return the pin of a process; None if not pinned, such as one that joined later."""
        return self.processes[local_rank] if local_rank < len(self.processes) else None

    def describe(self) -> dict[str, Any]:
        """Return the pins, or the reason for their absence, as plain values for the manifest."""
        if not self.processes:
            return {"reason": self.reason}
        return {"processes": [{"local_rank": rank, **pin.describe()} for rank, pin in enumerate(self.processes)]}


def plan_pins(
    pinning: Pinning, machine: MachineTopology, *, usable: Set[int], processes: int, gpus: Sequence[str] = ()
) -> Pins:
    """Assign cores and memory to the run's processes on this machine.

    "numa" gives a process all cores of one NUMA node, preferably its GPU's. "exclusive" gives it an equal share of
    these cores, without overlap with other processes. "auto" behaves like "numa" on a machine with several NUMA nodes
    that get the same number of processes (or whose GPUs are known), unless this process is already bound to some cores.

    Args:
        pinning: The value of ``cluster.pin``.
        machine: The machine's topology.
        usable: Logical processors on which this process may run.
        processes: Number of the run's processes on this machine.
        gpus: PCI addresses of the GPUs, indexed by local rank; empty for training on CPUs.

    Raises:
        ConfigError: fewer GPUs than processes (except for "auto"), or fewer physical cores for "exclusive".
    """
    nodes = {number: own & usable for number, own in machine.numa.items() if own & usable}
    if pinning == "none" or not nodes:
        return Pins(reason="cluster.pin=none" if pinning == "none" else "the kernel does not report the cores")
    if pinning == "auto" and (reason := _why_not(machine, nodes, usable, processes, gpus)):
        return Pins(reason=reason)
    if reason := _too_few(gpus, processes):
        raise ConfigError(f"cluster.pin={pinning}: {reason}. Set cluster.pin=none, or start fewer processes.")
    homes = _assign_numa_nodes(machine, nodes, processes, gpus)
    cores = [nodes[home] for home in homes]
    if pinning == "exclusive":
        cores = _split_cores(machine, nodes, homes)
    near = {node: tuple(name for name, at in machine.adapters.items() if at == node) for node in nodes}
    addresses = [*gpus] if gpus else [None] * processes
    return Pins(tuple(Pin(own, home, gpu, near[home]) for own, home, gpu in zip(cores, homes, addresses, strict=True)))


def _why_not(
    machine: MachineTopology, nodes: Mapping[int, Set[int]], usable: Set[int], processes: int, gpus: Sequence[str]
) -> str:
    """Return the reason why "auto" does not pin the processes; empty if it pins them."""
    if usable < machine.cores:
        return f"this process is already bound to cores {format_ranges(usable)} of {format_ranges(machine.cores)}"
    if len(nodes) == 1:
        return "the machine has a single NUMA node"
    if reason := _too_few(gpus, processes):
        return reason
    if gpus and any(machine.gpus.get(gpu) not in nodes for gpu in gpus):
        return "the kernel does not report the NUMA nodes of the GPUs"
    if not gpus and processes % len(nodes):
        return f"{processes} processes cannot be divided evenly over {len(nodes)} NUMA nodes"
    return ""


def _too_few(gpus: Sequence[str], processes: int) -> str:
    return f"found {len(gpus)} visible GPUs for {processes} processes" if 0 < len(gpus) < processes else ""


def _assign_numa_nodes(
    machine: MachineTopology, nodes: Mapping[int, Set[int]], processes: int, gpus: Sequence[str]
) -> list[int]:
    """Return the NUMA node per process: the node of its GPU, or else a node shared by neighboring ranks."""
    order = sorted(nodes)
    spread = [order[rank * len(order) // processes] for rank in range(processes)]
    known = [machine.gpus.get(gpu) for gpu in gpus] or [None] * processes
    return [home if home in nodes else other for home, other in zip(known, spread, strict=True)]  # type: ignore[misc]


def _split_cores(
    machine: MachineTopology, nodes: Mapping[int, frozenset[int]], homes: Sequence[int]
) -> list[frozenset[int]]:
    """Split the physical cores of each NUMA node among its processes, in rank order."""
    shares = dict[int, frozenset[int]]()
    for home in set(homes):
        ranks = [rank for rank, own in enumerate(homes) if own == home]
        by_core = sorted(nodes[home], key=lambda core: (machine.physical[core], core))
        cores = [frozenset(same) for _, same in groupby(by_core, key=lambda core: machine.physical[core])]
        if len(cores) < len(ranks):
            raise ConfigError(
                f"cluster.pin=exclusive: NUMA node {home} has {len(cores)} physical cores for {len(ranks)} processes. "
                "Set cluster.pin=numa or none, or start fewer processes."
            )
        for place, rank in enumerate(ranks):
            each, more = divmod(len(cores), len(ranks))
            begin, end = (rank_before * each + min(rank_before, more) for rank_before in (place, place + 1))
            shares[rank] = frozenset[int]().union(*cores[begin:end])
    return [shares[rank] for rank in range(len(homes))]


def pins_here(cluster: Cluster, environ: Mapping[str, str], *, machine: MachineTopology | None = None) -> Pins:
    """Plan the pins of this machine's processes before they start.

    ``machine`` is the machine's topology; None reads it from the kernel.

    Raises:
        ConfigError: the processes cannot be pinned as ``cluster.pin`` requires.
    """
    if cluster.pin == "none":
        return Pins(reason="cluster.pin=none")
    machine, processes = machine or read_topology(), cluster.processes_per_node
    gpus = visible_gpus(machine, environ, processes) if cluster.device == "cuda" else []
    return plan_pins(cluster.pin, machine, usable=os.sched_getaffinity(0), processes=processes, gpus=gpus)


FEW_CPUS = "Request more CPUs (with Slurm: cluster.cpus_per_task), or reduce cluster.threads or data_workers."


def few_cpus(cluster: Cluster, usable: int) -> str:
    """Describe the shortage if a node's processes need more than ``usable`` CPUs, else ""."""
    if usable >= cluster.cpus_per_node:
        return ""
    return f"{cluster.processes_per_node} processes require {cluster.cpus_per_node} CPUs, but can use only {usable}"


def pin_process(cluster: Cluster, *, local_rank: int, processes: int, has_launcher: bool) -> Pin | None:
    """Pin this process according to ``cluster.pin``; return the pin, or None if the process is not pinned.

    Call this after a process has selected its GPU. If worldsize did not launch it (``has_launcher``), keep a
    binding by torchrun, srun or mpirun: they may have bound the other processes to other cores.

    Raises:
        ConfigError: this process cannot be pinned.
    """
    if cluster.pin == "none":
        return None
    machine, usable = read_topology(), os.sched_getaffinity(0)
    if cluster.pin == "auto" and len(machine.numa) == 1:  # avoid querying CUDA
        return None
    if not has_launcher and usable < machine.cores:
        text = "cluster.pin=%s is ignored: the parent process has already bound this process to cores %s"
        _logger.info(text, cluster.pin, format_ranges(usable))
        return None
    gpus = cuda_gpus(processes) if cluster.device == "cuda" else []
    pins = plan_pins(cluster.pin, machine, usable=usable, processes=processes, gpus=gpus)
    if pin := pins.get_pin(local_rank):
        apply_pin(pin)
    return pin


def visible_gpus(machine: MachineTopology, environ: Mapping[str, str], processes: int) -> list[str]:
    """Predict the PCI addresses of this machine's GPUs by local rank, without starting CUDA.

    CUDA numbers GPUs of one model by address; CUDA_VISIBLE_DEVICES may select a subset of them.
    """
    addresses = [*machine.gpus]
    chosen = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(each.strip().isdecimal() for each in chosen):
        addresses = [addresses[int(each)] for each in chosen if int(each) < len(addresses)]
    return addresses[:processes]


def cuda_gpus(processes: int) -> list[str]:
    """Return the PCI addresses of this machine's GPUs by local rank, in CUDA's order.

    If each process sees only its own GPU, as with ``srun --gpus-per-task=1``, return that address for all processes.
    """
    import torch

    indices = [0] * processes if torch.cuda.device_count() == 1 else range(processes)
    properties: list[Any] = [torch.cuda.get_device_properties(index) for index in indices]
    return [f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0" for each in properties]


def apply_pin(pin: Pin) -> None:
    """Bind this process's threads and memory to ``pin``; child processes inherit both."""
    for thread in Path("/proc/self/task").iterdir():  # including threads that CUDA started
        with suppress(OSError):  # the thread has exited
            os.sched_setaffinity(int(thread.name), pin.cores)
    if not _prefer_memory(pin.numa):
        _logger.info("set_mempolicy is not permitted; memory is allocated on the NUMA node of the first access")
    _logger.info("pinned to %s", pin)


def _prefer_memory(node: int) -> bool:
    """Prefer memory of NUMA node ``node``; return whether the kernel accepts that.

    Containers often forbid this. Memory then comes from the node of the core that first touches it.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    code: int = ctypes.CDLL(None).syscall(number, _PREFERRED, mask, ctypes.c_ulong(bits * len(mask)))
    return code == 0


_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")  # PCI vendor ID; PCI classes of GPUs with and without a display


@final
@dataclass(frozen=True)
class MachineTopology:
    """A machine's cores, NUMA nodes, GPUs and network adapters.

    Attributes:
        cores: Logical processors that are online.
        numa: Logical processors by NUMA node number; nodes without processors are omitted.
        physical: Maps each logical processor to the lowest-numbered one on the same physical core.
        gpus: NUMA nodes of the GPUs by PCI address, sorted by address; None if unknown to the kernel.
        adapters: NUMA nodes of the InfiniBand and RoCE adapters by name; None if unknown to the kernel.
    """

    cores: frozenset[int]
    numa: Mapping[int, frozenset[int]]
    physical: Mapping[int, int]
    gpus: Mapping[str, int | None]
    adapters: Mapping[str, int | None]


def read_topology(root: Path = Path("/")) -> MachineTopology:
    """Read the machine's topology from ``/sys`` below ``root``.

    If the kernel does not report NUMA nodes, as in some containers, all processors form one node.
    """
    system, devices = root / "sys/devices/system", root / "sys/bus/pci/devices"
    cores = frozenset(parse_ranges(_read_text(system / "cpu/online")))
    numa = {
        int(folder.name.removeprefix("node")): cores & frozenset(parse_ranges(_read_text(folder / "cpulist")))
        for folder in sorted((system / "node").glob("node[0-9]*"))
    }
    siblings = {core: _read_text(system / f"cpu/cpu{core}/topology/thread_siblings_list") for core in cores}
    gpus = {
        folder.name: _numa_node(folder)
        for folder in sorted(devices.glob("*"))
        if _read_text(folder / "vendor") == _NVIDIA and _read_text(folder / "class").startswith(_DISPLAYS)
    }
    adapters = {
        folder.name: _numa_node(folder / "device") for folder in sorted((root / "sys/class/infiniband").glob("*"))
    }
    return MachineTopology(
        cores,
        {node: own for node, own in numa.items() if own} or {0: cores},
        {core: min(parse_ranges(text), default=core) for core, text in siblings.items()},
        gpus,
        adapters,
    )


def _read_text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _numa_node(device: Path) -> int | None:
    """Return a PCI device's NUMA node; None if unknown (-1 in the kernel)."""
    text = _read_text(device / "numa_node")
    return int(text) if re.fullmatch(r"\d+", text, re.ASCII) else None


def parse_ranges(text: str) -> list[int]:
    """Expand the kernel's list format: "0-3,8" becomes [0, 1, 2, 3, 8]."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [number for first, last in spans for number in range(int(first), int(last or first) + 1)]


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers in the kernel's list format, such as "0-3,8"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
