"""``worldsize new KIND NAME``: create a working strategy, launcher, recipe or logger with a test."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path

from worldsize.cli.templates import render_templates, write_files
from worldsize.config.search_path import list_options, list_plugins
from worldsize.errors import ConfigError
from worldsize.messages import report_error

_GROUPS = {"strategy": "strategy", "launcher": "cluster", "recipe": "recipe", "logger": "logger"}
_TRY = {
    "strategy": "uv run train.py strategy={name}",
    "launcher": "uv run train.py +cluster={name}",
    "recipe": "uv run train.py recipe={name}",
    "logger": "uv run train.py logger={name}",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize new", description=__doc__)
    parser.add_argument("kind", choices=_GROUPS)
    parser.add_argument("name", help="name of the module and the option in lower case, e.g. my_strategy")
    arguments = parser.parse_args()
    try:
        written = new(arguments.kind, arguments.name, Path.cwd())
    except ConfigError as error:
        sys.exit(report_error(error))
    for path in written:
        print(path.relative_to(Path.cwd()))
    print(
        f"\ntry it:   {_TRY[arguments.kind].format(name=arguments.name)}\n"
        f"test it:  uv run --group dev pytest tests/test_{arguments.name}.py"
    )


def new(kind: str, name: str, folder: Path) -> list[Path]:
    """Create a plugin or recipe in ``folder``; return the written files.

    Raises:
        ConfigError: the name is taken, or is not a module name.
    """
    check_name(name)
    _check_free(kind, name)
    return list(write_files(render_templates(kind, folder, name=name)))


def check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a valid module name. Use lower-case letters, digits and underscores.")


def _check_free(kind: str, name: str) -> None:
    for option in list_options():
        if (option.group, option.name) == (_GROUPS[kind], name):
            raise ConfigError(f"{option.group}={name} already exists in {option.file}. Choose a different name.")
    for plugin in list_plugins():
        if plugin.name == f"{'recipes' if kind == 'recipe' else 'plugins'}.{name}":
            raise ConfigError(f"{plugin.name} already exists in {plugin.folder}. Choose a different name.")
