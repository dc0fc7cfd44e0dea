"""The secret key of a run, by which its hosts authenticate each other."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from worldsize.core import ConfigError
from worldsize.files import read_regular

_FILE = "agents.key"
_SHORTEST, _LONGEST = 32, 1 << 10  # bytes


@final
@dataclass(frozen=True)
class RunKey:
    """The run's id and the secret that its hosts share."""

    run_id: str
    secret: bytes = field(repr=False)


def write_key(run_dir: Path) -> None:
    """Create the run's key unless it exists; only the run's user may read it."""
    with suppress(FileExistsError):
        descriptor = os.open(run_dir / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def read_key(run_dir: Path) -> RunKey:
    """Return the key that :func:`write_key` created.

    Raises:
        ConfigError: the run folder has no key, or is not visible here.
    """
    try:
        secret = read_regular(run_dir / _FILE, at_most=_LONGEST)
    except OSError as error:
        raise ConfigError(f"the run's key cannot be read: {error}. All hosts need the run folder {run_dir}.") from error
    if len(secret) < _SHORTEST:  # an empty key would be known to everybody
        raise ConfigError(f"the run's key {run_dir / _FILE} is cut off. Remove it, and launch the run again.")
    return RunKey(run_dir.name, secret)
