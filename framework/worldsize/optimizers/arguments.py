"""Checks options of optimizers that are several numbers, such as ``betas``: torch's constructors index them unasked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from worldsize.errors import ConfigError


def check_tuples(make: Callable[..., Any], options: Mapping[str, Any], *, key: str) -> None:
    """Check that each option whose default is some numbers has as many numbers.

    Args:
        make: The optimizer, or a function that makes it.
        options: Options by name.
        key: The configuration's key of ``options``.

    Raises:
        ConfigError: an option has another number of numbers, or something else.
    """
    for name, parameter in inspect.signature(make).parameters.items():
        if name in options and isinstance(usual := parameter.default, tuple) and not _fits(options[name], usual):
            given, example = (str(value).replace(" ", "") for value in (options[name], [*usual]))
            kind = getattr(make, "__name__", make)
            raise ConfigError(f"{key}.{name}={given}: {kind} takes {len(usual)} numbers. Set {key}.{name}={example}.")


def _fits(value: Any, usual: tuple[Any, ...]) -> bool:
    if not isinstance(value, list | tuple) or len(value) != len(usual):
        return False
    return all(
        given is default is None or (isinstance(given, int | float) and not isinstance(given, bool))
        for given, default in zip(value, usual, strict=True)
    )
