"""Read weights from a worldsize checkpoint, safetensors files, or a torch state_dict.

For a checkpoint of a schedule-free optimizer, the evaluation weights are computed (arXiv 2405.15682).
"""

from __future__ import annotations

import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy
import torch
from torch import Tensor

from worldsize.checkpoint.format import MANIFEST, Checkpoint, complete, read_checkpoint, verify_checkpoint
from worldsize.checkpoint.manifest_tree import is_shard
from worldsize.checkpoint.safetensors import DTYPES, Entry, build_box, intersect_boxes, read_entries, slices_in
from worldsize.errors import CheckpointError, WorldsizeError, neighbours
from worldsize.files import is_file, is_folder, open_regular, read_regular
from worldsize.strict_json import parse_strict_json

INDEX = "model.safetensors.index.json"
_LARGEST_INDEX = 1 << 28  # maximum bytes


class Weights(ABC):
    """Base class of weight sources: named tensors that are read one at a time and not cached."""

    @property
    @abstractmethod
    def entries(self) -> Mapping[str, Entry]:
        """Names, dtypes and shapes of the tensors, in the source's order."""

    @abstractmethod
    def list_files(self) -> Mapping[str, Path]:
        """Return the files that determine the weights, keyed by name."""

    def verify(self) -> None:  # noqa: B027 - most sources have no digests
        """Raise CheckpointError if a file does not match its digest; a no-op for sources without digests."""

    @abstractmethod
    def read_tensor(self, name: str) -> Tensor:
        """Return one full tensor, memory-mapped if the source allows it."""

    def read_slice(self, name: str, place: tuple[slice, ...]) -> Tensor:
        """Return a slice of one tensor; ``place`` has one slice per dimension."""
        return self.read_tensor(name)[place]


