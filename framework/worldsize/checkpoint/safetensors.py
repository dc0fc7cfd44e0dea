"""The safetensors file format, and how each rank stores its tensors in it.

A file consists of the header length (8 bytes), the header in JSON, and the tensors' bytes. Source: the README of
Hugging Face's safetensors. Any safetensors reader can open a rank's file.

A full tensor is named by its path in the state, such as ``model/0.weight``. The name of a shard ends with its slice:
``model/0.weight[2:4,0:5]``. A dtype outside the format is stored as uint8 with one more dimension. The file's metadata
holds the full shapes of sharded tensors and the dtypes of tensors stored as uint8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from worldsize.checkpoint.manifest_tree import MOST_DIMENSIONS, Box, check_count
from worldsize.errors import CheckpointError
from worldsize.files import open_regular
from worldsize.strict_json import parse_strict_json

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}
# dtypes of the format that worldsize does not support
_UNREAD = ("U16", "U32", "U64", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_LARGEST_HEADER = 100_000_000  # bytes; the safetensors library has the same limit
_ALIGNMENT = 16  # bytes; the tensor data starts at a multiple of this, so that the widest dtypes can be memory-mapped


@final
@dataclass(frozen=True)
class Entry:
    """Description of a tensor in a file; ``offset`` is the position of its first byte (0 if not yet known)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def encode_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the length prefix and header of a file with ``entries`` in order, without gaps.

    All tensors are aligned if they are sorted by descending element size.

    Raises:
        CheckpointError: the format does not support a dtype, or the header exceeds the format's size limit.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        if entry.dtype not in CODES:
            raise CheckpointError(f"{entry.name}: dtype {entry.dtype} is not supported for export.")
        place = [offset, offset := offset + entry.nbytes]
        described[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _LARGEST_HEADER:
        raise CheckpointError(f"the header of {len(entries)} tensors exceeds the size limit of safetensors.")
    return len(text).to_bytes(8, "little") + text


def read_entries(path: Path) -> dict[str, Entry]:
    """Read the names, dtypes, shapes and offsets of the tensors in an untrusted file.

    Raises:
        CheckpointError: the file is damaged or not a safetensors file.
        OSError: the file cannot be read.
    """
    return read_header(path)[0]


def read_header(path: Path, *, at_most: int = _LARGEST_HEADER) -> tuple[dict[str, Entry], Any]:
    """Read the tensor entries and the metadata of an untrusted file.

    Args:
        path: The file.
        at_most: Maximum header length in bytes.

    Raises:
        CheckpointError: the file is damaged or not a safetensors file.
        OSError: the file cannot be read.
    """
    try:
        return _parse_header(path, at_most)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file ({error}).") from None


def _parse_shape(sizes: Any, name: str) -> tuple[int, ...]:
    """Return ``sizes`` as a shape; raise ValueError if torch cannot represent it."""
    if not isinstance(sizes, list):
        raise ValueError(f"the shape of {name} is not a list")
    if len(sizes) > MOST_DIMENSIONS:
        raise ValueError(f"{name} has {len(sizes)} dimensions, more than the limit of {MOST_DIMENSIONS}")
    shape = tuple(check_count(each, f"a size of {name}") for each in sizes)
    check_count(math.prod(shape), f"the number of elements of {name}")
    return shape


def _parse_header(path: Path, at_most: int) -> tuple[dict[str, Entry], Any]:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= at_most:
            raise ValueError(f"invalid header length: {length} bytes")
        described = parse_strict_json(file.read(length), at_most=at_most, deepest=8)
        size = file.seek(0, 2)
    metadata = described.pop("__metadata__", None)
    entries, end = {}, 8 + length
    for name, facts in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        if facts["dtype"] in _UNREAD:
            raise CheckpointError(
                f"{path}: dtype {facts['dtype']} of {name} is not supported. Save the file with a different dtype, or "
                "without this tensor."
            )
        shape = _parse_shape(facts["shape"], name)
        entry = Entry(name, _DTYPES[facts["dtype"]], shape, end)
        first, after = (check_count(each, f"an offset of {name}") for each in facts["data_offsets"])
        if (first + 8 + length, after - first) != (end, entry.nbytes):
            raise ValueError(f"invalid data_offsets of {name}")
        entries[name], end = entry, end + entry.nbytes
    if end != size:
        raise ValueError(f"the file has {size} bytes, expected {end}")
    return entries, metadata


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, torch.complex128)}
"""The dtypes that a checkpoint can hold, by their names in the manifest."""

