"""The key ``groups`` of an optimizer in the configuration: torch's optimizers have no such argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from worldsize.errors import ConfigError
from worldsize.optimizers.arguments import check_tuples


def makes_optimizer(target: Any) -> bool:
    """Return whether ``target`` is an optimizer, or a function that is annotated to return one."""
    from torch.optim import Optimizer  # not before: who only composes or asks for help would wait for it

    if isinstance(target, type):
        return issubclass(target, Optimizer)
    return inspect.signature(target).return_annotation in (Optimizer, "Optimizer")


def check_groups(target: Any, groups: Any, *, key: str) -> None:
    """Raise ConfigError unless ``groups`` is null or maps names to groups of ``target``, each with patterns."""
    if groups is None:
        return
    if not isinstance(groups, Mapping):
        raise ConfigError(f'{key}={groups!r} is no mapping. Write {key}={{no_decay: {{match: ["*.bias"]}}}}.')
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not group.get("match"):
            raise ConfigError(f'{key}.{name} needs patterns of parameters. Set {key}.{name}.match=["*.bias"].')
        check_tuples(target, group, key=f"{key}.{name}")


def with_groups(node: Any, locate: Callable[[str, str], Any], key: str) -> Any:
    """Return ``node`` with a call of :func:`grouped` in place of each optimizer that has the key ``groups``."""
    if isinstance(node, list):
        return [with_groups(child, locate, key) for child in node]
    if not isinstance(node, Mapping):
        return node
    if "groups" not in node or "_target_" not in node or not makes_optimizer(locate(node["_target_"], key)):
        return {name: with_groups(child, locate, key) for name, child in node.items()}
    from worldsize.optimizers.groups import grouped  # which imports torch

    make = {name: value for name, value in node.items() if name != "groups"}
    target = f"{grouped.__module__}.{grouped.__qualname__}"
    return {"_target_": target, "_partial_": True, "make": make, "groups": node["groups"] or {}}
