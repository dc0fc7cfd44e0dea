"""Converts a state tree to named tensors and a JSON value, and back; exact, and without pickle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
from torch import Tensor

from worldsize.errors import CheckpointError

_DEEPEST = 100  # nesting of a state; deeper trees are refused, such as those that contain themselves


def split(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return all tensors by their path, and the tree as JSON in which each tensor is ``{"$tensor": path}``.

    Raises:
        CheckpointError: a leaf is neither a tensor nor plain (None, bool, int, float, str; NumPy's numbers become
            these), or two tensors have the same path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encoded(tree, "", tensors)


def join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that :func:`split` converted; ``tensors`` may have any shapes."""
    if isinstance(value, list):
        return [join(child, tensors) for child in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("$tensor", name):
            return tensors[name]
        case ("$tuple", children):
            return tuple(join(child, tensors) for child in children)
        case ("$float", text):
            return float(text)
        case ("$items", pairs):
            return {key: join(child, tensors) for key, child in pairs}
    return {key: join(child, tensors) for key, child in value.items()}


def check_encoded(value: Any, names: Set[str]) -> None:
    """Check that ``value`` has the form of :func:`split`'s, and refers to each of the tensors ``names`` once.

    Raises:
        ValueError: the check fails; the message says where and why.
    """
    references = list(_references(value, "", 0))
    if lost := sorted(names - set(references)):
        raise ValueError(f"the tensor {lost[0]!r} is nowhere in values")
    if unknown := sorted(set(references) - names):
        raise ValueError(f"values name the tensor {unknown[0]!r}, which does not exist")
    if len(references) > len(names):  # a key like 'a/b' can have the same path as another
        raise ValueError("values name a tensor twice")


def _references(node: Any, path: str, depth: int) -> Iterator[str]:
    """Yield the names of the tensors that an encoded value refers to; each must be at the path that is its name."""
    if depth > _DEEPEST:
        raise ValueError(f"values are nested more than {_DEEPEST} deep")
    for key, child in _children(node, path):
        yield from _references(child, f"{path}/{key}" if path else str(key), depth + 1)
    if isinstance(node, dict) and "$tensor" in node:
        if node["$tensor"] != path:
            raise ValueError(f"{path!r} in values is said to be the tensor {node['$tensor']!r}")
        yield path


def _children(node: Any, path: str) -> list[tuple[Any, Any]]:
    """Return the keys and encoded values inside a node; raise ValueError if :func:`split` cannot have written it."""
    match node:
        case None | bool() | int() | str():
            return []
        case float() if math.isfinite(node):
            return []
        case {"$tensor": str()} | {"$float": "inf" | "-inf" | "nan"} if len(node) == 1:
            return []
        case list() as children:
            return list(enumerate(children))
        case {"$tuple": list() as children} if len(node) == 1:
            return list(enumerate(children))
        case {"$items": list() as pairs} if len(node) == 1 and all(map(_is_item, pairs)):
            return [(key, child) for key, child in pairs]
        case dict() if not any(key.startswith("$") for key in node):
            return list(node.items())
    raise ValueError(f"{path!r} in values is {str(node)[:80]}, which no checkpoint holds")


def _is_item(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)


def ordered_like(tree: Any, template: Any) -> Any:
    """Return ``tree`` with its keys in the order of ``template``; keys that the template lacks come last.

    A manifest sorts its keys, training does not. Code that walks through a state, for example to send it as one buffer,
    needs the same order before and after a load.
    """
    if isinstance(tree, list | tuple) and isinstance(template, list | tuple):
        parts = [ordered_like(*pair) for pair in zip(tree, template, strict=False)]
        return type(tree)([*parts, *tree[len(parts) :]])
    if not isinstance(tree, Mapping) or not isinstance(template, Mapping):
        return tree
    keys = [*(key for key in template if key in tree), *(key for key in tree if key not in template)]
    return {key: ordered_like(tree[key], template.get(key)) for key in keys}


def _encoded(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, Tensor):
        if path in tensors:  # only one of the two would be saved
            raise CheckpointError(f"two tensors of the state are called {path} (keys like 'a/b', or 1 and '1').")
        tensors[path] = node
        return {"$tensor": path}
    if isinstance(node, Mapping):
        return _mapping(node, path, tensors)
    if isinstance(node, list):
        return [_encoded(child, f"{path}/{index}", tensors) for index, child in enumerate(node)]
    if isinstance(node, tuple):
        return {"$tuple": [_encoded(child, f"{path}/{index}", tensors) for index, child in enumerate(node)]}
    if isinstance(node, np.generic):
        node = _python_value(node)
    if isinstance(node, float) and not math.isfinite(node):
        return {"$float": str(node)}
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise CheckpointError(
        f"{path} is a {type(node).__name__}, which a checkpoint cannot hold. "
        "Keep tensors and plain values (None, bool, int, float, str, and lists, tuples and dicts of them) in the state."
    )


def _python_value(number: np.generic) -> Any:
    """Return Python's number of the same value; other scalars, such as complex ones, as they are."""
    value = number.item()
    return value if isinstance(value, bool | int | float | str) and not isinstance(value, np.generic) else number


def _mapping(node: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    plain = {_python_value(key) if isinstance(key, np.generic) else key: child for key, child in node.items()}
    children = {key: _encoded(child, f"{path}/{key}" if path else str(key), tensors) for key, child in plain.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in children):
        return children
    if all(isinstance(key, str | int) for key in children):
        return {"$items": [[key, child] for key, child in children.items()]}
    raise CheckpointError(f"{path} has keys that are neither strings nor integers, which a checkpoint cannot hold.")
