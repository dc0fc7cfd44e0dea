"""``worldsize list KIND``: list strategies, recipes, ... or plugins, with source and purpose."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from worldsize.config.search_path import (
    Installed,
    Option,
    Plugin,
    check_unique,
    find_installed_plugins,
    list_options,
    list_plugins,
    main_conf,
)
from worldsize.errors import WorldsizeError, neighbours
from worldsize.messages import report_error

Row = Sequence[str]


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize list", description=__doc__)
    parser.add_argument("kind", nargs="?", help="a configuration group, or plugins (default: all groups)")
    kind = parser.parse_args().kind
    try:
        check_unique()
        rows = _list_plugins() if kind == "plugins" else _list_options(kind)
    except WorldsizeError as error:
        sys.exit(report_error(error))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def _list_options(kind: str | None) -> list[Row]:
    """List the options of the group ``kind``, or of all groups; raise WorldsizeError if ``kind`` is unknown."""
    available, known = list_options(), list_plugins()
    groups = sorted({option.group for option in available})
    chosen = groups if kind is None else [group for group in groups if kind in (group, _pluralize_group(group))]
    if not chosen:
        raise WorldsizeError(f"unknown kind {kind!r}{neighbours(str(kind), ['plugins', *groups])}")
    return [
        (f"{option.group}={option.name}", _describe_source(option, known), option.about)
        for option in available
        if option.group in chosen
    ]


def _list_plugins() -> list[Row]:
    """List the plugins, including broken ones with the reason; runs that do not use these still work."""
    working = [(each.name, each.version or "", each.source, _describe_plugin(each)) for each in list_plugins()]
    broken = [(each.module, each.version, each.distribution, f"broken: {each.broken}") for each in _find_broken()]
    return [*working, *broken]


def _find_broken() -> list[Installed]:
    return [each for each in find_installed_plugins() if each.broken]


def _describe_plugin(plugin: Plugin) -> str:
    """List the plugin's options, with the description of the one named like the plugin, or else of the first."""
    offers = sorted(plugin.options, key=lambda option: not plugin.name.endswith(f".{option.name}"))
    names = ", ".join(f"{option.group}={option.name}" for option in offers)
    return f"{names}: {offers[0].about}" if offers else "no options"


def _pluralize_group(group: str) -> str:
    return f"{group[:-1]}ies" if group.endswith("y") else f"{group}s"


def _describe_source(option: Option, known: Sequence[Plugin]) -> str:
    """Return the plugin that provides the option, and its source; for the project's own options, return the file."""
    owner = next((plugin for plugin in known if option.file.is_relative_to(plugin.folder)), None)
    if owner is not None:
        return owner.name if owner.source == "worldsize" else f"{owner.name} ({owner.source})"
    here = Path.cwd().resolve()
    is_own = option.file.is_relative_to(here) and not option.file.is_relative_to(main_conf())
    return str(option.file.relative_to(here)) if is_own else "worldsize"
