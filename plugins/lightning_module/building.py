"""Build the LightningModule and LightningDataModule named in the configuration."""

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

from plugins.lightning_module.hooks import find_lightning_base
from worldsize.config.instantiate import describe_failure
from worldsize.core import ConfigError
from worldsize.errors import neighbours
from worldsize.seeds import keep_generators, seed_generators


def no_datamodule() -> None:
    """Return None instead of a data module, for a LightningModule with its own DataLoaders."""


def build_component(make: Callable[..., Any], arguments: Mapping[str, Any], *, key: str, base: str) -> Any:
    """Call ``make`` with the configured arguments.

    Args:
        key: configuration key that names the class, such as ``recipe.module``.
        base: name of the required Lightning base class.

    Raises:
        ConfigError: an argument is unknown or missing, the call fails, or the class does not derive from ``base``.
    """
    _check_arguments(make, arguments, key)
    try:
        value = make(**arguments)
    except (ConfigError, OSError, ImportError):
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {_get_factory_name(make)} cannot be built: {describe_failure(error)}.") from error
    if value is not None and find_lightning_base(value, base) is None:
        raise ConfigError(f"{key}: {_get_factory_name(make)} is not a {base}. Use a subclass of lightning's {base}.")
    return value


def _get_factory_name(make: Any) -> str:
    return str(getattr(getattr(make, "func", make), "__name__", make))


def _check_arguments(make: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> None:
    parameters = inspect.signature(make).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            raise ConfigError(f"unknown key '{key}_args.{name}'{neighbours(name, parameters)}")
    needed = [
        name for name, each in parameters.items() if each.default is each.empty and each.kind != each.VAR_POSITIONAL
    ]
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigError(f"{_get_factory_name(make)} requires {', '.join(missing)}. Set {key}_args.{missing[0]}.")


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch within the context; restore their generator states afterward."""
    cpu = torch.device("cpu")
    with keep_generators(), cpu:
        seed_generators(seed, cpu)
        yield


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Hold a lock in this block that only one of this user's processes on this host can hold.

    The first process downloads the data; the others then find it on disk.
    """
    path = Path(tempfile.gettempdir()) / f"worldsize_{os.getuid()}_{name}.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
