"""Storage backend for torch.distributed.checkpoint (DCP); DCP deduplicates and reshards the tensors."""

from __future__ import annotations

import hashlib
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from worldsize.checkpoint.format import ALONE, SCHEMA_VERSION, Checkpoint, seal_checkpoint
from worldsize.checkpoint.holders import DIFFERENT
from worldsize.checkpoint.manifest_tree import Box
from worldsize.checkpoint.safetensors import DTYPES, Contents, build_box, encode_header
from worldsize.errors import CheckpointError

# DCP warns about runs with one process, which are intended here
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

_PIECE = 8 << 20  # bytes per write and hash update
Point = Callable[[str], None]


@dataclass(frozen=True)
class ChunkPlace:
    """Location of a chunk's bytes, and the size and digest of the file that contains it."""

    file: str
    offset: int
    length: int
    size: int
    sha256: str


@final
@dataclass(frozen=True)
class _TensorPart:
    """A full tensor or shard that this rank writes."""

    index: MetadataIndex
    tensor: Tensor
    shape: torch.Size
    """Shape of the full tensor."""
    box: Box

    @property
    def name(self) -> str:
        """Path of the tensor in the state."""
        return self.index.fqn


@final
class Writer(StorageWriter):
    """Storage writer: one safetensors file per rank; rank 0 then seals the checkpoint.

    Args:
        folder: The draft folder.
        rank: This rank.
        head: The manifest without the keys ``files`` and ``tensors``.
        tensors_digest: Digest of all tensors' names, dtypes and shapes, which must be equal on all ranks.
        finite: Whether to refuse a model with NaN or infinity.
        at: Called at named points, for fault injection in tests.
    """

    def __init__(
        self, folder: Path, rank: int, *, head: Mapping[str, Any], tensors_digest: str, finite: bool, at: Point
    ) -> None:
        self._folder = folder
        self._tensors_digest = tensors_digest
        self._name = f"rank_{rank:05d}.safetensors"
        self._rank = rank
        self._head = head
        self._finite = finite
        self._at = at

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=self._tensors_digest)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(DIFFERENT)
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write_shard(plan, planner) if plan.items else [])
        return future

    def _write_shard(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        parts = [_resolve_item(item, planner) for item in plan.items]
        if self._finite:
            _check_finite(parts)
        parts.sort(key=lambda part: -part.tensor.dtype.itemsize)  # so that all tensors are aligned
        pieces = [memoryview(self._encode_header(parts)), *(_view_bytes(part.tensor) for part in parts)]
        ends = list(accumulate(len(piece) for piece in pieces))
        facts = (ends[-1], self._stream_to_file(pieces, ends[-1]))
        self._at("checkpoint:after-shard")
        return [
            WriteResult(part.index, len(piece), ChunkPlace(self._name, start, len(piece), *facts))
            for part, piece, start in zip(parts, pieces[1:], ends[:-1], strict=True)
        ]

    def _encode_header(self, parts: Sequence[_TensorPart]) -> bytes:
        """Return the safetensors header for ``parts``, which are written in this order."""
        contents = Contents()
        for part in parts:
            contents.add(part.name, part.tensor.dtype, part.shape, part.box)
        facts = {key: self._head[key] for key in ("step", "world_size")}
        told = contents.metadata(schema_version=SCHEMA_VERSION, rank=self._rank, **facts)
        return encode_header(list(contents.entries.values()), told)

    def _stream_to_file(self, contents: Sequence[memoryview], total: int) -> str:
        """Write ``contents`` to this rank's file, sync it to disk, and return its SHA-256."""
        digest, written = hashlib.sha256(), 0
        with (self._folder / self._name).open("xb", buffering=0) as file:
            for piece in _split_pieces(contents):
                _write_all(file, piece)
                digest.update(piece)
                if 2 * written < total <= 2 * (written + len(piece)):
                    self._at("checkpoint:in-shard")
                written += len(piece)
            os.fsync(file.fileno())
        return digest.hexdigest()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and ``COMPLETE`` on rank 0, after all ranks have written their files."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        files = {place.file: {"size": place.size, "sha256": place.sha256} for place in places.values()}
        tensors = {name: _describe_tensor(name, facts, places) for name, facts in metadata.state_dict_metadata.items()}
        values = {**self._head["values"], **_build_alone_values(tensors)}
        seal_checkpoint(self._folder, {**self._head, "values": values, "files": files, "tensors": tensors}, self._at)


def _resolve_item(item: WriteItem, planner: SavePlanner) -> _TensorPart:
    """Return the tensor or shard for ``item``; raise CheckpointError if it is not supported."""
    name, tensor, facts = item.index.fqn, planner.resolve_data(item), item.tensor_data
    if facts is None or not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name} is not a tensor; shards can only contain tensors.")
    if tensor.dtype not in DTYPES.values():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name}: dtype {dtype} is not supported in checkpoints.")
    return _TensorPart(item.index, tensor, facts.size, build_box(facts.chunk.offsets, facts.chunk.sizes))


