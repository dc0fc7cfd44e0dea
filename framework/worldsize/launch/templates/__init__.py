"""Text templates of launchers."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def filled(template: str, /, **values: Any) -> str:
    """Fill ``values`` into ``template``; raise UndefinedError if one is missing."""
    environment = Environment(
        loader=PackageLoader("worldsize.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