@final
class CheckpointWeights(Weights):
    """Model weights in a checkpoint; for a schedule-free optimizer, its evaluation weights.

    Args:
        checkpoint: The checkpoint.
        averaged: Whether to return the averaged weights (part ``ema``) where they exist.
    """

    def __init__(self, checkpoint: Checkpoint, *, averaged: bool = False) -> None:
        self._checkpoint = checkpoint
        self._facts = _select_part(checkpoint, "model/")
        if averaged:
            self._facts |= _select_part(checkpoint, "ema/weights/")
        self._entries = {
            name: Entry(name, DTYPES[facts["dtype"]], tuple(facts["shape"])) for name, facts in self._facts.items()
        }
        self._steps = _select_part(checkpoint, "optimizer/state/")
        self._shares = compute_lerp_factors(checkpoint.values.get("optimizer"))

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def list_files(self) -> Mapping[str, Path]:
        return {MANIFEST: self._checkpoint.path / MANIFEST}  # contains the digests of all shards

    def verify(self) -> None:
        verify_checkpoint(self._checkpoint)

    def read_tensor(self, name: str) -> Tensor:
        """Return one full tensor of the model, assembled from the saved shards."""
        return self.read_slice(name, tuple(slice(0, size) for size in self._entries[name].shape))

    def read_slice(self, name: str, place: tuple[slice, ...]) -> Tensor:
        """Return a slice of one tensor (one slice per dimension) without reading the rest."""
        weight = self._assemble_slice(self._facts[name], place)
        stepped = self._steps.get(f"{name}/z")
        if stepped is None or name not in self._shares:
            return weight
        return weight.lerp(self._assemble_slice(stepped, place), self._shares[name])  # like the optimizer's eval()

    def _assemble_slice(self, facts: Mapping[str, Any], place: tuple[slice, ...]) -> Tensor:
        dtype = DTYPES[facts["dtype"]]
        wanted = tuple((side.start, side.stop) for side in place)
        overlaps = [
            (chunk, intersect_boxes(build_box(chunk["offsets"], chunk["sizes"]), wanted)) for chunk in facts["chunks"]
        ]
        parts = [(chunk, box) for chunk, box in overlaps if box is not None]
        if len(parts) == 1:  # all in one chunk: no copy needed
            (chunk, box), *_ = parts
            return self._map_file_chunk(chunk, dtype)[slices_in(box, chunk["offsets"])]
        begins = [side.start for side in place]
        tensor = torch.empty([side.stop - side.start for side in place], dtype=dtype)
        for chunk, box in parts:
            tensor[slices_in(box, begins)] = self._map_file_chunk(chunk, dtype)[slices_in(box, chunk["offsets"])]
        return tensor

    def _map_file_chunk(self, chunk: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        return _map_tensor(self._checkpoint.path / chunk["file"], chunk["offset"], dtype, chunk["sizes"])


def model_weights(checkpoint: Checkpoint, *, averaged: bool = False) -> CheckpointWeights:
    """Return a checkpoint's model weights; with ``averaged``, the averages (``ema.decay``).

    Raises:
        WorldsizeError: The checkpoint lacks averaged weights, or holds only the used rows of an embedding table.
    """
    if averaged and not any(name.startswith("ema/weights/") for name in checkpoint.tensors):
        raise WorldsizeError(
            "the checkpoint has no averaged weights, because the run was trained without ema.decay. Use the trained "
            "weights instead."
        )
    tables = {name.split("/")[1] for name in checkpoint.tensors if name.startswith("tables/")}
    weights = CheckpointWeights(checkpoint, averaged=averaged)
    if rows_only := sorted(tables - weights.entries.keys()):
        raise WorldsizeError(
            f"the table {rows_only[0]} is larger than 1 GiB, so only its touched rows were saved. "
            "Read them from the checkpoint: read_tensors(checkpoint, 'tables')."
        )
    return weights


def _select_part(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    parts = {name: facts for name, facts in checkpoint.tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): facts for name, facts in parts.items()}


def _map_tensor(path: Path, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Memory-map a tensor copy-on-write: bytes are read on access and never written back."""
    length = math.prod(shape) * dtype.itemsize
    if length == 0:
        return torch.empty(shape, dtype=dtype)
    with open_regular(path) as file:
        flat = torch.from_numpy(numpy.memmap(file, dtype=numpy.uint8, mode="c", offset=offset, shape=(length,)))
    aligned = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()
    return aligned.view(dtype).reshape(tuple(shape))


@final
class SafetensorsWeights(Weights):
    """Weights in one or more safetensors files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._places: dict[str, tuple[Path, Entry]] = {}
        for file in files:
            for name, entry in read_entries(file).items():
                if name in self._places:
                    raise CheckpointError(
                        f"{name} is in both {self._places[name][0]} and {file}. Remove one of the files."
                    )
                self._places[name] = file, entry

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {name: entry for name, (_, entry) in self._places.items()}

    def list_files(self) -> Mapping[str, Path]:
        return {file.name: file for file in self._files}

    def read_tensor(self, name: str) -> Tensor:
        file, entry = self._places[name]
        return _map_tensor(file, entry.offset, entry.dtype, entry.shape)


@final
class TorchWeights(Weights):
    """A state_dict from torch.save, at the top level or under ``state_dict``; unpickles only tensors."""

    def __init__(self, file: Path) -> None:
        self._file = file
        is_zip = zipfile.is_zipfile(file)  # the format since torch 1.6, which can be memory-mapped
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        except OSError:
            raise
        except Exception as error:  # torch raises all kinds of errors for damaged files
            raise CheckpointError(
                f"torch.load with weights_only=True failed: {file} is damaged or contains more than tensors. "
                "Restore the file, or save it with torch.save(model.state_dict(), FILE)."
            ) from error
        if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
            state = state["state_dict"]  # checkpoints of Lightning and others contain more than weights
        if not isinstance(state, Mapping) or not all(isinstance(each, Tensor) for each in state.values()):
            raise CheckpointError(
                f"{file} does not contain a state_dict of tensors. Save it with torch.save(model.state_dict(), FILE)."
            )
        self._state: dict[str, Tensor] = {str(name): tensor.detach() for name, tensor in state.items()}

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {name: Entry(name, each.dtype, tuple(each.shape)) for name, each in self._state.items()}

    def list_files(self) -> Mapping[str, Path]:
        return {self._file.name: self._file}

    def read_tensor(self, name: str) -> Tensor:
        return self._state[name]


def resolve_source(path: Path) -> Path:
    """Return the absolute path of a source of weights; for a run, the path of its newest checkpoint.

    Raises:
        WorldsizeError: ``path`` does not contain weights.
    """
    if is_folder(path / "checkpoints"):
        saved = complete(path / "checkpoints")
        if not saved:
            raise WorldsizeError(f"the run {path} does not have a complete checkpoint. Set checkpoint.every=N.")
        return saved[-1].absolute()
    if not is_file(path) and not is_folder(path):
        missing = _first_missing(path)
        near = neighbours(missing.name, [each.name for each in _list_folder(missing.parent)])
        raise WorldsizeError(
            f"{missing} not found{near} Pass a run, a folder with safetensors files, or a file with a state_dict."
        )
    return path.absolute()


def _first_missing(path: Path) -> Path:
    """Return the topmost missing folder on ``path``, or ``path`` itself."""
    return next((each for each in reversed([path, *path.parents]) if not each.exists()), path)


def _list_folder(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def open_weights(path: Path) -> Weights:
    """Open the weights in a checkpoint, in a folder of safetensors files, or in a file.

    Raises:
        WorldsizeError: the weights are missing or damaged.
    """
    try:
        if is_file(path):
            return SafetensorsWeights(_no_shards([path])) if path.suffix == ".safetensors" else TorchWeights(path)
        if is_file(path / MANIFEST):
            return CheckpointWeights(read_checkpoint(path))
        return SafetensorsWeights(_no_shards(_safetensors_in(path)))
    except OSError as error:
        raise CheckpointError(f"failed to read {error.filename or path}: {error.strerror or error}.") from None


def _no_shards(files: list[Path]) -> list[Path]:
    """Return ``files`` unchanged; raise CheckpointError if one is a rank's shard of a checkpoint."""
    for file in files:
        if is_shard(file.name):
            raise CheckpointError(
                f"{file} is a shard of a checkpoint. Pass the run, or the checkpoint folder that contains {MANIFEST}."
            )
    return files


def _safetensors_in(folder: Path) -> list[Path]:
    """List the safetensors files in the folder's index, or all of them if it lacks an index."""
    if is_file(folder / INDEX):
        return [folder / name for name in _names_in(folder / INDEX)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} does not contain a run, a checkpoint or a *.safetensors file.")
    return files


def _names_in(index: Path) -> list[str]:
    """Read the names of safetensors files from an index, and check them."""
    text = read_regular(index, at_most=_LARGEST_INDEX)
    try:
        described = parse_strict_json(text, at_most=_LARGEST_INDEX, deepest=8)
    except ValueError as error:
        raise CheckpointError(f"{index} is not valid JSON ({error}). Restore the file.") from None
    places = described.get("weight_map") if isinstance(described, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} does not contain a weight_map from tensor names to files. Restore the file.")
    names = sorted(set(places.values()))
    if any(Path(name).name != name or name in ("", "..") for name in names):
        raise CheckpointError(f"{index} refers to files outside of its folder.")
    return names


def compute_lerp_factors(optimizer: Any) -> dict[str, float]:
    """Return the ``lerp`` weights that yield a schedule-free optimizer's evaluation weights, by parameter name.

    They interpolate from the trained weights to the state ``z``. Parameters of other optimizers are omitted.

    Args:
        optimizer: The part ``optimizer`` of a checkpoint's values (:mod:`worldsize.checkpoint.manifest_tree`).
    """
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return (
        dict(pair for group in groups if isinstance(group, Mapping) for pair in _list_group_factors(group))
        if groups
        else {}
    )


def _list_group_factors(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    match group:
        case {"train_mode": True, "params": list(names), "betas": {"$tuple": [float(beta), _]} | [float(beta), _]}:
            pass
        case {"train_mode": True, "params": list(names), "momentum": float(beta)}:
            pass
        case _:
            return
    if 0 < beta < 1:
        yield from ((str(name), 1 - 1 / beta) for name in names)
