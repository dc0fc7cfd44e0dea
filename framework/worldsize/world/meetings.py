"""Rendezvous of the processes of a gang that heals: a store for each membership, votes, and cutting connections.

Waits in these stores of torch.distributed, in a private folder or on the first host, end as soon as the membership
changes. :class:`StopVote` lets ranks that all wait for something other than each other decide together to stop,
without a collective. :class:`Connections` cuts the connections of process groups, so that a wait for a lost peer ends
at once, with an error.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self, final
from urllib.parse import quote, urlsplit

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from worldsize.core import World
from worldsize.devices import backend_names


@final
class Meetings:
    """Makes the store of each membership, and keeps the newest one alive, which process groups do not.

    Args:
        place: URL of a folder, on one host, or of a server's address and port.
        check: Raises an error if nobody should wait any longer.
        timeout: Longest time to wait for the server, or for a key.
    """

    def __init__(self, place: str, check: Callable[[], None], timeout: timedelta) -> None:
        self._place, self._check, self._timeout = urlsplit(place), check, timeout
        self._client: TCPStore | None = None  # for all memberships: the end of one does not cut it
        self._newest: Store | None = None

    def store(self, number: int, purpose: str = "train") -> Store:
        """Return the store of membership ``number`` for ``purpose``."""
        self._newest = self._made(f"{number}_{purpose}")
        return self._newest

    def _made(self, name: str) -> Store:
        if self._place.scheme == "file":
            return FolderStore(Path(f"{self._place.path}_{name}"), self._check, self._timeout)
        if self._client is None:
            host, port = self._place.hostname, self._place.port
            assert host is not None
            assert port is not None
            self._client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        return PatientStore(PrefixStore(f"membership_{name}", self._client), self._check, self._timeout)


_FIRST, _LONGEST = 0.0002, 0.005  # seconds between two looks for a key


@final
class FolderStore(Store):
    """Has one file a key. Torch's own file store waits until its timeout for a peer that has died.

    A process group does not keep it alive: whoever makes one must do so, for as long as the group exists.

    Args:
        folder: Folder that all processes share, and no others know.
        check: Raises an error if nobody should wait any longer; called while a key is missing.
        timeout: Longest time to wait for a key.
    """

    def __init__(self, folder: Path, check: Callable[[], None], timeout: timedelta) -> None:
        super().__init__()
        self._folder, self._check, self._timeout = folder, check, timeout
        folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        """Write the value of a key."""
        draft = self._folder / f".{os.getpid()}"
        draft.write_bytes(value.encode() if isinstance(value, str) else value)
        draft.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._path(key).read_bytes()

    def add(self, key: str, value: int) -> int:
        """Add to a counter that begins at 0, and return the sum."""
        with (self._folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed also if this process dies
            total = value + (int(self.get(key)) if self.check([key]) else 0)
            self.set(key, str(total))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` have values."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` have values.

        Raises:
            TimeoutError: they have none in time.
        """
        look_for(keys, self.check, self._check, timeout or self._timeout)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


def look_for(
    keys: Sequence[str], has: Callable[[Sequence[str]], bool], check: Callable[[], None], timeout: timedelta
) -> None:
    """Look for ``keys`` until a store ``has`` them; ``check`` raises an error if nobody should wait any longer.

    Raises:
        TimeoutError: it does not have them in time.
    """
    pause, deadline = _FIRST, time.monotonic() + timeout.total_seconds()
    while not has(keys):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out waiting for {', '.join(keys)}")
        time.sleep(pause)
        pause = min(1.1 * pause, _LONGEST)  # about a tenth of what it has waited


