"""A store of torch.distributed on the first host, whose waits end as soon as the processes that meet there change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Store

from worldsize.world.folder_store import look_for


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
