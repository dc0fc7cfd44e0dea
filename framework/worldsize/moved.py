"""Earlier names of modules: recorded runs and plugins that name them work for one more release, plugins with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

MOVED: Mapping[str, str] = {}  # the module's name now, by its earlier one


def current(path: str) -> str:
    """Return the name that ``path``, of a module or of something in one, has now."""
    module, dot, name = path.rpartition(".")
    if path in MOVED:
        return MOVED[path]
    return f"{current(module)}{dot}{name}" if module else path


def rename_targets(node: Any) -> None:
    """Give each ``_target_`` in ``node``, of plain containers, its present name."""
    if isinstance(node, dict):
        if isinstance(target := node.get("_target_"), str):
            node["_target_"] = current(target)
        node = list(node.values())
    for each in node if isinstance(node, list) else ():
        rename_targets(each)


class _Moved(ModuleType):
    """Stands where a module was, and gives the names of the one that has its contents now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by whoever looks through sys.modules
            raise AttributeError(name)
        module = MOVED[self.__name__]
        value = getattr(importlib.import_module(module), name)
        warnings.warn(f"{self.__name__} is {module} now; import {name} from there.", FutureWarning, stacklevel=2)
        return value


def register() -> None:
    """Make the earlier names importable; nothing is imported before one of them is used."""
    for path in MOVED:
        sys.modules.setdefault(path, _Moved(path))
