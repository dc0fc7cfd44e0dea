"""The memory that a run may use on this node: that of the node, or less in a container or a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

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
