"""Checks options of optimizers that are several numbers, such as ``betas``: torch's constructors index them unasked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from worldsize.errors import ConfigError

_ANY_NUMBER = ("...", "list", "Sequence", "Iterable")  # in annotations of what may have another length than its default


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
        usual = parameter.default
        if name in options and _is_fixed(parameter) and not _fits(options[name], usual):
            given, example = (str(value).replace(" ", "") for value in (options[name], [*usual]))
            kind = getattr(make, "__name__", make)
            raise ConfigError(f"{key}.{name}={given}: {kind} takes {len(usual)} numbers. Set {key}.{name}={example}.")


def _is_fixed(parameter: inspect.Parameter) -> bool:
    """Return whether the default is some numbers, and the annotation does not allow more or fewer."""
    usual, annotation = parameter.default, str(parameter.annotation)
    is_of_numbers = isinstance(usual, tuple) and {*map(type, usual)} <= {int, float, type(None)} and any(usual)
    return is_of_numbers and not any(word in annotation for word in _ANY_NUMBER)


def _fits(value: Any, usual: tuple[Any, ...]) -> bool:
    if not isinstance(value, list | tuple) or len(value) != len(usual):
        return False
    return all(
        given is default is None or (isinstance(given, int | float) and not isinstance(given, bool))
        for given, default in zip(value, usual, strict=True)
    )
