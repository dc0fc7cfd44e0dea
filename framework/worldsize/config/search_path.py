"""Finds configuration groups, plugins and recipes, and lists them with their sources and descriptions."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from worldsize import __version__
from worldsize.errors import ConfigError
from worldsize.files import is_folder
from worldsize.world.environments import plugin_folders

_PACKAGE = Path(__file__).resolve().parents[1]
_CLONE = _PACKAGE.parents[1]


def _is_clone() -> bool:
    return (_CLONE / "conf" / "config.yaml").is_file()


def main_conf() -> Path:
    """Return the folder of ``config.yaml``, in the clone or in the installed package."""
    return (_CLONE if _is_clone() else _PACKAGE) / "conf"


def get_bundle_folder() -> Path:
    """Return the folder that contains the bundled ``recipes/``."""
    return _CLONE if _is_clone() else _PACKAGE / "bundled"


def list_search_roots() -> list[Path]:
    """List the folders that may contain ``recipes/`` and ``plugins/``, nearest first."""
    return list(
        dict.fromkeys(path.resolve() for path in (Path.cwd(), *plugin_folders(os.environ), get_bundle_folder()))
    )


def foreign_roots() -> list[Path]:
    """List the search roots given only by ``WORLDSIZE_PLUGINS``, which may be missing on other hosts."""
    return [root for root in list_search_roots() if root not in (Path.cwd().resolve(), get_bundle_folder().resolve())]


def list_root_folders(root: Path) -> list[Path]:
    """List the non-empty folders ``recipes/*`` and ``plugins/*`` of a root."""
    folders = [folder for kind in ("recipes", "plugins") for folder in sorted(root.glob(f"{kind}/*"))]
    return [folder for folder in folders if is_folder(folder / "conf") or any(folder.glob("*.py"))]


def config_folders() -> list[Path]:
    """List every ``conf/`` that contributes groups to the configuration."""
    folders = [root / "conf" for root in list_search_roots()]
    folders += [folder / "conf" for root in list_search_roots() for folder in list_root_folders(root)]
    folders += [plugin.folder / "conf" for plugin in find_installed_plugins() if plugin.folder]
    return [folder for folder in dict.fromkeys(folders) if is_folder(folder)]


def list_conf_folders() -> list[Path]:
    """List every ``conf/`` once, starting with the one that has ``config.yaml``."""
    return list(dict.fromkeys(path.resolve() for path in (main_conf(), *config_folders())))


def options_in(conf: Path) -> list[tuple[str, str, Path]]:
    """List the group, name and file of each option in a ``conf/``."""
    files = sorted(conf.glob("*/**/*.yaml"))
    return [(file.parent.relative_to(conf).as_posix(), file.stem, file) for file in files]


def check_unique(more: Iterable[Path] = ()) -> None:
    """Raise ConfigError if two files define the same option, or two folders the same module.

    ``more``: further folders with groups.
    """
    places: dict[str, Path] = {}
    for conf in dict.fromkeys([*list_conf_folders(), *more]):
        for group, option, file in options_in(conf):
            _register_place(places, f"{group}={option}", file)
    for root in list_search_roots():
        for folder in list_root_folders(root):
            _register_place(places, f"{folder.parent.name}.{folder.name}", folder)


def _register_place(places: dict[str, Path], name: str, place: Path) -> None:
    if (other := places.setdefault(name, place)) != place:
        raise ConfigError(
            f"{name} is defined twice: {other} and {place}. Rename or remove one "
            "(searched: the working directory, WORLDSIZE_PLUGINS, --config-dir, installed packages, worldsize itself)."
        )


def make_importable(folders: Iterable[Path]) -> None:
    """Append roots to the import path, so that their ``recipes`` and ``plugins`` merge as namespace packages."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)


GROUP = "worldsize.plugins"


@dataclass(frozen=True)
class Installed:
    """An installed plugin. ``folder`` is the folder of its package ``module``; None if the plugin is ``broken``."""

    module: str
    distribution: str
    version: str
    folder: Path | None = None
    broken: str | None = None


@cache
def find_installed_plugins() -> tuple[Installed, ...]:
    return tuple(
        _inspect_entry_point(point) for point in sorted(entry_points(group=GROUP), key=lambda point: point.value)
    )


def _inspect_entry_point(point: EntryPoint) -> Installed:
    name, version = (point.dist.name, point.dist.version) if point.dist else ("?", "?")
    folders = _find_module_folders(point.module)
    holder = next((folder for folder in folders if (folder / "conf").is_dir()), None)
    broken = None if holder else f"the package {point.module} has no conf/" if folders else f"no package {point.module}"
    return Installed(point.module, name, version, holder, broken)


def _find_module_folders(module: str) -> list[Path]:
    """Return the folders of ``module``, looking up only the outermost package to avoid importing it."""
    outermost, *inner = module.split(".")
    try:
        spec = find_spec(outermost)
    except (ImportError, ValueError):
        return []
    folders = [Path(place, *inner) for place in (spec.submodule_search_locations or ())] if spec else []
    return [folder for folder in folders if folder.is_dir()]


@dataclass(frozen=True)
class Plugin:
    """A plugin or recipe with its folder and origin."""

    name: str  # module name, e.g. "plugins.diloco"
    folder: Path
    source: str  # "worldsize", "project", a folder in WORLDSIZE_PLUGINS, or an installed distribution
    version: str | None = None  # version of the distribution
    foreign: bool = False  # whether other hosts may lack the folder

    @property
    def options(self) -> list[Option]:
        return [Option(*each) for each in options_in(self.folder / "conf")]


@dataclass(frozen=True)
class Option:
    """An option of a configuration group, defined by a YAML file; ``about`` is the file's first comment."""

    group: str
    name: str
    file: Path

    @property
    def about(self) -> str:
        comments = re.findall(r"^# ?(.*)", self.file.read_text(), re.MULTILINE)
        return next((line for line in comments if not line.startswith("@package")), "")


def list_options() -> list[Option]:
    """List every option of every group, sorted by group and name."""
    known = [Option(*each) for folder in list_conf_folders() for each in options_in(folder)]
    return sorted(known, key=lambda option: (option.group, option.name))


def list_plugins() -> list[Plugin]:
    """List every plugin and recipe, used or not, except broken installed plugins."""
    local = [_build_folder_plugin(root, folder) for root in list_search_roots() for folder in list_root_folders(root)]
    packages = [
        Plugin(each.module, each.folder, each.distribution, each.version)
        for each in find_installed_plugins()
        if each.folder
    ]
    return [*local, *packages]


def _build_folder_plugin(root: Path, folder: Path) -> Plugin:
    name = f"{folder.parent.name}.{folder.name}"
    if root == get_bundle_folder().resolve():
        return Plugin(name, folder, "worldsize", __version__)
    foreign = root in foreign_roots()
    return Plugin(name, folder, str(root) if foreign else "project", foreign=foreign)


def find_used_plugins(config: Mapping[str, Any], choices: Mapping[str, str]) -> list[Plugin]:
    """Return the plugins that a run needs, sorted by name.

    A plugin is needed if it defines a chosen option, or if the configuration or a needed plugin mentions its module.
    """
    known = list_plugins()
    chosen = {(group.partition("@")[0], option) for group, option in choices.items()}
    named = [each for each in known if any((option.group, option.name) in chosen for option in each.options)]
    texts = [json.dumps(config, default=str), *(text for plugin in named for text in _read_sources(plugin))]
    while texts:
        text = texts.pop()
        for plugin in known:
            if plugin not in named and _is_named(plugin.name, text):
                named.append(plugin)
                texts += _read_sources(plugin)
    return sorted(named, key=lambda plugin: plugin.name)


def _is_named(module: str, text: str) -> bool:
    package, _, name = module.rpartition(".")
    imported_from = rf"|from {re.escape(package)} import .*\b{re.escape(name)}\b" if package else ""
    return re.search(rf"\b{re.escape(module)}\b{imported_from}", text) is not None


def _read_sources(plugin: Plugin) -> list[str]:
    return [file.read_text(errors="replace") for file in plugin.folder.rglob("*.py")]
