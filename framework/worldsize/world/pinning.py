"""Pins each process to the cores and memory next to its GPU, or to a part of the machine of its own.

Which cores, GPUs and InfiniBand adapters are close to each other is read from the kernel.
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

_PREFERRED = 1  # MPOL_PREFERRED of set_mempolicy(2): other memory is taken once this is full
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call


@final
@dataclass(frozen=True)
class Pin:
    """The place of one process on its machine.

    Attributes:
        cores: Logical processors that it and its threads may run on.
        numa: NUMA node of its memory.
        gpu: PCI address of its GPU; None: it has none.
        adapters: InfiniBand and RoCE adapters at the same NUMA node, which NCCL finds by itself.
    """

    cores: frozenset[int]
    numa: int
    gpu: str | None
    adapters: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return it as plain values."""
        near = {"adapters": list(self.adapters)} if self.adapters else {}
        return {"cores": shortened(self.cores), "numa": self.numa, **({"gpu": self.gpu} if self.gpu else {}), **near}

    def __str__(self) -> str:
        near = " and ".join(filter(None, (self.gpu and f"GPU {self.gpu}", ", ".join(self.adapters))))
        return f"cores {shortened(self.cores)}, memory of NUMA node {self.numa}" + (f", near {near}" if near else "")


@final
@dataclass(frozen=True)
class Pins:
    """The places of the processes of a machine by local rank; without any they are not pinned, for a ``reason``."""

    processes: tuple[Pin, ...] = ()
    reason: str = ""

    def of(self, local_rank: int) -> Pin | None:
        """Return the place of a process; one that joined later has none."""
        return self.processes[local_rank] if local_rank < len(self.processes) else None

    def describe(self) -> dict[str, Any]:
        """Return them as plain values, for the manifest."""
        if not self.processes:
            return {"reason": self.reason}
        return {"processes": [{"local_rank": rank, **pin.describe()} for rank, pin in enumerate(self.processes)]}


def plan_pins(
    pinning: Pinning, machine: MachineTopology, *, usable: Set[int], processes: int, gpus: Sequence[str] = ()
) -> Pins:
    """Decide where the processes of this machine run.

    "numa": on all cores of a NUMA node, that of its GPU if it has one. "exclusive": on an equal part of these, which no
    other process of the run has. "auto": as "numa" if there are several NUMA nodes, and each gets as many processes,
    unless somebody has bound this process already.

    Args:
        pinning: The value of ``cluster.pin``.
        machine: The machine.
        usable: Logical processors that this process may run on.
        processes: Number of processes of the run on this machine.
        gpus: PCI addresses of their GPUs by local rank; empty if they train on CPUs.

    Raises:
        ConfigError: not "auto", and there are fewer GPUs than processes; "exclusive", and fewer physical cores.
    """
    nodes = {number: own & usable for number, own in machine.numa.items() if own & usable}
    if pinning == "none" or not nodes:
        return Pins(reason="cluster.pin=none" if pinning == "none" else "the kernel does not say which cores there are")
    if pinning == "auto" and (reason := _why_not(machine, nodes, usable, processes, gpus)):
        return Pins(reason=reason)
    if reason := _too_few(gpus, processes):
        raise ConfigError(f"cluster.pin={pinning}: {reason}. Set cluster.pin=none, or start fewer processes.")
    homes = _homes(machine, nodes, processes, gpus)
    cores = [nodes[home] for home in homes]
    if pinning == "exclusive":
        cores = _shares(machine, nodes, homes)
    near = {node: tuple(name for name, at in machine.adapters.items() if at == node) for node in nodes}
    addresses = [*gpus] if gpus else [None] * processes
    return Pins(tuple(Pin(own, home, gpu, near[home]) for own, home, gpu in zip(cores, homes, addresses, strict=True)))


