"""Reads from the kernel which cores, GPUs and InfiniBand adapters of this machine are close to each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

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
