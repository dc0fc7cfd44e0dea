"""Reads the counters of this node: processors, memory, swap space, disk, networks, GPUs, processes of the run."""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import psutil

from worldsize.world.processes import RANK_NAME

_logger = logging.getLogger(__name__)

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


# bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU down although it has work; a cap of its power
# (0x04) is how most GPUs run under load
_SLOWDOWNS = {0x08: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power supply"}


@final
@dataclass(frozen=True)
class GpuReading:
    """One GPU now; None: it does not say.

    Attributes:
        index: Its number on this node, as nvidia-smi counts.
        utilisation: Share of the time in which it computed something.
        memory: Share of its memory that is in use.
        temperature: Degrees Celsius.
        slowed_by: What makes it slower than its load would allow; sorted.
        ecc_errors: Memory errors since its driver was loaded that could not be corrected.
    """

    index: int
    utilisation: float | None
    memory: float | None
    temperature: float | None
    slowed_by: tuple[str, ...]
    ecc_errors: int | None


@final
class Gpus:
    """The GPUs of this node; none if there is no driver, or NVML cannot be loaded.

    Make it in a process of its own: NVML keeps threads and descriptors that no process of the run should inherit.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:  # no driver, or a container without GPUs
            _logger.debug("NVML: %s", error)
        else:
            self._nvml = nvml

    def read(self) -> list[GpuReading]:
        """Read all GPUs, which takes about a millisecond for each."""
        return list(self._readings()) if self._nvml else []

    def _readings(self) -> Iterator[GpuReading]:
        nvml = self._nvml
        for index in range(self._ask(nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:  # it has fallen off the bus
                continue
            rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
            yield GpuReading(
                index,
                utilisation=None if rates is None else rates.gpu / 100,
                memory=None if memory is None or not memory.total else memory.used / memory.total,
                temperature=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
                slowed_by=_named(self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0),
                ecc_errors=self._ask(
                    nvml.nvmlDeviceGetTotalEccErrors,
                    handle,
                    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    nvml.NVML_VOLATILE_ECC,
                ),
            )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return NVML's answer; None: this GPU or this driver does not answer this question."""
        with suppress(self._nvml.NVMLError):
            return question(*arguments)
        return None


def _named(reasons: int) -> tuple[str, ...]:
    return tuple(sorted({name for bit, name in _SLOWDOWNS.items() if reasons & bit}))


_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@final
@dataclass(frozen=True)
class Memory:
    """Bytes in use, without file caches that can be dropped, and bytes beyond which the kernel kills."""

    used: int
    total: int

    @property
    def share(self) -> float:
        """Share of it that is in use."""
        return self.used / self.total if self.total else 0.0


def within(node: Memory, *, cgroups: Path = _CGROUPS, own: Path = _OWN) -> Memory:
    """Return the tightest memory that this process shares: the node's, or that of a control group around it.

    Both versions of control groups are read (kernel documentation, admin-guide/cgroup-v2 and cgroup-v1/memory).
    """
    limited = [each for each in _groups(cgroups, own) if 0 < each.total < node.total]
    return min(limited, key=lambda each: each.total, default=node)


def _groups(cgroups: Path, own: Path) -> Iterator[Memory]:
    """Yield the memory of the control group of this process and of all that it lies in, where they have a limit."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = cgroups / controllers
            inner = root / path.lstrip("/")
            # in a container the path may be that of the host, and the container's own group is mounted at the root
            folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
            names = _V2 if not controllers else _V1
            yield from (memory for folder in folders if (memory := _of(folder, *names)))


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _of(folder: Path, limit: str, usage: str, cache: str) -> Memory | None:
    with suppress(OSError, ValueError):  # ValueError: "max" is no limit
        total, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return Memory(max(0, used - int(facts.get(cache, 0))), total)
    return None