@final
class PatientStore(Store):
    """Looks for keys of a store on another host, on which torch itself would wait for a peer until its timeout.

    A process group does not keep it alive: whoever makes one must do so, for as long as the group exists.

    Args:
        store: The store that has the values.
        check: Raises an error if nobody should wait any longer; called while a key is missing.
        timeout: Longest time to wait for a key.
    """

    def __init__(self, store: Store, check: Callable[[], None], timeout: timedelta) -> None:
        super().__init__()
        self._store, self._check, self._timeout = store, check, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write the value of a key."""
        self._store.set(key, value)  # type: ignore[arg-type] # torch takes bytes, too

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a counter that begins at 0, and return the sum."""
        return self._store.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` have values."""
        return self._store.check([*keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` have values.

        Raises:
            TimeoutError: they have none in time.
        """
        look_for(keys, self.check, self._check, timeout or self._timeout)


_SECONDS = 10.0  # that ranks wait for the votes of the others; one that computes does not vote
_POLL = 0.05
_STOP, _GO_ON = b"stop", b"go on"


@final
class StopVote:
    """The votes of the ranks of ``world``, in the store through which they met; all hold after the same step."""

    def __init__(self, world: World) -> None:
        self._size, self._key = world.size, f"stop_vote/{world.role}"
        self._voted = -1  # the last step that this rank voted at

    def passes(self, step: int) -> bool:
        """Vote to stop after ``step``; return whether all ranks did so in time, on all ranks alike."""
        if self._size == 1:
            return True
        if self._voted == step:
            return False
        self._voted = step
        store, key = dist.distributed_c10d._get_default_store(), f"{self._key}/{step}"
        until = time.monotonic() + _SECONDS
        decision = b""
        store.add(f"{key}/votes", 1)
        while not decision:
            if store.add(f"{key}/votes", 0) >= self._size:
                decision = store.compare_set(f"{key}/decision", "", _STOP.decode())
            elif time.monotonic() > until:
                decision = store.compare_set(f"{key}/decision", "", _GO_ON.decode())
            elif store.check([f"{key}/decision"]):
                decision = store.get(f"{key}/decision")
            else:
                time.sleep(_POLL)
        return decision == _STOP


_Sockets = Mapping[int, int]  # the inode of each socket of this process, by its file descriptor

_DESCRIPTORS = Path("/proc/self/fd")
_WATCHED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)  # a descriptor and its inode, see proc(5)


@final
class Connections:
    """Notes which sockets the process groups that are made inside its context open; it may be entered again.

    ``ProcessGroup.abort`` ends the operations of NCCL, but not those of gloo, which end when their sockets do. A group
    of gloo may connect two ranks only when they first communicate. It listens from its beginning on, though, and one
    thread waits for all its sockets at once: those that are watched together with such a listening socket are its own.
    """

    def __init__(self) -> None:
        self._before: _Sockets | None = None  # inside the context: what was open at its beginning
        self._own: _Sockets = {}
        self._is_cut = False

    def __enter__(self) -> Self:
        self._before = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._own = self._all()
        self._before = None
        if self._is_cut:  # in the meantime, when some of them did not exist
            self._is_cut = False
            self.cut()

    def cut(self) -> None:
        """End all communication of these groups; may be called by another thread, and more than once."""
        is_first, self._is_cut = not self._is_cut, True
        if is_first and dist.is_initialized() and "nccl" in backend_names(dist.get_backend()):
            dist.distributed_c10d._abort_process_group()
        own = self._all()
        for descriptor, inode in {**own, **_opened_later(own)}.items():
            with suppress(OSError):  # it was closed in the meantime
                if os.fstat(descriptor).st_ino == inode:
                    _shut(descriptor)

    def _all(self) -> _Sockets:
        before = self._before
        if before is None:
            return self._own
        opened = {number: inode for number, inode in _sockets().items() if before.get(number) != inode}
        return {**self._own, **opened}


def _sockets() -> _Sockets:
    sockets = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                sockets[int(entry.name)] = status.st_ino
    return sockets


def _opened_later(own: _Sockets) -> _Sockets:
    """Return the descriptors that are watched together with a socket of ``own`` that listens."""
    listening = {item for item in own.items() if _listens(*item)}
    later = dict[int, int]()
    for watched in _watched_together():
        if not listening.isdisjoint(watched.items()):
            later |= watched
    return later


def _watched_together() -> Iterator[_Sockets]:
    """Yield the inodes, by descriptor, of what each epoll instance of this process watches."""
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # it was closed in the meantime
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                text = Path("/proc/self/fdinfo", entry.name).read_text()
                yield {int(descriptor): int(inode, 16) for descriptor, inode in _WATCHED.findall(text)}


def _listens(descriptor: int, inode: int) -> bool:
    with suppress(OSError):  # it was closed in the meantime
        if os.fstat(descriptor).st_ino == inode:
            with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _shut(descriptor: int) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        is_network = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        if is_network and not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo aborts without it
            duplicate.shutdown(socket.SHUT_RD)  # what is written still succeeds: gloo would wait for what does not
