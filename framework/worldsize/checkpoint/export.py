"""Export weights, one tensor at a time, as safetensors files or as a torch state_dict."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from worldsize.checkpoint.format import sync_folder
from worldsize.checkpoint.safetensors import Entry, encode_header
from worldsize.checkpoint.weights import INDEX, SafetensorsWeights, Weights
from worldsize.errors import WorldsizeError

_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
_PIECE = 8 << 20  # bytes per write
Written = Callable[[int], None]  # progress callback; receives the number of bytes written since the last call


@final
class SelectedWeights(Weights):
    """A subset of another source's tensors, optionally cast to a different dtype.

    Args:
        source: The weights to select from.
        dtype: Target dtype of floating-point tensors; None keeps their dtypes.
        without: Names of tensors to exclude.
    """

    def __init__(self, source: Weights, *, dtype: torch.dtype | None = None, without: Sequence[str] = ()) -> None:
        self._source, self._dtype = source, dtype
        kept = {name: entry for name, entry in source.entries.items() if name not in without}
        self._entries = {name: replace(entry, dtype=self._resolve_dtype(entry)) for name, entry in kept.items()}

    def _resolve_dtype(self, entry: Entry) -> torch.dtype:
        return self._dtype if self._dtype is not None and entry.dtype.is_floating_point else entry.dtype

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def list_files(self) -> Mapping[str, Path]:
        return self._source.list_files()

    def read_tensor(self, name: str) -> Tensor:
        return self._source.read_tensor(name).to(self._entries[name].dtype)


@contextmanager
def publish_output(output: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to ``output`` after the block, or remove it on failure.

    Raises:
        WorldsizeError: ``output`` exists, or cannot be written.
    """
    draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    if output.exists() or output.is_symlink():
        raise WorldsizeError(f"{output} already exists. Remove it, or choose a different output=PATH.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.rename(output)
        sync_folder(output.parent)
    except OSError as error:
        if not _is_of_writing(error, draft):
            raise  # a read error, for example of a tokenizer file
        raise WorldsizeError(
            f"failed to write {output}: {error.strerror or error}. Free disk space, or choose a different output=PATH."
        ) from error
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        elif draft.is_file():  # also False if a parent of the output is a file
            draft.unlink()


def _is_of_writing(error: OSError, draft: Path) -> bool:
    """Return whether ``error`` comes from writing ``draft``; errors of ``write()`` lack a path."""
    if not isinstance(error.filename, str | os.PathLike):
        return error.errno in _STORAGE_ERRORS
    return str(error.filename).startswith(str(draft)) or draft.parent.is_relative_to(error.filename)


def write_safetensors(weights: Weights, folder: Path, *, shard_bytes: int, written: Written) -> None:
    """Write the weights as one safetensors file, or as several files with an index.

    Each file holds at most ``shard_bytes`` of tensors, or one larger tensor. Tied tensors are each written in full.
    """
    shards = _split_into_shards(list(weights.entries.values()), shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(weights, shard, folder / name, written)
    if len(shards) > 1:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for entry in weights.entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split_into_shards(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Group consecutive tensors into files; sort each file by element size for alignment."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return [sorted(shard, key=lambda entry: -entry.dtype.itemsize) for shard in shards]


def _write_file(weights: Weights, entries: Sequence[Entry], path: Path, written: Written) -> None:
    with path.open("xb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for entry in entries:
            data = weights.read_tensor(entry.name).contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _PIECE):
                file.write(data[start : start + _PIECE])
                written(len(data[start : start + _PIECE]))
        file.flush()
        os.fsync(file.fileno())


def write_torch(weights: Weights, path: Path, written: Written) -> None:
    """Write a state_dict that ``torch.load(path, weights_only=True)`` reads.

    torch.save needs all tensors at once, so they are first streamed into a temporary file, which is then memory-mapped.
    """
    scratch = path.with_name(f"{path.name}.tensors")
    try:
        _write_file(
            weights, sorted(weights.entries.values(), key=lambda entry: -entry.dtype.itemsize), scratch, written
        )
        state = SafetensorsWeights([scratch])
        torch.save({name: state.read_tensor(name) for name in weights.entries}, path)
    finally:
        scratch.unlink(missing_ok=True)
