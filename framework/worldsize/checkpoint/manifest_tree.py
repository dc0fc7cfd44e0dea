"""Lossless conversion of states to tensors and JSON (no pickle), and checks of manifests.

The checks are needed in addition to digests, since a user with write access to the folder can also forge its digests.
They do not open files. They raise ValueError, KeyError, TypeError or AttributeError for an inconsistent manifest.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise, product
from typing import Any

import numpy as np
from torch import Tensor

from worldsize.errors import CheckpointError

_DEEPEST = 100  # maximum nesting of encoded values


def split_tensors(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return tensors by path, and the tree as JSON with ``{"$tensor": path}`` in their place.

    Raises:
        CheckpointError: a leaf is neither a tensor nor a plain value (None, bool, int, float, str; NumPy scalars are
            converted to these), or two tensors have the same path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode_node(tree, "", tensors)


def join_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a tree from JSON and tensors of any shapes; the inverse of :func:`split_tensors`."""
    if isinstance(value, list):
        return [join_tensors(child, tensors) for child in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("$tensor", name):
            return tensors[name]
        case ("$tuple", children):
            return tuple(join_tensors(child, tensors) for child in children)
        case ("$float", text):
            return float(text)
        case ("$items", pairs):
            return {key: join_tensors(child, tensors) for key, child in pairs}
    return {key: join_tensors(child, tensors) for key, child in value.items()}


def check_encoded(value: Any, names: Set[str]) -> None:
    """Check that ``value`` is encoded correctly and refers to each tensor in ``names`` exactly once.

    Raises:
        ValueError: the encoding is invalid, or a tensor is missing, unknown or referred to more than once.
    """
    references = list(_references(value, "", 0))
    if lost := sorted(names - set(references)):
        raise ValueError(f"the tensor {lost[0]!r} is missing from values")
    if unknown := sorted(set(references) - names):
        raise ValueError(f"values refer to an unknown tensor {unknown[0]!r}")
    if len(references) > len(names):  # a key 'a/b' has the same path as 'b' nested in 'a'
        raise ValueError("values refer to a tensor more than once")


def _references(node: Any, path: str, depth: int) -> Iterator[str]:
    """Yield the tensor names in a value; raise ValueError if a name differs from its path."""
    if depth > _DEEPEST:
        raise ValueError(f"values are nested more than {_DEEPEST} levels deep")
    for key, child in _children(node, path):
        yield from _references(child, f"{path}/{key}" if path else str(key), depth + 1)
    if isinstance(node, dict) and "$tensor" in node:
        if node["$tensor"] != path:
            raise ValueError(f"{path!r} in values refers to a different tensor, {node['$tensor']!r}")
        yield path


def _children(node: Any, path: str) -> list[tuple[Any, Any]]:
    """Return a node's keys and children; raise ValueError if it is not valid output of :func:`split_tensors`."""
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
    raise ValueError(f"{path!r} in values is invalid: {str(node)[:80]}")


def _is_item(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)


def order_like(tree: Any, template: Any) -> Any:
    """Return ``tree`` with its keys in the order of ``template``; other keys come last.

    Manifests sort their keys, but training states do not. Code that traverses a state, for example to send it as one
    buffer, needs the same order before and after a load.
    """
    if isinstance(tree, list | tuple) and isinstance(template, list | tuple):
        parts = [order_like(*pair) for pair in zip(tree, template, strict=False)]
        return type(tree)([*parts, *tree[len(parts) :]])
    if not isinstance(tree, Mapping) or not isinstance(template, Mapping):
        return tree
    keys = [*(key for key in template if key in tree), *(key for key in tree if key not in template)]
    return {key: order_like(tree[key], template.get(key)) for key in keys}


def _encode_node(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, Tensor):
        if path in tensors:  # only one of the two would be saved
            raise CheckpointError(
                f"two tensors of the state have the same name {path} (e.g. a key 'a/b', or keys 1 and '1'). Rename "
                "one of them."
            )
        tensors[path] = node
        return {"$tensor": path}
    if isinstance(node, Mapping):
        return _encode_mapping(node, path, tensors)
    if isinstance(node, list):
        return [_encode_node(child, f"{path}/{index}", tensors) for index, child in enumerate(node)]
    if isinstance(node, tuple):
        return {"$tuple": [_encode_node(child, f"{path}/{index}", tensors) for index, child in enumerate(node)]}
    if isinstance(node, np.generic):
        node = _python_value(node)
    if isinstance(node, float) and not math.isfinite(node):
        return {"$float": str(node)}
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise CheckpointError(
        f"{path} is a {type(node).__name__}; checkpoints do not support this type. Use only tensors and plain values "
        "(None, bool, int, float, str, and lists, tuples and dicts) in the state."
    )


def _python_value(number: np.generic) -> Any:
    """Convert a NumPy scalar to a Python value; return others, such as complex, unchanged."""
    value = number.item()
    return value if isinstance(value, bool | int | float | str) and not isinstance(value, np.generic) else number


def _encode_mapping(node: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    plain = {_python_value(key) if isinstance(key, np.generic) else key: child for key, child in node.items()}
    children = {
        key: _encode_node(child, f"{path}/{key}" if path else str(key), tensors) for key, child in plain.items()
    }
    if all(isinstance(key, str) and not key.startswith("$") for key in children):
        return children
    if all(isinstance(key, str | int) for key in children):
        return {"$items": [[key, child] for key, child in children.items()]}
    raise CheckpointError(f"{path} has unsupported keys: keys must be strings or integers in a checkpoint.")


Box = tuple[tuple[int, int], ...]  # (begin, end) in each dimension

_SHARD = re.compile(r"rank_\d{5,}\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 63  # exceeds torch's int64 sizes, in bytes or elements
MOST_DIMENSIONS = 64  # maximum tensor dimensions, the same as torch's limit
_MOST_SPLIT = 8  # maximum sharded dimensions per tensor; meshes have three or four


def check_manifest(manifest: Mapping[str, Any], itemsizes: Mapping[str, int]) -> None:
    """Check a manifest, except its schema version. ``itemsizes`` has the bytes per element by dtype name."""
    check_count(manifest["step"], "step")
    if check_count(manifest["world_size"], "world_size") == 0:
        raise ValueError("world_size is 0, expected at least 1")
    _check_facts(manifest["facts"])
    files, tensors = manifest["files"], manifest["tensors"]
    for name, file in files.items():
        if not is_shard(name) or not _SHA256.fullmatch(file["sha256"]):
            raise ValueError(f"file {name!r} has an invalid name or SHA-256")
        check_count(file["size"], f"size of {name}")
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, files, itemsizes)
    _check_bytes((chunk for tensor in tensors.values() for chunk in tensor["chunks"]), files)
    if not isinstance(manifest["values"], dict) or manifest["values"].keys() & {"$tensor", "$tuple", "$float"}:
        raise ValueError("values are not a mapping")
    check_encoded(manifest["values"], tensors.keys())


def is_shard(name: str) -> bool:
    """Return whether ``name`` has the form of a rank's shard file."""
    return _SHARD.fullmatch(name) is not None


def check_count(number: Any, name: str) -> int:
    """Return ``number`` if it is an integer in [0, 2**63); otherwise raise ValueError."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{name} is {_abbreviate_value(number)}, expected a non-negative integer")
    if number >= _LARGEST:
        raise ValueError(f"{name} is {_abbreviate_value(number)}, which is too large")
    return number


def _abbreviate_value(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < _LARGEST else f"{value:#x}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_facts(facts: Any) -> None:
    """Check the facts used by loading and retention; other facts are not checked."""
    if not isinstance(facts, dict):
        raise ValueError("facts are not a mapping")
    check_count(facts.get("skipped", 0), "skipped")
    if not isinstance(facts.get("evaluated", True), bool):
        raise ValueError(f"evaluated is {_abbreviate_value(facts['evaluated'])}, expected true or false")
    for name, value in facts.get("metrics", {}).items():
        if type(value) not in (int, float):
            raise ValueError(f"metric {name!r} is {_abbreviate_value(value)}, not a number")
    for name, pairs in facts.get("training_metrics", {}).items():
        if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
            raise ValueError(
                f"training metric {name!r} is {_abbreviate_value(pairs)}, not a list of (sum, count) pairs"
            )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) in (int, float) for each in value)


def _check_tensor(name: str, tensor: Mapping[str, Any], files: Mapping[str, Any], itemsizes: Mapping[str, int]) -> None:
    """Check that chunks lie within their files and cover the tensor exactly."""
    itemsize, shape = itemsizes[tensor["dtype"]], _check_counts(tensor["shape"], f"shape of {name}")
    if len(shape) > MOST_DIMENSIONS or math.prod(max(size, 1) for size in shape) * itemsize >= _LARGEST:
        raise ValueError(f"the shape of {name} exceeds the maximum tensor size")
    boxes = []
    for chunk in tensor["chunks"]:
        offsets, sizes = (_check_counts(chunk[key], f"{key} of a chunk of {name}") for key in ("offsets", "sizes"))
        box = tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        if any(end > limit for (_, end), limit in zip(box, shape, strict=True)):
            raise ValueError(f"a chunk of {name} is out of bounds")
        length = check_count(chunk["length"], f"length of a chunk of {name}")
        begin = check_count(chunk["offset"], f"offset of a chunk of {name}")
        if length != math.prod(sizes) * itemsize or begin + length > files[chunk["file"]]["size"]:
            raise ValueError(f"a chunk of {name} does not fit its file")
        if length and begin % itemsize:
            raise ValueError(f"a chunk of {name} begins at byte {begin}, which is not aligned to its dtype")
        boxes.append(box)
    if not covers_exactly(shape, boxes):
        raise ValueError(f"the chunks of {name} overlap or do not cover its shape")


def _check_counts(values: Any, name: str) -> list[int]:
    if not isinstance(values, list):
        raise ValueError(f"{name} is {_abbreviate_value(values)}, not a list")
    return [check_count(value, name) for value in values]


def covers_exactly(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether the boxes, all within ``shape``, cover each element exactly once.

    A sum of indicator functions of boxes is determined by its mixed difference along all dimensions, where each box
    contributes +1 or -1 at every corner (inclusion-exclusion). The boxes therefore cover the shape exactly if and only
    if their signed corners add up to the shape's. This takes linear time; comparing thousands of shards pairwise would
    take minutes. Unsplit dimensions are skipped, since each dimension doubles the number of corners.

    Raises:
        ValueError: the boxes are split along more than 8 dimensions.
    """
    full: Box = tuple((0, size) for size in shape)
    boxes = [box for box in boxes if all(begin < end for begin, end in box)]
    if math.prod(shape) == 0:
        return not boxes
    split = [dimension for dimension in range(len(shape)) if any(box[dimension] != full[dimension] for box in boxes)]
    if len(split) > _MOST_SPLIT:
        raise ValueError(f"a tensor is split along {len(split)} dimensions, more than the limit of {_MOST_SPLIT}")
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        corners.update(_compute_corner_signs([box[dimension] for dimension in split]))
    corners.subtract(_compute_corner_signs([full[dimension] for dimension in split]))
    return not any(corners.values())


def _compute_corner_signs(box: Sequence[tuple[int, int]]) -> dict[tuple[int, ...], int]:
    """Map a box's corners to -1 for an odd number of end coordinates, otherwise to +1."""
    sides = product(*[((begin, 1), (end, -1)) for begin, end in box])
    return {tuple(place for place, _ in corner): math.prod(sign for _, sign in corner) for corner in sides}


def _check_bytes(chunks: Iterable[Mapping[str, Any]], files: Mapping[str, Any]) -> None:
    """Check that the chunks of each file are contiguous up to its end, without gaps or overlaps.

    Otherwise, overlapping chunks could describe a large tensor in a small file.
    """
    for (file, _, end), (other, begin, _) in pairwise([*sorted(_list_spans(chunks)), ("", 0, 0)]):
        after = begin if other == file else files[file]["size"]
        if end > after:
            raise ValueError(f"two chunks overlap in {file}")
        if end < after:
            raise ValueError(f"bytes {end} to {after} of {file} do not belong to any chunk")


def _list_spans(chunks: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int, int]]:
    for chunk in chunks:
        if chunk["length"]:
            yield chunk["file"], chunk["offset"], chunk["offset"] + chunk["length"]
