"""Cuts the connections of process groups, so that whoever waits for a lost peer goes on at once, with an error."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self, final

import torch.distributed as dist

from worldsize.devices import backend_names

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
