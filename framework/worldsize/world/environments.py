"""Environment variables of launchers → this process's place in the run. The only reader of the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from os import pathsep
from pathlib import Path
from typing import Any

from worldsize.errors import ConfigError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Placement:
    """One process among all of a run, as its launcher tells it; ``store`` is where the ranks meet.

    ``attempt`` counts the starts of the run, ``starts`` those of this process alone before. ``heartbeat`` is a file
    in which to say how far this process is.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: str
    attempt: int = 1
    heartbeat: Path | None = None
    starts: int = 0

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size

    def variables(self) -> dict[str, str]:
        """The environment that :func:`from_torchrun` reads back; torchrun's names, so that user code finds them."""
        numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        names = dict(zip(_NAMES, map(str, numbers), strict=True))
        beat = {"WORLDSIZE_HEARTBEAT": str(self.heartbeat)} if self.heartbeat else {}
        own = {"WORLDSIZE_STORE": self.store, "WORLDSIZE_ATTEMPT": str(self.attempt), **beat}
        own["WORLDSIZE_STARTS"] = str(self.starts)
        return {**names, "GROUP_RANK": str(self.node_rank), **own}


def from_torchrun(environ: Mapping[str, str]) -> Placement:
    """Placement from torchrun's variables; a process started alone is rank 0 of 1.

    ``WORLDSIZE_STORE`` (a torch.distributed init method) wins over MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: some of the variables are set and others missing, or one is not a number.
    """
    present = [name for name in _NAMES if name in environ]
    if not present:
        return Placement(rank=0, world_size=1, local_rank=0, local_world_size=1, store="env://")
    missing = [name for name in _NAMES if name not in environ]
    if missing:
        raise ConfigError(
            f"{', '.join(present)} are set but {', '.join(missing)} are not. "
            "Start workers with torchrun or a launcher, or unset them all."
        )
    rank, size, local_rank, local_size = (_number(environ, name) for name in _NAMES)
    attempt = _number(environ, "WORLDSIZE_ATTEMPT") if "WORLDSIZE_ATTEMPT" in environ else 1
    beat = Path(environ["WORLDSIZE_HEARTBEAT"]) if "WORLDSIZE_HEARTBEAT" in environ else None
    starts = _number(environ, "WORLDSIZE_STARTS") if "WORLDSIZE_STARTS" in environ else 0
    store = environ.get("WORLDSIZE_STORE", "env://")
    return Placement(rank, size, local_rank, local_size, store, attempt, beat, starts)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} is not a number. Start workers with a launcher.") from None


def plugin_folders(environ: Mapping[str, str]) -> list[Path]:
    """Folders named by ``WORLDSIZE_PLUGINS``, separated as in PATH."""
    return [Path(entry) for entry in environ.get("WORLDSIZE_PLUGINS", "").split(pathsep) if entry]


def withheld_secrets(environ: MutableMapping[str, str]) -> list[tuple[list[str | int], Any]]:
    """Leaves of the configuration that are in no file, from ``WORLDSIZE_SECRETS``, which no child process inherits."""
    return [(keys, value) for keys, value in json.loads(environ.pop("WORLDSIZE_SECRETS", "[]"))]
