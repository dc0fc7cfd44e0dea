"""Where configuration groups, plugins and recipes are found: the bundle, the working directory, extra folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from worldsize.world.environments import plugin_folders

_PACKAGE = Path(__file__).resolve().parents[1]
_CLONE = _PACKAGE.parents[1]


def _is_clone() -> bool:
    return (_CLONE / "conf" / "config.yaml").is_file()


def main_conf() -> Path:
    """The folder of ``config.yaml``: the clone's, or the one in the installed package."""
    return (_CLONE if _is_clone() else _PACKAGE) / "conf"


def bundle() -> Path:
    """The folder that holds the bundled ``recipes/``."""
    return _CLONE if _is_clone() else _PACKAGE / "bundled"


def roots() -> list[Path]:
    """Folders that may hold ``recipes/`` and ``plugins/``, nearest first."""
    return list(dict.fromkeys(path.resolve() for path in (Path.cwd(), *plugin_folders(os.environ), bundle())))


def config_folders() -> list[Path]:
    """Every ``conf/`` that adds groups to the run's configuration."""
    found = [root / "conf" for root in roots()]
    found += [
        conf for root in roots() for kind in ("recipes", "plugins") for conf in sorted(root.glob(f"{kind}/*/conf"))
    ]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def make_importable(folders: Iterable[Path]) -> None:
    """Put roots on the import path, behind what is there; ``recipes`` and ``plugins`` are namespace packages."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
