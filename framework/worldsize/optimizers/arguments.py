"""Checks of tuple options of optimizers, such as ``betas``; torch does not check lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from worldsize.errors import ConfigError

_ANY_NUMBER = ("...", "list", "Sequence", "Iterable")  # type names that allow any length


def check_tuples(make: Callable[..., Any], options: Mapping[str, Any], *, key: str) -> None:
    """Check that options with a numeric tuple as default are numeric and of the same length.

    Args:
        make: The optimizer class, or a factory function.
        options: Options by name.
        key: Configuration key of ``options``.

    Raises:
        ConfigError: an option has the wrong length or type.
    """
    for name, parameter in inspect.signature(make).parameters.items():
        usual = parameter.default
        if name in options and _is_fixed(parameter) and not _is_compatible(options[name], usual):
            given, example = (str(value).replace(" ", "") for value in (options[name], [*usual]))
            kind = getattr(make, "__name__", make)
            raise ConfigError(f"{key}.{name}={given}: {kind} takes {len(usual)} numbers. Set {key}.{name}={example}.")


def _is_fixed(parameter: inspect.Parameter) -> bool:
    """Return whether the default is a numeric tuple and the annotation allows no other length."""
    usual, annotation = parameter.default, str(parameter.annotation)
    is_of_numbers = isinstance(usual, tuple) and {*map(type, usual)} <= {int, float, type(None)} and any(usual)
    return is_of_numbers and not any(word in annotation for word in _ANY_NUMBER)


def _is_compatible(value: Any, usual: tuple[Any, ...]) -> bool:
    if not isinstance(value, list | tuple) or len(value) != len(usual):
        return False
    return all(
        given is default is None or (isinstance(given, int | float) and not isinstance(given, bool))
        for given, default in zip(value, usual, strict=True)
    )
