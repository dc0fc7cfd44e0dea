"""Checks that a checkpoint's manifest is consistent: whoever can write the folder can also forge its digests.

Nothing here opens a file. Errors raise ValueError, KeyError, TypeError or AttributeError.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from worldsize.checkpoint.tree import check_encoded

Box = tuple[tuple[int, int], ...]  # (begin, end) in each dimension

_SHARD = re.compile(r"rank_\d{5,}\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 63  # bytes of a tensor, or elements of a dimension, that torch cannot represent
MOST_DIMENSIONS = 64  # of a tensor; torch has the same limit
_MOST_SPLIT = 8  # dimensions along which one tensor is split; meshes have three or four


def check_manifest(manifest: Mapping[str, Any], itemsizes: Mapping[str, int]) -> None:
    """Check every value of a manifest except its schema version; ``itemsizes``: bytes of an element, by dtype."""
    check_count(manifest["step"], "step")
    if check_count(manifest["world_size"], "world_size") == 0:
        raise ValueError("world_size is 0, and somebody has written it")
    _check_facts(manifest["facts"])
    files, tensors = manifest["files"], manifest["tensors"]
    for name, file in files.items():
        if not is_shard(name) or not _SHA256.fullmatch(file["sha256"]):
            raise ValueError(f"file {name!r} has no name or no SHA-256 of a shard")
        check_count(file["size"], f"size of {name}")
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, files, itemsizes)
    _check_bytes((chunk for tensor in tensors.values() for chunk in tensor["chunks"]), files)
    if not isinstance(manifest["values"], dict) or manifest["values"].keys() & {"$tensor", "$tuple", "$float"}:
        raise ValueError("values are no mapping")
    check_encoded(manifest["values"], tensors.keys())


def is_shard(name: str) -> bool:
    """Return whether a file is named like a rank's shard."""
    return _SHARD.fullmatch(name) is not None


def check_count(number: Any, name: str) -> int:
    """Return ``number`` if it is an integer of at least 0; raise ValueError, naming it ``name``, if not."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{name} is {_short(number)}, which is no count")
    if number >= _LARGEST:
        raise ValueError(f"{name} is {_short(number)}, which is too large")
    return number


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < _LARGEST else f"{value:#x}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_facts(facts: Any) -> None:
    """Check the facts that loading and retention read; the others belong to the caller."""
    if not isinstance(facts, dict):
        raise ValueError("facts are no mapping")
    check_count(facts.get("skipped", 0), "skipped")
    if not isinstance(facts.get("evaluated", True), bool):
        raise ValueError(f"evaluated is {_short(facts['evaluated'])}, which is neither true nor false")
    for name, value in facts.get("metrics", {}).items():
        if type(value) not in (int, float):
            raise ValueError(f"metric {name!r} is {_short(value)}, which is no number")
    for name, pairs in facts.get("training_metrics", {}).items():
        if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
            raise ValueError(f"training metric {name!r} is {_short(pairs)}, which is no list of sums and counts")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) in (int, float) for each in value)


def _check_tensor(name: str, tensor: Mapping[str, Any], files: Mapping[str, Any], itemsizes: Mapping[str, int]) -> None:
    """Check that every chunk is inside a listed file and the tensor, and that the chunks cover the tensor exactly."""
    itemsize, shape = itemsizes[tensor["dtype"]], _numbers(tensor["shape"], f"shape of {name}")
    if len(shape) > MOST_DIMENSIONS or math.prod(max(size, 1) for size in shape) * itemsize >= _LARGEST:
        raise ValueError(f"the shape of {name} is larger than a tensor can be")
    boxes = []
    for chunk in tensor["chunks"]:
        offsets, sizes = (_numbers(chunk[key], f"{key} of a chunk of {name}") for key in ("offsets", "sizes"))
        box = tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        if any(end > limit for (_, end), limit in zip(box, shape, strict=True)):
            raise ValueError(f"a chunk of {name} lies outside of its shape")
        length = check_count(chunk["length"], f"length of a chunk of {name}")
        begin = check_count(chunk["offset"], f"offset of a chunk of {name}")
        if length != math.prod(sizes) * itemsize or begin + length > files[chunk["file"]]["size"]:
            raise ValueError(f"a chunk of {name} does not fit its file")
        if length and begin % itemsize:
            raise ValueError(f"a chunk of {name} begins at byte {begin}, where its dtype cannot")
        boxes.append(box)
    if not covers_exactly(shape, boxes):
        raise ValueError(f"the chunks of {name} do not make up its shape: they overlap, or leave a part without values")


def _numbers(values: Any, name: str) -> list[int]:
    if not isinstance(values, list):
        raise ValueError(f"{name} is {_short(values)}, which is no list")
    return [check_count(value, name) for value in values]


def covers_exactly(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes, all within ``shape``, cover each of its elements exactly once.

    A sum of boxes is determined by its mixed difference along all dimensions, to which each box contributes +1 or -1 at
    every corner (inclusion-exclusion). So the boxes cover the shape if and only if their signed corners add up to those
    of the shape. That takes time linear in the number of boxes; comparing all pairs of thousands of shards would take
    minutes. Dimensions that no box splits are left out, since each doubles the number of corners.

    Raises:
        ValueError: the boxes are split along more than 8 dimensions.
    """
    full: Box = tuple((0, size) for size in shape)
    boxes = [box for box in boxes if all(begin < end for begin, end in box)]
    if math.prod(shape) == 0:
        return not boxes
    split = [dimension for dimension in range(len(shape)) if any(box[dimension] != full[dimension] for box in boxes)]
    if len(split) > _MOST_SPLIT:
        raise ValueError(f"a tensor is split along {len(split)} dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        corners.update(_signed_corners([box[dimension] for dimension in split]))
    corners.subtract(_signed_corners([full[dimension] for dimension in split]))
    return not any(corners.values())


def _signed_corners(box: Sequence[tuple[int, int]]) -> dict[tuple[int, ...], int]:
    """Map each corner of a non-empty box to -1 if an odd number of its coordinates are ends, otherwise to +1."""
    sides = product(*[((begin, 1), (end, -1)) for begin, end in box])
    return {tuple(place for place, _ in corner): math.prod(sign for _, sign in corner) for corner in sides}


def _check_bytes(chunks: Iterable[Mapping[str, Any]], files: Mapping[str, Any]) -> None:
    """Check that the chunks of a file follow each other up to its end, without gaps or overlaps.

    Without the check, a small file could claim to hold a large tensor.
    """
    for (file, _, end), (other, begin, _) in pairwise([*sorted(_spans(chunks)), ("", 0, 0)]):
        after = begin if other == file else files[file]["size"]
        if end > after:
            raise ValueError(f"two chunks share bytes of {file}")
        if end < after:
            raise ValueError(f"no chunk has the bytes of {file} from {end} to {after}")


def _spans(chunks: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int, int]]:
    for chunk in chunks:
        if chunk["length"]:
            yield chunk["file"], chunk["offset"], chunk["offset"] + chunk["length"]
