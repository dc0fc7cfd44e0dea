"""``worldsize init NAME``: create a folder with a project that trains and has a test."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from worldsize import __version__
from worldsize.cli.templates import render_templates, write_files
from worldsize.config.search_path import get_bundle_folder
from worldsize.errors import ConfigError
from worldsize.messages import report_error

RECIPE = "mine"


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize init", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="a new or empty folder, e.g. my_project; its name becomes the project's name"
    )
    folder = parser.parse_args().folder
    try:
        init(folder)
    except ConfigError as error:
        sys.exit(report_error(error))
    print(f"cd {shlex.quote(str(folder))}\nuv run train.py\nuv run pytest")


def init(folder: Path) -> list[Path]:
    """Create a project in ``folder``, with a git repository unless it is already in one; return the written files.

    Raises:
        ConfigError: the folder is not empty, or its name is not a valid project name.
    """
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise ConfigError(f"{name!r} is not a valid project name. Use letters, digits, '-', '_' and '.'.")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty. Choose a different folder; nothing was written.")
    project = render_templates(
        "init", folder, name=name, recipe=RECIPE, requirement=f"worldsize>={__version__}", source=read_install_source()
    )
    written = list(write_files({**project, **render_templates("recipe", folder, name=RECIPE)}))
    with suppress(OSError):  # git is not installed
        if subprocess.run(["git", "rev-parse", "--git-dir"], cwd=folder, capture_output=True).returncode:
            subprocess.run(["git", "init", "--quiet"], cwd=folder, capture_output=True)
    return written


def read_install_source() -> str | None:
    """Return this installation's source for uv (PEP 610) as an inline TOML table; None for a package index."""
    try:
        origin = distribution("worldsize").read_text("direct_url.json")
    except PackageNotFoundError:
        return _format_inline_table(path=str(get_bundle_folder()), editable=True)
    if origin is None:
        return None
    facts = json.loads(origin)
    if vcs := facts.get("vcs_info"):
        return _format_inline_table(git=facts["url"], rev=vcs["commit_id"])
    if facts["url"].startswith("file:"):
        path = unquote(urlparse(facts["url"]).path)
        return _format_inline_table(path=path, **({"editable": True} if "dir_info" in facts else {}))
    return _format_inline_table(url=facts["url"])


def _format_inline_table(**values: str | bool) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"
