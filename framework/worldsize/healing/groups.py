"""Process groups of a healing gang: their stores, connections and release.

:class:`Meetings` opens stores in a private folder or on the first host; waits in them end when the membership changes.
:class:`Connections` cuts the connections of process groups, so that waits for a lost peer fail immediately.
:class:`LeftGroups` frees groups late: freeing a gloo group waits for its collectives, and a collective that sends to a
killed process ends only at the group's timeout.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Self, cast, final
from urllib.parse import quote, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore, Work

from worldsize.collectives.group import INTERRUPTION
from worldsize.core import Cluster, World
from worldsize.devices import backend_names


@final
class Meetings:
    """Creates a store for each membership and purpose.

    The newest store is kept alive here, since a process group does not keep its store alive.

    Args:
        place: ``file://PREFIX`` for folders on one host, or ``tcp://HOST:PORT`` of a store's server.
        check: Called while waiting; raises an error to end the wait.
        timeout: Maximum time to wait for the server or a key.
    """

    def __init__(self, place: str, check: Callable[[], None], timeout: timedelta) -> None:
        self._place, self._check, self._timeout = urlsplit(place), check, timeout
        self._client: TCPStore | None = None  # shared by all memberships; not cut when one ends
        self._newest: Store | None = None

    def create_store(self, number: int, purpose: str = "train") -> Store:
        """Return the store of membership ``number`` for ``purpose``."""
        self._newest = self._open_store(f"{number}_{purpose}")
        return self._newest

    def _open_store(self, name: str) -> Store:
        if self._place.scheme == "file":
            return FolderStore(Path(f"{self._place.path}_{name}"), self._check, self._timeout)
        if self._client is None:
            host, port = self._place.hostname, self._place.port
            assert host is not None
            assert port is not None
            self._client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        return PatientStore(PrefixStore(f"membership_{name}", self._client), self._check, self._timeout)


_FIRST, _LONGEST = 0.0002, 0.005  # seconds between two polls for a key: initial and maximum


class _InterruptibleStore(Store):
    """Polls for keys; torch's own stores would wait for a dead peer until the timeout.

    A process group does not keep its store alive, so the caller must do so while the group exists.

    Args:
        check: Called while a key is missing; raises an error to end the wait.
        timeout: Maximum time to wait for a key.
    """

    def __init__(self, check: Callable[[], None], timeout: timedelta) -> None:
        super().__init__()
        self._check, self._timeout = check, timeout

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` have values.

        Raises:
            TimeoutError: a key has no value in time.
        """
        pause, deadline = _FIRST, time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self.check([*keys]):
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(pause)
            pause = min(1.1 * pause, _LONGEST)  # about a tenth of the time waited so far


@final
class FolderStore(_InterruptibleStore):
    """A store with one file per key.

    Args:
        folder: Private folder shared by all processes.
        check, timeout: See :class:`_InterruptibleStore`.
    """

    def __init__(self, folder: Path, check: Callable[[], None], timeout: timedelta) -> None:
        super().__init__(check, timeout)
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        draft = self._folder / f".{os.getpid()}"
        draft.write_bytes(value.encode() if isinstance(value, str) else value)
        draft.replace(self._get_key_path(key))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._get_key_path(key).read_bytes()

    def add(self, key: str, value: int) -> int:
        with (self._folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # also released if this process dies
            total = value + (int(self.get(key)) if self.check([key]) else 0)
            self.set(key, str(total))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._get_key_path(key).exists() for key in keys)

    def _get_key_path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


@final
class PatientStore(_InterruptibleStore):
    """An interruptible client of a store on a remote host.

    Args:
        store: The client to wrap.
        check, timeout: See :class:`_InterruptibleStore`.
    """

    def __init__(self, store: Store, check: Callable[[], None], timeout: timedelta) -> None:
        super().__init__(check, timeout)
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type] # torch accepts bytes, too

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([*keys])


def rebuild_groups(
    world: World, members: Sequence[int], cluster: Cluster, store: Store, *, copies: bool = False
) -> World:
    """Leave the groups of ``world``, and join groups of ``members``; all members must call this.

    Args:
        world: This process's current World.
        members: Global ranks of the new members.
        cluster: Provides the backend and the timeout of collectives.
        store: Rendezvous used only by these members; the caller must keep it alive.
        copies: Whether to create the group "copies/ROLE", for sending copies of shards between members.

    Returns:
        This process's new World; its rank is its index in ``members``.
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
        assert dist.group.WORLD is not None
        groups = {"all": dist.group.WORLD, world.role: dist.group.WORLD}
        host = ["host"] if world.device.type != "cpu" else []
        for name in ["checkpoint", *host, *(["copies"] if copies else [])]:
            own = dist.new_group([*range(len(members))], timeout, backend="gloo")
            groups[f"{name}/{world.role}"] = cast("ProcessGroup", own)
    return replace(world, rank=rank, size=len(members), world_size=len(members), groups=groups)


def _forget_meshes() -> None:
    """Clear torch's caches of DTensor operations; they refer to meshes of destroyed groups."""
    if "torch.distributed.tensor" not in sys.modules:  # avoid the slow import
        return
    with suppress(ImportError, AttributeError):  # the caches depend on torch's version
        from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, _sharding_prop

        # the same calls as in torch.distributed.tensor.debug; importing that module is slow
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
        torch._C._clear_DTensor_sharding_propagator_cache()
        _sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


