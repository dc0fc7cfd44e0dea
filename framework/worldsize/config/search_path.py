"""Finds configuration groups, plugins and recipes: in the bundle, working directory, extra folders and packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from worldsize.config.installed import installed
from worldsize.errors import ConfigError
from worldsize.files import is_folder
from worldsize.world.environments import plugin_folders

_PACKAGE = Path(__file__).resolve().parents[1]
_CLONE = _PACKAGE.parents[1]


def _is_clone() -> bool:
    return (_CLONE / "conf" / "config.yaml").is_file()


def main_conf() -> Path:
    """Return the folder of ``config.yaml``: the clone's, or the one in the installed package."""
    return (_CLONE if _is_clone() else _PACKAGE) / "conf"


def bundle() -> Path:
    """Return the folder that contains the bundled ``recipes/``."""
    return _CLONE if _is_clone() else _PACKAGE / "bundled"


def roots() -> list[Path]:
    """List the folders that may contain ``recipes/`` and ``plugins/``, nearest first."""
    return list(dict.fromkeys(path.resolve() for path in (Path.cwd(), *plugin_folders(os.environ), bundle())))


def foreign_roots() -> list[Path]:
    """List the :func:`roots` that only ``WORLDSIZE_PLUGINS`` names, which other hosts may lack."""
    return [root for root in roots() if root not in (Path.cwd().resolve(), bundle().resolve())]


def folders_of(root: Path) -> list[Path]:
    """List the non-empty folders ``recipes/*`` and ``plugins/*`` of a root."""
    folders = [folder for kind in ("recipes", "plugins") for folder in sorted(root.glob(f"{kind}/*"))]
    return [folder for folder in folders if is_folder(folder / "conf") or any(folder.glob("*.py"))]


def config_folders() -> list[Path]:
    """List every ``conf/`` that adds groups to the run's configuration."""
    folders = [root / "conf" for root in roots()]
    folders += [folder / "conf" for root in roots() for folder in folders_of(root)]
    folders += [plugin.folder / "conf" for plugin in installed() if plugin.folder]
    return [folder for folder in dict.fromkeys(folders) if is_folder(folder)]


def searched() -> list[Path]:
    """List every ``conf/`` once, that of ``config.yaml`` first."""
    return list(dict.fromkeys(path.resolve() for path in (main_conf(), *config_folders())))


def options_in(conf: Path) -> list[tuple[str, str, Path]]:
    """Yield the group, name and file of each option that a ``conf/`` adds."""
    files = sorted(conf.glob("*/**/*.yaml"))
    return [(file.parent.relative_to(conf).as_posix(), file.stem, file) for file in files]


def check_unique(more: Iterable[Path] = ()) -> None:
    """Raise ConfigError if two places offer one option, or two folders are one module: only one would be found.

    ``more``: further folders of groups.
    """
    places: dict[str, Path] = {}
    for conf in dict.fromkeys([*searched(), *more]):
        for group, option, file in options_in(conf):
            _note(places, f"{group}={option}", file)
    for root in roots():
        for folder in folders_of(root):
            _note(places, f"{folder.parent.name}.{folder.name}", folder)


def _note(places: dict[str, Path], name: str, place: Path) -> None:
    if (other := places.setdefault(name, place)) != place:
        raise ConfigError(
            f"{name} is in two places: {other} and {place}. Rename one, or take it away "
            "(searched: the working directory, WORLDSIZE_PLUGINS, --config-dir, installed packages, worldsize itself)."
        )


def make_importable(folders: Iterable[Path]) -> None:
    """Append roots to the import path; ``recipes`` and ``plugins`` are namespace packages."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
