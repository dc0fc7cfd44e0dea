"""Texts that launchers fill in."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def filled(template: str, /, **values: Any) -> str:
    """``template`` with ``values``; a name that is not given is an error."""
    environment = Environment(
        loader=PackageLoader("worldsize.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
