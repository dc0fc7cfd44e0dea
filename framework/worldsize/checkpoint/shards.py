"""Contents of the safetensors file that each rank writes, which any reader of the format can open.

A full tensor is named by its path in the state, such as ``model/0.weight``. The name of a part of a tensor ends with
its slice: ``model/0.weight[2:4,0:5]``. A dtype that the format lacks is stored as bytes, in one more dimension. The
file's metadata holds the full shapes of tensors stored in parts, and the dtypes that the format lacks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from worldsize.checkpoint.safetensors import CODES, Entry
from worldsize.checkpoint.validation import Box

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, torch.complex128)}
"""The dtypes that a checkpoint can hold, by their names in the manifest."""

_RESERVED = "__metadata__"  # a name that safetensors files reserve


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """Return the (begin, end) of a part in each dimension of its tensor."""
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the part that two parts of a tensor have in common; None: they have none."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def slices_in(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of a part of a tensor within a part that begins at ``origin``."""
    return tuple(slice(begin - start, end - start) for (begin, end), start in zip(box, origin, strict=True))


def entry_of(name: str, dtype: torch.dtype, shape: Sequence[int], box: Box, *, offset: int = 0) -> Entry:
    """Return the header entry of a part of a tensor.

    Args:
        name: Path of the tensor in the state.
        dtype: Its dtype.
        shape: Shape of the full tensor.
        box: The part, as (begin, end) in each dimension.
        offset: Offset of the part's first byte in the file; 0 until it is known.
    """
    sizes = tuple(end - begin for begin, end in box)
    if is_cut(shape, box) or name.endswith("]") or name == _RESERVED:  # no two parts of any tensors share a name
        name += f"[{','.join(f'{begin}:{end}' for begin, end in box)}]"
    if dtype not in CODES:
        return Entry(name, torch.uint8, (*sizes, dtype.itemsize), offset)
    return Entry(name, dtype, sizes, offset)


def is_cut(shape: Sequence[int], box: Box) -> bool:
    """Return whether a part is smaller than the full tensor."""
    return any(side != (0, size) for side, size in zip(box, shape, strict=True))


@final
@dataclass(frozen=True)
class Contents:
    """Collects the header of a shard.

    Attributes:
        entries: Entries of the header, by name.
        shapes: Full shapes of the tensors of which the file has parts, by path.
        dtypes: Dtypes of the tensors that are stored as bytes, by path.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    shapes: dict[str, Sequence[int]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int], box: Box, *, offset: int = 0) -> None:
        """Add a part of a tensor; the arguments are those of :func:`entry_of`."""
        entry = entry_of(name, dtype, shape, box, offset=offset)
        self.entries[entry.name] = entry
        if is_cut(shape, box):
            self.shapes[name] = list(shape)
        if dtype not in CODES:
            self.dtypes[name] = dtype

    def metadata(self, **facts: int) -> dict[str, str]:
        """Return the metadata for readers without the manifest, as strings, which the format requires.

        Args:
            facts: Numbers such as the step and the rank.
        """
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        told = {"shapes": self.shapes, "dtypes": names}
        return {
            "format": "pt",  # transformers requires it of files with torch tensors
            **{key: str(value) for key, value in facts.items()},
            **{key: json.dumps(value, sort_keys=True) for key, value in told.items() if value},
        }


def contents_of(tensors: Mapping[str, Any], files: Collection[str]) -> dict[str, Contents]:
    """Return the expected contents of each of ``files`` according to the ``tensors`` of a manifest."""
    contents = {file: Contents() for file in files}
    for name, tensor in tensors.items():
        for chunk in tensor["chunks"]:
            if chunk["file"] in contents:
                box = box_of(chunk["offsets"], chunk["sizes"])
                dtype = DTYPES[tensor["dtype"]]
                contents[chunk["file"]].add(name, dtype, tensor["shape"], box, offset=chunk["offset"])
    return contents
