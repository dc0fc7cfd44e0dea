"""Writes our commands in hints as the user can paste them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path


def command_line(*words: str | Path) -> str:
    """Format one of our commands as this user can paste it, e.g. ``uv run worldsize resume RUN``."""
    uv = ("uv", "run") if needs_uv(os.environ, Path.cwd(), Path(sys.prefix)) else ()
    return shlex.join([*uv, "worldsize", *map(str, words)])


def needs_uv(environ: Mapping[str, str], folder: Path, prefix: Path) -> bool:
    """Return whether ``worldsize`` is only found by ``uv run``: in a uv project whose environment is not activated.

    Args:
        environ: variables of this process; uv sets UV for what it runs, and an activated environment VIRTUAL_ENV.
        folder: the working directory; the project is the nearest folder above with a lock and a pyproject.toml.
        prefix: the environment that this interpreter belongs to.
    """
    above = (folder, *folder.parents)
    project = next((each for each in above if (each / "uv.lock").exists() and (each / "pyproject.toml").exists()), None)
    if project is None:
        return False
    if "UV" in environ:
        return True
    return prefix.is_relative_to(project) and environ.get("VIRTUAL_ENV") != str(prefix)
