"""Lists the available options and plugins, with their sources and descriptions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize import __version__
from worldsize.config.installed import installed
from worldsize.config.search_path import bundle, folders_of, foreign_roots, options_in, roots, searched


@dataclass(frozen=True)
class Plugin:
    """A plugin or recipe, and the folder of its files."""

    name: str  # of its module, e.g. "plugins.diloco"
    folder: Path
    source: str  # "worldsize", "project", a folder in WORLDSIZE_PLUGINS, or an installed distribution
    version: str | None = None  # of the distribution
    foreign: bool = False  # other hosts may not have the folder

    @property
    def options(self) -> list[Option]:
        return [Option(*each) for each in options_in(self.folder / "conf")]


@dataclass(frozen=True)
class Option:
    """One YAML file of a group; ``about``: its first comment."""

    group: str
    name: str
    file: Path

    @property
    def about(self) -> str:
        comments = re.findall(r"^# ?(.*)", self.file.read_text(), re.MULTILINE)
        return next((line for line in comments if not line.startswith("@package")), "")


def options() -> list[Option]:
    """List every option of every group, sorted by group and name."""
    known = [Option(*each) for folder in searched() for each in options_in(folder)]
    return sorted(known, key=lambda option: (option.group, option.name))


def plugins() -> list[Plugin]:
    """List every plugin and recipe, chosen or not, without broken installed ones."""
    local = [_in_folder(root, folder) for root in roots() for folder in folders_of(root)]
    packages = [
        Plugin(each.module, each.folder, each.distribution, each.version) for each in installed() if each.folder
    ]
    return [*local, *packages]


def _in_folder(root: Path, folder: Path) -> Plugin:
    name = f"{folder.parent.name}.{folder.name}"
    if root == bundle().resolve():
        return Plugin(name, folder, "worldsize", __version__)
    foreign = root in foreign_roots()
    return Plugin(name, folder, str(root) if foreign else "project", foreign=foreign)


def used(config: Mapping[str, Any], choices: Mapping[str, str]) -> list[Plugin]:
    """Return the plugins that a run needs, by name.

    A plugin is needed if it offers a chosen option, or if the configuration or another needed plugin names its module.
    """
    known = plugins()
    chosen = {(group.partition("@")[0], option) for group, option in choices.items()}
    named = [each for each in known if any((option.group, option.name) in chosen for option in each.options)]
    texts = [json.dumps(config, default=str), *(text for plugin in named for text in _sources(plugin))]
    while texts:
        text = texts.pop()
        for plugin in known:
            if plugin not in named and _is_named(plugin.name, text):
                named.append(plugin)
                texts += _sources(plugin)
    return sorted(named, key=lambda plugin: plugin.name)


def _is_named(module: str, text: str) -> bool:
    package, _, name = module.rpartition(".")
    imported_from = rf"|from {re.escape(package)} import .*\b{re.escape(name)}\b" if package else ""
    return re.search(rf"\b{re.escape(module)}\b{imported_from}", text) is not None


def _sources(plugin: Plugin) -> list[str]:
    return [file.read_text(errors="replace") for file in plugin.folder.rglob("*.py")]
