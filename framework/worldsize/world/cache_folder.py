"""Finds the folder in which this user's programs keep what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``worldsize`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worldsize"
