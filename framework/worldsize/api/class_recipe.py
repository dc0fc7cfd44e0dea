"""Trains a recipe class defined in a script or a notebook cell, without a YAML file."""

from __future__ import annotations

import builtins
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from worldsize.core import Recipe
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.messages import report_error

FACTORIES = {"make_optimizer": "${optimizer}", "make_schedule": "${schedule}"}  # as in a recipe's YAML


def train_class(recipe: type[Recipe], words: Sequence[str], result_fd: int) -> NoReturn:
    """Run ``worldsize train`` in this forked process, write the run folder's path to ``result_fd``, and exit."""
    code = 1
    try:
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))  # notebooks replace them
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        vars(builtins).pop("get_ipython", None)  # otherwise rich would print to the notebook, not to the pipe
        code = _train_here(recipe, words, result_fd)
    except WorldsizeError as error:
        code = report_error(error)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train_here(recipe: type[Recipe], words: Sequence[str], result_fd: int) -> int:
    import torch

    from worldsize.cli.train import train
    from worldsize.messages import show_messages

    if torch.cuda._is_in_bad_fork():
        raise ConfigError(
            "CUDA is already initialized, so this process cannot be forked. Restart the program, and call train() "
            "before any CUDA operation."
        )
    path = f"{recipe.__module__}.{recipe.__qualname__}"
    if recipe.__qualname__ != recipe.__name__:
        raise ConfigError(f"{path} is a nested class. Define it at the top level of a cell or a module.")
    ConfigStore.instance().store(recipe.__name__, _build_config_node(recipe, path), group="recipe", package="_global_")
    show_messages()
    sys.argv = ["worldsize", "train"]
    return train([f"recipe={recipe.__name__}", *_allow_target(words, path)], result_fd)


def _allow_target(words: Sequence[str], path: str) -> list[str]:
    """Add ``path`` to the ``allow_targets`` override in ``words``; a malformed list is left for Hydra to report."""
    from worldsize.config.arguments import parse_override_key
    from worldsize.config.command_line import readable

    own = [word for word in words if parse_override_key(word) == "allow_targets"]
    if not own:
        return [*words, f"allow_targets=[{path}]"]
    try:
        value = OverridesParser.create().parse_override(readable(own[-1:])[0]).value()
    except HydraException:
        value = None
    if not isinstance(value, list):
        return [*words]
    names = own[-1].partition("=")[2].strip()[1:-1].strip()
    return [*(word for word in words if word != own[-1]), f"allow_targets=[{names and f'{names},'}{path}]"]


def _build_config_node(recipe: type[Recipe], path: str) -> dict[str, Any]:
    """Return the configuration node that a recipe's YAML would define: ``_target_`` and a key per parameter."""
    keys: dict[str, Any] = {"_target_": path}
    for name, parameter in inspect.signature(recipe).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{path}: {parameter} is not supported, because no key can set it. Use named parameters.")
        default = "???" if parameter.default is parameter.empty else parameter.default
        keys[name] = FACTORIES.get(name, default)
        try:
            OmegaConf.create({name: keys[name]})
        except OmegaConfBaseException:
            raise ConfigError(
                f"{path}: the default of {name} has the unsupported type {type(default).__name__}. Use a number, a "
                "string, a list or None."
            ) from None
    return {"recipe": keys}