_RESERVED = "__metadata__"  # reserved by the safetensors format


def build_box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """Return the box of a shard: (begin, end) in each dimension of the full tensor."""
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def intersect_boxes(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor, or None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def slices_in(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return ``box`` as slices relative to ``origin``, the start of an enclosing box."""
    return tuple(slice(begin - start, end - start) for (begin, end), start in zip(box, origin, strict=True))


def build_entry(name: str, dtype: torch.dtype, shape: Sequence[int], box: Box, *, offset: int = 0) -> Entry:
    """Return the header entry of a tensor or of a shard.

    Args:
        name: Path of the tensor in the state.
        dtype: Dtype of the tensor; one outside the format is stored as uint8.
        shape: Shape of the full tensor.
        box: (begin, end) of the shard in each dimension.
        offset: Offset of the shard's first byte in the file; 0 if not yet known.
    """
    sizes = tuple(end - begin for begin, end in box)
    if is_cut(shape, box) or name.endswith("]") or name == _RESERVED:  # otherwise two entries could have the same name
        name += f"[{','.join(f'{begin}:{end}' for begin, end in box)}]"
    if dtype not in CODES:
        return Entry(name, torch.uint8, (*sizes, dtype.itemsize), offset)
    return Entry(name, dtype, sizes, offset)


def is_cut(shape: Sequence[int], box: Box) -> bool:
    """Return whether ``box`` covers only a part of the full tensor."""
    return any(side != (0, size) for side, size in zip(box, shape, strict=True))


@final
@dataclass(frozen=True)
class Contents:
    """Header contents of one rank's file.

    Attributes:
        entries: Header entries by name.
        shapes: Full shapes of sharded tensors, keyed by path.
        dtypes: Dtypes of the tensors stored as bytes, keyed by path.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    shapes: dict[str, Sequence[int]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int], box: Box, *, offset: int = 0) -> None:
        """Add a tensor or shard; the arguments are those of :func:`build_entry`."""
        entry = build_entry(name, dtype, shape, box, offset=offset)
        self.entries[entry.name] = entry
        if is_cut(shape, box):
            self.shapes[name] = list(shape)
        if dtype not in CODES:
            self.dtypes[name] = dtype

    def metadata(self, **facts: int) -> dict[str, str]:
        """Return metadata for readers without the manifest; the format only allows strings.

        Args:
            facts: Integers to include, such as the step and the rank.
        """
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        told = {"shapes": self.shapes, "dtypes": names}
        return {
            "format": "pt",  # required by transformers
            **{key: str(value) for key, value in facts.items()},
            **{key: json.dumps(value, sort_keys=True) for key, value in told.items() if value},
        }


def collect_contents(tensors: Mapping[str, Any], files: Collection[str]) -> dict[str, Contents]:
    """Return the expected contents of ``files``, from the ``tensors`` of a manifest."""
    contents = {file: Contents() for file in files}
    for name, tensor in tensors.items():
        for chunk in tensor["chunks"]:
            if chunk["file"] in contents:
                box = build_box(chunk["offsets"], chunk["sizes"])
                dtype = DTYPES[tensor["dtype"]]
                contents[chunk["file"]].add(name, dtype, tensor["shape"], box, offset=chunk["offset"])
    return contents
