"""Where the servers of a run are: a folder that its processes share, and a number that says which server is meant.

The master of a shard in epoch n is whoever created ``epoch_n.json``. Creation is exclusive, so there are never two.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from worldsize.errors import WorldsizeError

_POLL = 0.01  # seconds


class EndedError(WorldsizeError):
    """The run has ended; there is nobody to connect to."""


@final
@dataclass(frozen=True)
class Entry:
    """A server that answers, and in which epoch it became master of its shard."""

    epoch: int
    address: str
    name: str


@final
@dataclass(frozen=True)
class Directory:
    """Entries below ``folder``; ``timeout``: seconds to wait for one."""

    folder: Path
    timeout: float

    def newest(self, shard: int) -> Entry | None:
        files = sorted((self.folder / f"shard_{shard}").glob("epoch_*.json"), key=_number)
        if not files:
            return None
        return Entry(_number(files[-1]), **json.loads(files[-1].read_text()))

    def claim(self, shard: int, epoch: int, address: str, name: str) -> bool:
        """Become master in ``epoch``; False if another one is."""
        folder = self.folder / f"shard_{shard}"
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{name}"
        draft.write_text(json.dumps({"address": address, "name": name}))
        try:
            os.link(draft, folder / f"epoch_{epoch:06d}.json")  # whole at once, and only if it is not there
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def wait(self, shard: int, after: int = 0) -> Entry:
        """The newest entry, of an epoch later than ``after``.

        Raises:
            WorldsizeError: nobody became master in time.
            EndedError: nobody will.
        """
        deadline = time.monotonic() + self.timeout
        while (entry := self.newest(shard)) is None or entry.epoch <= after:
            self.check_open()
            if time.monotonic() > deadline:
                raise WorldsizeError(f"no server has taken shard {shard} within {self.timeout:g} s (cluster.timeout).")
            time.sleep(_POLL)
        return entry

    def end(self) -> None:
        """Tell those that look for a server that the run has ended."""
        (self.folder / "ended").touch()

    def check_open(self) -> None:
        if (self.folder / "ended").exists():
            raise EndedError("the run has ended.")


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("epoch_"))