def _check_finite(parts: Sequence[_TensorPart]) -> None:
    for part in parts:
        name, tensor = part.name, part.tensor
        if name.startswith("model/") and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{name} contains NaN or infinity. Decrease lr, set clip_norm, or set nonfinite=ignore"
            )


def _describe_tensor(name: str, facts: Any, places: Mapping[MetadataIndex, ChunkPlace]) -> dict[str, Any]:
    dtype = str(facts.properties.dtype).removeprefix("torch.")
    chunks = [_describe_chunk(chunk, places[MetadataIndex(name, chunk.offsets)]) for chunk in facts.chunks]
    return {"dtype": dtype, "shape": list(facts.size), "chunks": chunks}


def _build_alone_values(names: Iterable[str]) -> dict[str, Any]:
    """Return the manifest values of the parts in ``ALONE``, from the names of their tensors."""
    parts: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        part, _, own = name.partition("/")
        if part in ALONE:
            parts.setdefault(part, {})[own] = {"$tensor": name}
    return parts


def _describe_chunk(chunk: ChunkStorageMetadata, place: ChunkPlace) -> dict[str, Any]:
    where = {"file": place.file, "offset": place.offset, "length": place.length}
    return {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where}


def _view_bytes(tensor: Any) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _split_pieces(contents: Sequence[memoryview]) -> Iterator[memoryview]:
    for content in contents:
        for start in range(0, len(content), _PIECE):
            yield content[start : start + _PIECE]


def _write_all(file: Any, piece: memoryview) -> None:
    while len(piece):
        piece = piece[file.write(piece) :]


class PlannedReader(StorageReader):
    """Base class of storage readers without communication between ranks."""

    @abstractmethod
    def read_values(self, item: ReadItem) -> Tensor:
        """Return the requested values, with shape ``item.lengths``."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.read_values(item))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def get_item_slices(item: ReadItem) -> tuple[slice, ...]:
    """Return the requested slices, relative to the stored chunk."""
    return tuple(slice(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True))


@final
class Reader(PlannedReader):
    """Storage reader that memory-maps the files of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Tensor] = {}
        self._places: Mapping[MetadataIndex, Mapping[str, Any]] = {}  # chunk locations; set by torch before reading

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = self._checkpoint.tensors.items()
        places = {MetadataIndex(n, torch.Size(c["offsets"])): c for n, facts in tensors for c in _list_chunks(facts)}
        return Metadata({name: _build_tensor_metadata(facts) for name, facts in tensors}, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def read_values(self, item: ReadItem) -> Tensor:
        place = self._places[item.storage_index]
        dtype = DTYPES[self._checkpoint.tensors[item.storage_index.fqn]["dtype"]]
        return self._map_chunk(place).view(dtype).reshape(place["sizes"])[get_item_slices(item)]

    def _map_chunk(self, place: Mapping[str, Any]) -> Tensor:
        if place["length"] == 0:
            return torch.empty(0, dtype=torch.uint8)
        if place["file"] not in self._files:
            path = self._checkpoint.path / place["file"]
            self._files[place["file"]] = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        return self._files[place["file"]][place["offset"] : place["offset"] + place["length"]]


def _list_chunks(facts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the non-empty chunks, if any; empty ones may share offsets with other chunks."""
    return [chunk for chunk in facts["chunks"] if chunk["length"]] or facts["chunks"]


def _build_tensor_metadata(facts: Mapping[str, Any]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in _list_chunks(facts)]
    return TensorStorageMetadata(TensorProperties(DTYPES[facts["dtype"]]), torch.Size(facts["shape"]), chunks)
