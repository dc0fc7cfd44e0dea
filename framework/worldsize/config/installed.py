"""Finds plugins of installed packages, by entry points of group ``worldsize.plugins``, without importing them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

GROUP = "worldsize.plugins"


@dataclass(frozen=True)
class Installed:
    """An installed plugin. ``folder``: the files of its package ``module``, or None if it is ``broken``."""

    module: str
    distribution: str
    version: str
    folder: Path | None = None
    broken: str | None = None


@cache
def installed() -> tuple[Installed, ...]:
    return tuple(_looked_up(point) for point in sorted(entry_points(group=GROUP), key=lambda point: point.value))


def _looked_up(point: EntryPoint) -> Installed:
    name, version = (point.dist.name, point.dist.version) if point.dist else ("?", "?")
    folders = _folders(point.module)
    holder = next((folder for folder in folders if (folder / "conf").is_dir()), None)
    broken = None if holder else f"the package {point.module} has no conf/" if folders else f"no package {point.module}"
    return Installed(point.module, name, version, holder, broken)


def _folders(module: str) -> list[Path]:
    """Find the folder of the outermost package only, since finding a nested one would import its parent."""
    outermost, *inner = module.split(".")
    try:
        spec = find_spec(outermost)
    except (ImportError, ValueError):
        return []
    folders = [Path(place, *inner) for place in (spec.submodule_search_locations or ())] if spec else []
    return [folder for folder in folders if folder.is_dir()]
