"""Template files for ``init`` and ``new``, with one folder per kind, laid out as in a project."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from worldsize.errors import ConfigError

_FOLDER = Path(__file__).parent


def render_templates(kind: str, folder: Path, *, name: str, **values: Any) -> dict[Path, str]:
    """Return the texts of the files to create in ``folder``, by path; replaces "NAME" and "dot_" in template paths.

    Raises:
        ConfigError: the class name is already used in the template's file.
    """
    environment = Environment(loader=FileSystemLoader(_FOLDER / kind), undefined=StrictUndefined, trim_blocks=True)
    environment.keep_trailing_newline = True
    class_name = "".join(part.title() for part in name.split("_"))
    given = {**values, "name": name, "class_name": class_name}
    templates = sorted(environment.list_templates(extensions=["j2"]))
    if any(re.search(rf"\b{re.escape(class_name)}\b", (_FOLDER / kind / each).read_text()) for each in templates):
        raise ConfigError(
            f"{kind} {name!r} would create the class {class_name}, whose name is already used in the file. Choose a "
            "different name."
        )
    return {folder / _render_path(each, name): environment.get_template(each).render(given) for each in templates}


def _render_path(template: str, name: str) -> str:
    return template.removesuffix(".j2").replace("NAME", name).replace("dot_", ".")


def write_files(files: dict[Path, str]) -> Sequence[Path]:
    """Write all files, or none of them if any exists.

    Raises:
        ConfigError: a file exists or cannot be written.
    """
    if there := [path for path in files if path.exists()]:
        raise ConfigError(f"{there[0]} already exists. Choose a different name; nothing was written.")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"failed to write {error.filename}: {error.strerror}.") from error
    return list(files)
