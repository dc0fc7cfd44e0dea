"""The safetensors file format: 8 bytes with the header's length, the header in JSON, and the tensors' bytes.

Source: the format's description in the README of Hugging Face's safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from worldsize.checkpoint.validation import MOST_DIMENSIONS, check_count
from worldsize.errors import CheckpointError
from worldsize.files import open_regular
from worldsize.strict_json import parse

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
# dtypes of the format that worldsize does not read
_UNREAD = ("U16", "U32", "U64", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the library's own reader
_ALIGNMENT = 16  # bytes; tensors begin at a multiple of it, so that the widest numbers can be memory-mapped


@final
@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        name: Name of the tensor.
        dtype: Type of its numbers.
        shape: Its shape.
        offset: Offset of its first byte in the file; 0 until it is known.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file whose tensors follow in the order of ``entries``, without gaps.

    If tensors with the widest dtypes come first, all tensors are aligned.

    Raises:
        CheckpointError: the format lacks a dtype, or the header is too long for its readers.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        if entry.dtype not in CODES:
            raise CheckpointError(f"{entry.name} is of dtype {entry.dtype}, which worldsize does not export.")
        place = [offset, offset := offset + entry.nbytes]
        described[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _LARGEST_HEADER:
        raise CheckpointError(f"the names of {len(entries)} tensors are too long for one safetensors file.")
    return len(text).to_bytes(8, "little") + text


def read_entries(path: Path) -> dict[str, Entry]:
    """Read the names, dtypes, shapes and offsets of a file's tensors; the file is not trusted.

    Raises:
        CheckpointError: the file is not a safetensors file, or damaged.
        OSError: the file cannot be read.
    """
    return read_header(path)[0]


def read_header(path: Path, *, at_most: int = _LARGEST_HEADER) -> tuple[dict[str, Entry], Any]:
    """Read the entries as :func:`read_entries` does, and the file's metadata.

    Args:
        path: The file.
        at_most: Largest header that is read, in bytes.

    Raises:
        CheckpointError: the file is not a safetensors file, or damaged.
        OSError: the file cannot be read.
    """
    try:
        return _header(path, at_most)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or damaged ({error}).") from None


def _shape(sizes: Any, name: str) -> tuple[int, ...]:
    """Check that ``sizes`` is a shape that torch can represent, and return it."""
    if not isinstance(sizes, list):
        raise ValueError(f"the shape of {name} is no list")
    if len(sizes) > MOST_DIMENSIONS:
        raise ValueError(f"{name} has {len(sizes)} dimensions, which is more than {MOST_DIMENSIONS}")
    shape = tuple(check_count(each, f"a size of {name}") for each in sizes)
    check_count(math.prod(shape), f"the number of elements of {name}")
    return shape


def _header(path: Path, at_most: int) -> tuple[dict[str, Entry], Any]:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= at_most:
            raise ValueError(f"its header is said to have {length} bytes")
        described = parse(file.read(length), at_most=at_most, deepest=8)
        size = file.seek(0, 2)
    metadata = described.pop("__metadata__", None)
    entries, end = {}, 8 + length
    for name, facts in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        if facts["dtype"] in _UNREAD:
            raise CheckpointError(
                f"{path}: {name} is of dtype {facts['dtype']}, which worldsize does not read. Write the file with "
                "another dtype, or without that tensor."
            )
        shape = _shape(facts["shape"], name)
        entry = Entry(name, _DTYPES[facts["dtype"]], shape, end)
        first, after = (check_count(each, f"an offset of {name}") for each in facts["data_offsets"])
        if (first + 8 + length, after - first) != (end, entry.nbytes):
            raise ValueError(f"the bytes of {name} are not where they should be")
        entries[name], end = entry, end + entry.nbytes
    if end != size:
        raise ValueError(f"it has {size} bytes, and its tensors need {end}")
    return entries, metadata
