"""Text templates for launchers."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_template(template: str, /, **values: Any) -> str:
    """Render ``template`` with ``values``; raise UndefinedError if a value is missing."""
    environment = Environment(
        loader=PackageLoader("worldsize.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
