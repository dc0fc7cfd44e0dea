"""Reads the counters of this node: processors, memory, swap space, disk, networks, and the processes of the run."""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import psutil

from worldsize.observe.health.gpus import GpuReading, Gpus
from worldsize.observe.health.memory import Memory, within
from worldsize.world.parent import RANK_NAME

_INFINIBAND = Path("/sys/class/infiniband")
# interfaces whose packets pass another one or an adapter that counts them, too, or none
_NOT_REAL = re.compile(
    r"lo\d*$|veth|docker|br-|br\d|virbr|cali|cilium|lxc|flannel|cni|tun|tap|bond|team|vlan|vxlan|macvlan|dummy"
    r"|ib\w|\w+\.\d+$"  # IPoIB, whose packets pass an InfiniBand adapter; eth0.100, those of a VLAN, pass eth0
)
_IB_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
_WORD = 4  # bytes; the unit of port_xmit_data and port_rcv_data (kernel documentation, ABI sysfs-class-infiniband)


class Network(NamedTuple):
    """Bytes received and sent since the node was started, and errors in that time."""

    received: int
    sent: int
    errors: int


@final
@dataclass(frozen=True)
class Counters:
    """Everything that was read of a node at one moment.

    Attributes:
        at: Seconds of a clock that never goes back.
        busy: Seconds that its processors have worked since it was started, summed over them.
        idle: Seconds for which they have not.
        own: Seconds that processes of the run have used, by process id.
        memory: Its memory, or that of the container.
        swap_used: Bytes in its swap space.
        swapped: Bytes that were moved between memory and swap space since it was started.
        disk: Bytes in use and in all of the file system that holds the run folder.
        network: Its network interfaces together.
        resident: Resident bytes of the process of each rank, by its global rank.
        cpus: Logical processors that these processes may run on, together.
        gpus: Its GPUs.
    """

    at: float
    busy: float
    idle: float
    own: Mapping[int, float]
    memory: Memory
    swap_used: int
    swapped: int
    disk: Memory
    network: Network
    resident: Mapping[int, int]
    cpus: Set[int]
    gpus: Sequence[GpuReading]


def read_counters(root: int, folder: Path, gpus: Gpus, *, infiniband: Path = _INFINIBAND) -> Counters:
    """Read the counters of this node, which takes a few milliseconds.

    Args:
        root: Id of a process that all processes of the run on this node descend from.
        folder: The run folder.
        gpus: The GPUs of this node.
        infiniband: Where the kernel shows InfiniBand adapters, whose bytes pass no network interface.
    """
    times, machine = psutil.cpu_times(), psutil.virtual_memory()
    with warnings.catch_warnings():  # a container may hide how much is swapped, which is 0 then
        warnings.simplefilter("ignore")
        swap = psutil.swap_memory()
    # a guest's time is in user and nice already
    idle = times.idle + getattr(times, "iowait", 0.0)
    everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    disk = shutil.disk_usage(folder)
    networks = [*_interfaces(), *_adapters(infiniband)]
    own, resident, cpus = _processes(root)
    return Counters(
        at=time.monotonic(),
        busy=everything - idle,
        idle=idle,
        own=own,
        memory=within(Memory(machine.total - machine.available, machine.total)),
        swap_used=swap.used,
        swapped=swap.sin + swap.sout,
        disk=Memory(disk.total - disk.free, disk.total),
        network=Network(*map(sum, zip(Network(0, 0, 0), *networks, strict=True))),
        resident=resident,
        cpus=cpus,
        gpus=gpus.read(),
    )


def _interfaces() -> Iterator[Network]:
    """Yield the counters of each network interface that leads out of this node."""
    with suppress(OSError):
        for name, each in psutil.net_io_counters(pernic=True).items():
            if not _NOT_REAL.match(name):
                yield Network(each.bytes_recv, each.bytes_sent, each.errin + each.errout)


def _adapters(infiniband: Path) -> Iterator[Network]:
    """Yield the counters of each port of an InfiniBand adapter."""
    for port in sorted(infiniband.glob("*/ports/*/counters")):
        count = {name: _number(port / name) for name in ("port_rcv_data", "port_xmit_data", *_IB_ERRORS)}
        errors = sum(count[name] for name in _IB_ERRORS)
        yield Network(_WORD * count["port_rcv_data"], _WORD * count["port_xmit_data"], errors)


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _processes(root: int) -> tuple[dict[int, float], dict[int, int], set[int]]:
    """Return the processor seconds of each process of the run; the resident bytes of each rank's own, and their CPUs.

    A rank's process is called after it, and so are those that it has forked, which are below it.
    """
    seconds, resident, ranks, cpus = dict[int, float](), dict[int, int](), dict[int, int](), set[int]()
    for process in _tree(root):
        with suppress(psutil.Error), process.oneshot():  # it may have ended meanwhile
            used = process.cpu_times()
            seconds[process.pid] = used.user + used.system
            if named := RANK_NAME.fullmatch(process.name()):
                ranks[process.pid] = rank = int(named[1])
                if ranks.get(process.ppid()) != rank:
                    resident[rank] = process.memory_info().rss
                    cpus.update(process.cpu_affinity() if psutil.LINUX else ())
    return seconds, resident, cpus


def _tree(root: int) -> list[Any]:
    """Return the process and all that descend from it without this one, parents first."""
    with suppress(psutil.Error):
        first = psutil.Process(root)
        return [each for each in (first, *first.children(recursive=True)) if each.pid != os.getpid()]
    return []
