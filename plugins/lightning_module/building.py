"""Builds the LightningModule and LightningDataModule that a configuration names."""

from __future__ import annotations

import fcntl
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from plugins.lightning_module.hooks import base_of
from worldsize.config.instantiate import described_failure
from worldsize.core import ConfigError
from worldsize.errors import neighbours
from worldsize.record.determinism import generators_kept, seed_generators


def no_datamodule() -> None:
    """Return None, in place of a data module, for a LightningModule that has its DataLoaders itself."""


def built(make: Callable[..., Any], arguments: Mapping[str, Any], *, key: str, base: str) -> Any:
    """Call ``make`` with the arguments of the configuration.

    Args:
        key: key of the configuration that names the class: ``recipe.module``.
        base: Lightning's class that it must derive from.

    Raises:
        ConfigError: an argument is unknown or missing, it is no class of Lightning, or it cannot be built.
    """
    _check_arguments(make, arguments, key)
    try:
        value = make(**arguments)
    except (ConfigError, OSError, ImportError):
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {_name(make)} cannot be built: {described_failure(error)}.") from error
    if value is not None and base_of(value, base) is None:
        raise ConfigError(f"{key}: {_name(make)} is no {base} of lightning. Name a class that derives from it.")
    return value


def _name(make: Any) -> str:
    return str(getattr(getattr(make, "func", make), "__name__", make))


def _check_arguments(make: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> None:
    parameters = inspect.signature(make).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            raise ConfigError(f"no key '{key}_args.{name}'{neighbours(name, parameters)}")
    needed = [
        name for name, each in parameters.items() if each.default is each.empty and each.kind != each.VAR_POSITIONAL
    ]
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigError(f"{_name(make)} needs {', '.join(missing)}. Set {key}_args.{missing[0]}.")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch within the context, and restore the states of their generators after it."""
    cpu = torch.device("cpu")
    with generators_kept(), cpu:
        seed_generators(seed, cpu)
        yield


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Let the processes of this user on this host pass through the context one after the other.

    So one of them downloads data, and the others find them.
    """
    path = Path(tempfile.gettempdir()) / f"worldsize_{os.getuid()}_{name}.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
