"""The stores at which the processes of a gang meet, one for each of its memberships."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import final
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from worldsize.world.folder_store import FolderStore
from worldsize.world.tcp_store import PatientStore


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
