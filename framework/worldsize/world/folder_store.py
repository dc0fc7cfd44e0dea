"""A store of torch.distributed in a private folder, whose waits end as soon as the processes that meet there change."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import final
from urllib.parse import quote

from torch._C._distributed_c10d import Store

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