def _why_not(
    machine: MachineTopology, nodes: Mapping[int, Set[int]], usable: Set[int], processes: int, gpus: Sequence[str]
) -> str:
    """Return why "auto" leaves the processes to the kernel; empty if it pins them."""
    if usable < machine.cores:
        return f"this process is bound to cores {shortened(usable)} of {shortened(machine.cores)} already"
    if len(nodes) == 1:
        return "the machine has one NUMA node, so no memory is nearer than other memory"
    if reason := _too_few(gpus, processes):
        return reason
    if gpus and any(machine.gpus.get(gpu) not in nodes for gpu in gpus):
        return "the kernel does not say to which NUMA nodes the GPUs belong"
    if not gpus and processes % len(nodes):
        return f"{processes} processes do not divide over {len(nodes)} NUMA nodes"
    return ""


def _too_few(gpus: Sequence[str], processes: int) -> str:
    return f"{processes} processes see {len(gpus)} GPUs here" if 0 < len(gpus) < processes else ""


def _homes(machine: MachineTopology, nodes: Mapping[int, Set[int]], processes: int, gpus: Sequence[str]) -> list[int]:
    """Return the NUMA node of each process: that of its GPU if it is known, else neighbouring ranks share one."""
    order = sorted(nodes)
    spread = [order[rank * len(order) // processes] for rank in range(processes)]
    known = [machine.gpus.get(gpu) for gpu in gpus] or [None] * processes
    return [home if home in nodes else other for home, other in zip(known, spread, strict=True)]  # type: ignore[misc]


def _shares(
    machine: MachineTopology, nodes: Mapping[int, frozenset[int]], homes: Sequence[int]
) -> list[frozenset[int]]:
    """Divide the physical cores of each NUMA node over its processes, in order of their ranks."""
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
    """Decide where the processes of this machine run, before they are started.

    ``machine``: its topology; None: it is read from the kernel.

    Raises:
        ConfigError: they cannot be pinned as ``cluster.pin`` asks.
    """
    if cluster.pin == "none":
        return Pins(reason="cluster.pin=none")
    machine, processes = machine or read_topology(), cluster.processes_per_node
    gpus = visible_gpus(machine, environ, processes) if cluster.device == "cuda" else []
    return plan_pins(cluster.pin, machine, usable=os.sched_getaffinity(0), processes=processes, gpus=gpus)


FEW_CPUS = "Ask for more (with Slurm: cluster.cpus_per_task), or lower cluster.threads or data_workers."


def few_cpus(cluster: Cluster, usable: int) -> str:
    """Describe that a node's processes may run on only ``usable`` CPUs; empty if these are enough for them."""
    if usable >= cluster.cpus_per_node:
        return ""
    return f"{cluster.processes_per_node} processes need {cluster.cpus_per_node} CPUs and may run on {usable}"


def pin_process(cluster: Cluster, *, local_rank: int, processes: int, has_launcher: bool) -> Pin | None:
    """Pin this process, one of several on this machine, as ``cluster.pin`` asks; return its place, None: not pinned.

    A process that trains on a GPU has chosen it by now. One that has no launcher of worldsize, but torchrun, srun or
    mpirun, and that is bound to some cores, stays there: they may have given other cores to the others.

    Raises:
        ConfigError: it cannot be pinned.
    """
    if cluster.pin == "none":
        return None
    machine, usable = read_topology(), os.sched_getaffinity(0)
    if cluster.pin == "auto" and len(machine.numa) == 1:  # CUDA need not be asked
        return None
    if not has_launcher and usable < machine.cores:
        text = "cluster.pin=%s: this process stays on cores %s, to which what has started it has bound it"
        _logger.info(text, cluster.pin, shortened(usable))
        return None
    gpus = cuda_gpus(processes) if cluster.device == "cuda" else []
    pins = plan_pins(cluster.pin, machine, usable=usable, processes=processes, gpus=gpus)
    if pin := pins.of(local_rank):
        apply_pin(pin)
    return pin


def visible_gpus(machine: MachineTopology, environ: Mapping[str, str], processes: int) -> list[str]:
    """Guess the PCI addresses of the GPUs of this machine by local rank, before CUDA is there to ask.

    GPUs of one model are numbered in the order of their addresses; CUDA_VISIBLE_DEVICES may choose among them.
    """
    addresses = [*machine.gpus]
    chosen = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(each.strip().isdecimal() for each in chosen):
        addresses = [addresses[int(each)] for each in chosen if int(each) < len(addresses)]
    return addresses[:processes]


def cuda_gpus(processes: int) -> list[str]:
    """Return the PCI addresses of the GPUs of the processes of this machine, as CUDA numbers them.

    Where each process sees its own alone, as with ``srun --gpus-per-task=1``, the others count as near the same one.
    """
    import torch

    indices = [0] * processes if torch.cuda.device_count() == 1 else range(processes)
    properties: list[Any] = [torch.cuda.get_device_properties(index) for index in indices]
    return [f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0" for each in properties]


def apply_pin(pin: Pin) -> None:
    """Restrict this process, its threads and its later children to the cores, and let them prefer the memory."""
    for thread in Path("/proc/self/task").iterdir():  # also those that CUDA has started
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), pin.cores)
    if not _prefer_memory(pin.numa):
        _logger.info("set_mempolicy is not allowed here: memory comes from wherever its first user runs")
    _logger.info("pinned to %s", pin)


def _prefer_memory(node: int) -> bool:
    """Let the kernel take memory from the NUMA node as long as it has some; return whether it agrees.

    Containers often forbid it; then memory still comes from the node of the core that touches it first.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    code: int = ctypes.CDLL(None).syscall(number, _PREFERRED, mask, ctypes.c_ulong(bits * len(mask)))
    return code == 0


_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")  # PCI vendor; classes of GPUs with and without a display


@final
@dataclass(frozen=True)
class MachineTopology:
    """A machine.

    Attributes:
        cores: Its logical processors that are online.
        numa: The logical processors of each NUMA node that has some, by its number.
        physical: The lowest logical processor of the same physical core, by logical processor.
        gpus: NUMA nodes of its GPUs by PCI address, in the order of the addresses; None: the kernel does not know.
        adapters: NUMA nodes of its InfiniBand and RoCE adapters by name; None: the kernel does not know.
    """

    cores: frozenset[int]
    numa: Mapping[int, frozenset[int]]
    physical: Mapping[int, int]
    gpus: Mapping[str, int | None]
    adapters: Mapping[str, int | None]


def read_topology(root: Path = Path("/")) -> MachineTopology:
    """Read the topology of the machine whose ``/sys`` is below ``root``.

    Where the kernel says nothing, as in some containers, all processors are one NUMA node.
    """
    system, devices = root / "sys/devices/system", root / "sys/bus/pci/devices"
    cores = frozenset(listed(_text(system / "cpu/online")))
    numa = {
        int(folder.name.removeprefix("node")): cores & frozenset(listed(_text(folder / "cpulist")))
        for folder in sorted((system / "node").glob("node[0-9]*"))
    }
    siblings = {core: _text(system / f"cpu/cpu{core}/topology/thread_siblings_list") for core in cores}
    gpus = {
        folder.name: _numa_node(folder)
        for folder in sorted(devices.glob("*"))
        if _text(folder / "vendor") == _NVIDIA and _text(folder / "class").startswith(_DISPLAYS)
    }
    adapters = {
        folder.name: _numa_node(folder / "device") for folder in sorted((root / "sys/class/infiniband").glob("*"))
    }
    return MachineTopology(
        cores,
        {node: own for node, own in numa.items() if own} or {0: cores},
        {core: min(listed(text), default=core) for core, text in siblings.items()},
        gpus,
        adapters,
    )


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _numa_node(device: Path) -> int | None:
    """Return the NUMA node of a PCI device; None: the kernel does not know it, which it writes as -1."""
    text = _text(device / "numa_node")
    return int(text) if re.fullmatch(r"\d+", text, re.ASCII) else None


def listed(text: str) -> list[int]:
    """Expand the kernel's "0-3,8" to [0, 1, 2, 3, 8]."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [number for first, last in spans for number in range(int(first), int(last or first) + 1)]


def shortened(numbers: Iterable[int]) -> str:
    """Write numbers as the kernel does: "0-3,8"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
