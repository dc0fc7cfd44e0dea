"""Reads weights from files: from a worldsize checkpoint, safetensors files, or a torch state_dict.

From a checkpoint of a schedule-free optimizer, the weights to evaluate are computed (arXiv 2405.15682).
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

from worldsize.checkpoint.format import MANIFEST, Checkpoint, complete, read, verify
from worldsize.checkpoint.manifest_tree import is_shard
from worldsize.checkpoint.safetensors import DTYPES, Entry, box_of, overlap, read_entries, slices_in
from worldsize.errors import CheckpointError, WorldsizeError, neighbours
from worldsize.files import is_file, is_folder, open_regular, read_regular
from worldsize.strict_json import parse

INDEX = "model.safetensors.index.json"
_LARGEST_INDEX = 1 << 28  # bytes


class Weights(ABC):
    """Named tensors that are read one at a time; earlier ones are not kept in memory."""

    @property
    @abstractmethod
    def entries(self) -> Mapping[str, Entry]:
        """Return the names, dtypes and shapes of the tensors, in the order of the source."""

    @abstractmethod
    def files(self) -> Mapping[str, Path]:
        """Return the files that determine the values, by name."""

    def verify(self) -> None:  # noqa: B027 - most sources have no digests
        """Raise CheckpointError if the source has digests that show damage."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Return one tensor in its full shape; if the source allows it, its bytes are read only when they are used."""

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        """Return the part of one tensor that ``place``, one slice for each dimension of its shape, selects."""
        return self.tensor(name)[place]


@final
class CheckpointWeights(Weights):
    """The model in a checkpoint of a run; of a schedule-free optimizer, the weights that are to be evaluated.

    Args:
        checkpoint: The checkpoint.
        averaged: Whether to return averaged weights (part ``ema``) in place of those that were averaged.
    """

    def __init__(self, checkpoint: Checkpoint, *, averaged: bool = False) -> None:
        self._checkpoint = checkpoint
        self._facts = _part(checkpoint, "model/")
        if averaged:
            self._facts |= _part(checkpoint, "ema/weights/")
        self._entries = {
            name: Entry(name, DTYPES[facts["dtype"]], tuple(facts["shape"])) for name, facts in self._facts.items()
        }
        self._steps = _part(checkpoint, "optimizer/state/")
        self._shares = evaluated_shares(checkpoint.values.get("optimizer"))

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def files(self) -> Mapping[str, Path]:
        return {MANIFEST: self._checkpoint.path / MANIFEST}  # it has the digests of the others

    def verify(self) -> None:
        verify(self._checkpoint)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor of the model in its full shape, assembled from the parts that ranks saved."""
        return self.part(name, tuple(slice(0, size) for size in self._entries[name].shape))

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        """Return the part of one tensor that ``place``, a slice per dimension, selects; the rest is not read."""
        weight = self._read(self._facts[name], place)
        stepped = self._steps.get(f"{name}/z")
        if stepped is None or name not in self._shares:
            return weight
        return weight.lerp(self._read(stepped, place), self._shares[name])  # as the optimizer's eval() does

    def _read(self, facts: Mapping[str, Any], place: tuple[slice, ...]) -> Tensor:
        dtype = DTYPES[facts["dtype"]]
        wanted = tuple((side.start, side.stop) for side in place)
        overlaps = [(chunk, overlap(box_of(chunk["offsets"], chunk["sizes"]), wanted)) for chunk in facts["chunks"]]
        parts = [(chunk, box) for chunk, box in overlaps if box is not None]
        if len(parts) == 1:  # one chunk holds the whole part
            (chunk, box), *_ = parts
            return self._chunk(chunk, dtype)[slices_in(box, chunk["offsets"])]
        begins = [side.start for side in place]
        tensor = torch.empty([side.stop - side.start for side in place], dtype=dtype)
        for chunk, box in parts:
            tensor[slices_in(box, begins)] = self._chunk(chunk, dtype)[slices_in(box, chunk["offsets"])]
        return tensor

    def _chunk(self, chunk: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        return _mapped(self._checkpoint.path / chunk["file"], chunk["offset"], dtype, chunk["sizes"])


def _part(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    parts = {name: facts for name, facts in checkpoint.tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): facts for name, facts in parts.items()}


def _mapped(path: Path, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Memory-map a tensor in a file, copy-on-write: its bytes are read when they are used, and never written back."""
    length = math.prod(shape) * dtype.itemsize
    if length == 0:
        return torch.empty(shape, dtype=dtype)
    with open_regular(path) as file:
        flat = torch.from_numpy(numpy.memmap(file, dtype=numpy.uint8, mode="c", offset=offset, shape=(length,)))
    aligned = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()
    return aligned.view(dtype).reshape(tuple(shape))