_Sockets = Mapping[int, int]  # inodes of this process's sockets, by file descriptor

_DESCRIPTORS = Path("/proc/self/fd")
_WATCHED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)  # a descriptor and its inode, see proc(5)


@final
class Connections:
    """Context manager that records the sockets of process groups created in it.

    It may be entered several times, one after another, but not nested. ``ProcessGroup.abort`` ends NCCL's operations
    but not gloo's: these end only when their sockets are shut down. A gloo group may open connections later, when two
    ranks first communicate. It listens on a socket from its creation, and one thread polls all its sockets, so sockets
    polled together with the listening socket belong to the group.
    """

    def __init__(self) -> None:
        self._before: _Sockets | None = None  # sockets open at the start of the context; None outside
        self._own: _Sockets = {}
        self._is_cut = False

    def __enter__(self) -> Self:
        self._before = _list_sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._own = self._collect_sockets()
        self._before = None
        if self._is_cut:  # cut while in this context: some sockets may have been opened later
            self._is_cut = False
            self.cut_sockets()

    def cut_sockets(self) -> None:
        """End all communication of these groups; may be called repeatedly and from any thread."""
        is_first, self._is_cut = not self._is_cut, True
        if is_first and dist.is_initialized() and "nccl" in backend_names(dist.get_backend()):
            dist.distributed_c10d._abort_process_group()
        own = self._collect_sockets()
        for descriptor, inode in {**own, **_find_later_sockets(own)}.items():
            with suppress(OSError):  # closed in the meantime
                if os.fstat(descriptor).st_ino == inode:
                    _shut_down_socket(descriptor)

    def _collect_sockets(self) -> _Sockets:
        before = self._before
        if before is None:
            return self._own
        opened = {number: inode for number, inode in _list_sockets().items() if before.get(number) != inode}
        return {**self._own, **opened}


def _list_sockets() -> _Sockets:
    sockets = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                sockets[int(entry.name)] = status.st_ino
    return sockets


def _find_later_sockets(own: _Sockets) -> _Sockets:
    """Return the sockets that are polled together with a listening socket in ``own``."""
    listening = {item for item in own.items() if _is_listening(*item)}
    later = dict[int, int]()
    for watched in _read_epoll_sets():
        if not listening.isdisjoint(watched.items()):
            later |= watched
    return later


def _read_epoll_sets() -> Iterator[_Sockets]:
    """Yield the descriptors and inodes polled by each epoll instance of this process."""
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed in the meantime
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                text = Path("/proc/self/fdinfo", entry.name).read_text()
                yield {int(descriptor): int(inode, 16) for descriptor, inode in _WATCHED.findall(text)}


def _is_listening(descriptor: int, inode: int) -> bool:
    with suppress(OSError):  # closed in the meantime
        if os.fstat(descriptor).st_ino == inode:
            with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _shut_down_socket(descriptor: int) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        is_network = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        if is_network and not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo needs listeners
            duplicate.shutdown(socket.SHUT_RD)  # not SHUT_RDWR, since gloo would wait after failed writes


_Left = list[tuple[list[Work], list[ProcessGroup]]]  # per membership: collectives in flight, and all groups


@final
class LeftGroups:
    """Process groups that this process has left but not freed."""

    def __init__(self) -> None:
        self._left: _Left = []

    def keep_groups(self) -> None:
        """Keep references to this process's current groups, which it is about to leave."""
        self._left.append((INTERRUPTION.pop_unfinished(), [*dist.distributed_c10d._world.pg_map]))

    def free_groups(self) -> None:
        """Drop the references to groups, except those with collectives in flight.

        A thread does this, since freeing a group may wait for collectives that torch started itself.
        """
        gc.collect()  # replicas and their groups have reference cycles
        before, self._left = self._left, []
        ended: _Left = []
        while before:  # pop, so that the thread has the only references
            (self._left if _go_on(before[-1][0]) else ended).append(before.pop())
        threading.Thread(target=ended.clear, daemon=True, name="groups").start()


def _go_on(works: list[Work]) -> bool:
    return not all(map(Work.is_completed, works))


LEFT_GROUPS = LeftGroups()  # global, so that groups of the last membership are kept until this process exits
