"""Finds the folder in which this user's programs keep what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from worldsize.errors import ConfigError

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder() -> Path:
    """Return ``worldsize`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worldsize"


def keep_compiled_code() -> None:
    """Let torch's compiler keep its code in :func:`cache_folder`, for all processes of this user, not in ``/tmp``.

    Raises:
        ConfigError: others can write there, and torch runs what it finds.
    """
    if _COMPILED in os.environ:
        return
    folder = cache_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(
            f"{folder}, which keeps compiled code, belongs to somebody else or may be written by others. Remove it, or "
            f"name another folder with {_COMPILED}."
        )
    os.environ[_COMPILED] = str(folder)