@final
class SafetensorsWeights(Weights):
    """Tensors in one or several safetensors files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._places: dict[str, tuple[Path, Entry]] = {}
        for file in files:
            for name, entry in read_entries(file).items():
                if name in self._places:
                    raise CheckpointError(f"{name} is in {self._places[name][0]} and in {file}. Keep one of the files.")
                self._places[name] = file, entry

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {name: entry for name, (_, entry) in self._places.items()}

    def files(self) -> Mapping[str, Path]:
        return {file.name: file for file in self._files}

    def tensor(self, name: str) -> Tensor:
        file, entry = self._places[name]
        return _mapped(file, entry.offset, entry.dtype, entry.shape)


@final
class TorchWeights(Weights):
    """A state_dict written by torch.save, or one inside it under the key ``state_dict``; only tensors are unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file
        is_zip = zipfile.is_zipfile(file)  # the format since torch 1.6, which can be mapped into memory
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        except OSError:
            raise
        except Exception as error:  # torch raises all kinds of errors for damaged files
            raise CheckpointError(
                f"{file} is damaged, or holds more than tensors: torch.load with weights_only=True does not read it. "
                "Take it from a copy, or save it with torch.save(model.state_dict(), FILE)."
            ) from error
        if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
            state = state["state_dict"]  # as Lightning and many programs save it, beside other things
        if not isinstance(state, Mapping) or not all(isinstance(each, Tensor) for each in state.values()):
            raise CheckpointError(
                f"{file} is no state_dict: names with a tensor each. Save it with torch.save(model.state_dict(), FILE)."
            )
        self._state: dict[str, Tensor] = {str(name): tensor.detach() for name, tensor in state.items()}

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {name: Entry(name, each.dtype, tuple(each.shape)) for name, each in self._state.items()}

    def files(self) -> Mapping[str, Path]:
        return {self._file.name: self._file}

    def tensor(self, name: str) -> Tensor:
        return self._state[name]


def source_of(path: Path) -> Path:
    """Return the checkpoint, folder or file of weights at ``path``; for a run, its newest checkpoint.

    Raises:
        WorldsizeError: there are no weights at ``path``.
    """
    if is_folder(path / "checkpoints"):
        saved = complete(path / "checkpoints")
        if not saved:
            raise WorldsizeError(f"the run {path} has no complete checkpoint. Let it save one with checkpoint.every=N.")
        return saved[-1].absolute()
    if not is_file(path) and not is_folder(path):
        missing = _first_missing(path)
        near = neighbours(missing.name, [each.name for each in _listed(missing.parent)])
        raise WorldsizeError(
            f"{missing} is not there{near} Name a run, a folder with safetensors files, or a file with a state_dict."
        )
    return path.absolute()


def _first_missing(path: Path) -> Path:
    """Return the shortest beginning of ``path`` that is not there."""
    return next((each for each in reversed([path, *path.parents]) if not each.exists()), path)


def _listed(folder: Path) -> list[Path]:
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
            return CheckpointWeights(read(path))
        return SafetensorsWeights(_no_shards(_safetensors_in(path)))
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from None


def _no_shards(files: list[Path]) -> list[Path]:
    """Return the files; raise CheckpointError if one of them is a rank's part of a checkpoint."""
    for file in files:
        if is_shard(file.name):
            raise CheckpointError(
                f"{file} is what one rank wrote of a checkpoint, and {MANIFEST} says what the parts make up. Name the "
                "run, or the folder of a complete checkpoint."
            )
    return files


def _safetensors_in(folder: Path) -> list[Path]:
    """List the files that an index names, or all safetensors files if there is no index."""
    if is_file(folder / INDEX):
        return [folder / name for name in _names_in(folder / INDEX)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no run, no checkpoint and no *.safetensors file.")
    return files


def _names_in(index: Path) -> list[str]:
    """Return the names of the files that an index names."""
    text = read_regular(index, at_most=_LARGEST_INDEX)
    try:
        described = parse(text, at_most=_LARGEST_INDEX, deepest=8)
    except ValueError as error:
        raise CheckpointError(f"{index} is no JSON ({error}). Take it from a copy.") from None
    places = described.get("weight_map") if isinstance(described, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map, with a file by each tensor's name. Take it from a copy.")
    names = sorted(set(places.values()))
    if any(Path(name).name != name or name in ("", "..") for name in names):
        raise CheckpointError(f"{index} names files outside of its folder.")
    return names


def evaluated_shares(optimizer: Any) -> dict[str, float]:
    """Return, by parameter, how far it lies from its weights to those that the optimizer steps (its state ``z``).

    Args:
        optimizer: The part ``optimizer`` of a checkpoint's values (:mod:`worldsize.checkpoint.manifest_tree`).
    """
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return dict(pair for group in groups if isinstance(group, Mapping) for pair in _of_group(group)) if groups else {}


def _of_group(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    match group:
        case {"train_mode": True, "params": list(names), "betas": {"$tuple": [float(beta), _]} | [float(beta), _]}:
            pass
        case {"train_mode": True, "params": list(names), "momentum": float(beta)}:
            pass
        case _:
            return
    if 0 < beta < 1:
        yield from ((str(name), 1 - 1 / beta) for name in names)
