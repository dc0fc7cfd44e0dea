"""Checkpoint folder layout, verification, and retention of older checkpoints.

``step_0001000/`` holds one safetensors file per rank (see checkpoint/safetensors.py), ``manifest.json`` (the size and
SHA-256 of every file, the location of every tensor, and all non-tensor values) and ``COMPLETE`` (the manifest's
SHA-256), written last. A single rename then gives the folder its final name. The manifest is authoritative: a file
with a different description of a tensor in its header counts as damaged. The deletion of old checkpoints can be
interrupted at any point.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from worldsize.checkpoint.manifest_tree import check_count, check_manifest, is_shard
from worldsize.checkpoint.safetensors import CODES, DTYPES, Entry, collect_contents, encode_header, read_header
from worldsize.core import metric_key, parse_metric_key
from worldsize.core.limits import Range, check_limits
from worldsize.errors import CheckpointError, OtherSchemaError
from worldsize.files import open_regular, read_regular
from worldsize.strict_json import parse_strict_json

SCHEMA_VERSION = 2
STREAMS = "streams"  # reader positions in the training stream, one tensor per reader (data/streams.py)
RECIPE_STATES = "recipe_states"  # recipe state, one tensor per logical rank (worker/step_memory.py)
ALONE = (STREAMS, RECIPE_STATES)  # parts of the state whose tensors exist only on the rank that writes them
PARTS = ("model", "optimizer", "schedule", "scaler", "ema", *ALONE)  # parts of the state that a load can ignore
HYPERPARAMETERS = "hyperparameters"  # learning rates, weight decay etc. of the optimizer and the schedule
MANIFEST, COMPLETE = "manifest.json", "COMPLETE"
_FOLDER = re.compile(r"step_(\d{7,})")
_LARGEST = 1 << 30  # maximum size of a manifest in bytes
_SLACK = 8  # parse a wrong header, for the error message, only up to this multiple of the expected length
_DEEPEST = 400  # maximum nesting of a manifest; one level of the state takes up to four (checkpoint/manifest_tree.py)
_PIECE = 8 << 20  # bytes hashed per read


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and the content of its manifest."""

    path: Path
    step: int
    world_size: int
    facts: Mapping[str, Any]  # plain values of the caller, such as metrics
    files: Mapping[str, Any]  # size and SHA-256 of each file
    tensors: Mapping[str, Any]  # dtype, shape and chunks of each tensor, by its path in the state
    values: Any  # the state with references to its tensors, see manifest_tree.split_tensors


def folder_name(step: int) -> str:
    """Return the folder name for a checkpoint after ``step``, zero-padded to sort by step."""
    return f"step_{step:07d}"


def complete(root: Path) -> list[Path]:
    """Return the published checkpoint folders in ``root``, oldest first."""
    folders = {int(match[1]): path for path in root.glob("step_*") if (match := _FOLDER.fullmatch(path.name))}
    return [folders[step] for step in sorted(folders)]


def parse_step(path: Path) -> int:
    """Parse the step from the name of a checkpoint folder."""
    return int(path.name.partition("_")[2])


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest of the checkpoint in ``path``, but not its shards.

    Raises:
        CheckpointError: the checkpoint is incomplete, or was changed after it was written.
        OtherSchemaError: this version of worldsize cannot read the manifest's schema version.
    """
    text, _ = _read_sealed_manifest(path)
    try:
        return _parse_manifest(path, parse_strict_json(text, at_most=_LARGEST, deepest=_DEEPEST, finite=False))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        kind = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the checkpoint is damaged: {path / MANIFEST} is not a valid manifest ({kind})."
        ) from None


def read_digest(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, after comparing it with ``COMPLETE``.

    Raises:
        CheckpointError: the checkpoint is incomplete, or was changed after it was written.
    """
    return _read_sealed_manifest(path)[1]


def _read_sealed_manifest(path: Path) -> tuple[bytes, str]:
    """Return a manifest's text and SHA-256; raise CheckpointError if ``COMPLETE`` differs."""
    text, seal = _read_bytes(path / MANIFEST), _read_bytes(path / COMPLETE).decode(errors="replace")
    expected, actual = seal.strip(), hashlib.sha256(text).hexdigest()
    if expected != actual or seal != f"{actual}\n":
        raise CheckpointError(
            _format_difference(path / MANIFEST, f"SHA-256 {expected} in {COMPLETE}", f"SHA-256 {actual}")
        )
    return text, actual


def _parse_manifest(path: Path, manifest: Any) -> Checkpoint:
    if (version := check_count(manifest["schema_version"], "schema_version")) != SCHEMA_VERSION:
        remedy = "Upgrade worldsize." if version > SCHEMA_VERSION else "Use the worldsize version that wrote it."
        raise OtherSchemaError(
            f"{path} has schema version {version}; this worldsize reads version {SCHEMA_VERSION}. {remedy}"
        )
    check_manifest(manifest, {name: dtype.itemsize for name, dtype in DTYPES.items()})
    if folder_name(manifest["step"]) != path.name:
        raise ValueError(f"step is {manifest['step']}, but the folder is {path.name}")
    facts = {key: manifest[key] for key in ("step", "world_size", "facts", "files", "tensors", "values")}
    return Checkpoint(path, **facts)


def verify_checkpoint(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Verify a folder's file list, and the digests and headers of ``names`` (None: all files).

    Raises:
        CheckpointError: a file is missing, unknown, a link, or its content or header differs from the manifest; the
            message contains the file, the expected value and the actual value.
    """
    path, files = checkpoint.path, checkpoint.files
    present = {file.name for file in path.iterdir()} - {MANIFEST, COMPLETE}
    for name in sorted(present ^ files.keys()):
        fault = "is missing" if name in files else f"is not listed in {MANIFEST}"
        raise CheckpointError(f"the checkpoint is damaged: {path / name} {fault}.")
    facts = {"schema_version": SCHEMA_VERSION, "step": checkpoint.step, "world_size": checkpoint.world_size}
    for name, contents in sorted(collect_contents(checkpoint.tensors, list(files if names is None else names)).items()):
        _verify_file(path / name, files[name])
        told = contents.metadata(rank=int(name.removeprefix("rank_").partition(".")[0]), **facts)
        _verify_header(path / name, contents.entries, told)


def _verify_file(path: Path, expected: Mapping[str, Any]) -> None:
    if not is_shard(path.name) or path.is_symlink() or not path.is_file():
        raise CheckpointError(f"the checkpoint is damaged: {path} is not a regular shard file.")
    if (size := path.stat().st_size) != expected["size"]:
        raise CheckpointError(_format_difference(path, f"{expected['size']} bytes", f"{size} bytes"))
    if (actual := hash_file(path)) != expected["sha256"]:
        raise CheckpointError(_format_difference(path, f"SHA-256 {expected['sha256']}", f"SHA-256 {actual}"))


def _verify_header(path: Path, expected: Mapping[str, Entry], told: Mapping[str, str]) -> None:
    try:
        # only its length is used; tensors may be in a different order
        right = encode_header(list(expected.values()), told)
        actual, metadata = read_header(path, at_most=_SLACK * len(right))
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from None
    for name in sorted(expected.keys() | actual.keys()):
        if (wanted := expected.get(name)) != (present := actual.get(name)):
            known = f"{_describe_entry(name, wanted)} according to {MANIFEST}"
            raise CheckpointError(_format_difference(path, known, f"{_describe_entry(name, present)} in its header"))
    if metadata != told:
        raise CheckpointError(
            _format_difference(path, f"the metadata implied by {MANIFEST}", "other metadata in its header")
        )


def _describe_entry(name: str, entry: Entry | None) -> str:
    if entry is None:
        return f"no tensor {name}"
    return f"{name} as {CODES[entry.dtype]}{list(entry.shape)} at byte {entry.offset}"


def _format_difference(path: Path, expected: str, actual: str) -> str:
    return f"the checkpoint is damaged: {path} has {actual}, expected {expected}."


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a regular file."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            kind = "a link" if path.is_symlink() else "not a file"
            raise CheckpointError(f"the checkpoint is damaged: {path} is {kind}, expected a regular file.")
        return read_regular(path, at_most=_LARGEST)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint is damaged: failed to read {path}: {error.strerror or 'unknown error'}."
        ) from None


def seal_checkpoint(folder: Path, manifest: Mapping[str, Any], at: Callable[[str], None]) -> None:
    """Write the manifest, then ``COMPLETE``, and sync each to disk before continuing."""
    text = (json.dumps({**manifest, "schema_version": SCHEMA_VERSION}, sort_keys=True) + "\n").encode()
    at("checkpoint:after-shards")
    write_through(folder / MANIFEST, text)
    at("checkpoint:after-manifest")
    write_through(folder / COMPLETE, f"{hashlib.sha256(text).hexdigest()}\n".encode())
    sync_folder(folder)
    at("checkpoint:after-complete")


def write_through(path: Path, data: bytes) -> None:
    """Write a new file and sync it to disk; raise FileExistsError if the file exists."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync changes of the folder itself, such as a rename, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_DELETING = ".deleting_"


@dataclass(frozen=True)
class Retention:
    """Retention policy: the newest ``last`` checkpoints, multiples of ``every`` steps (0: none), and the best.

    The best is judged by the metric ``best`` of the last evaluation before the save: ``accuracy`` on the test data, or
    ``validation/accuracy`` on a different split. ``direction`` is "max" if higher values are better, "min" if lower.
    """

    last: Annotated[int, Range(least=1, hint="at least the newest checkpoint is kept")] = 2
    every: Annotated[int, Range(least=0, hint="0 means none")] = 0
    best: str | None = None
    direction: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        check_limits(type(self), vars(self), key="checkpoint.keep")

    def select_kept(self, folders: Sequence[Path]) -> set[Path]:
        """Return the checkpoints to keep; ``folders`` are all complete checkpoints, oldest first."""
        spaced = {path for path in folders if self.every and parse_step(path) % self.every == 0}
        best = self.find_best(folders)
        return {*folders[-self.last :], *spaced, *([best] if best else [])}

    def find_best(self, folders: Sequence[Path]) -> Path | None:
        """Return the best checkpoint (the newest of equals), or None if none has the metric."""
        scored = {path: score for path in folders if (score := self._read_score(path)) is not None}
        sign = 1 if self.direction == "max" else -1
        return max(scored, key=lambda path: (sign * scored[path], parse_step(path))) if scored else None

    def _read_score(self, path: Path) -> float | None:
        if self.best is None:
            return None
        try:
            value = read_checkpoint(path).facts.get("metrics", {}).get(metric_key(*parse_metric_key(self.best)))
        except CheckpointError:
            return None
        return None if value is None or math.isnan(value) else float(value)


def apply_retention(retention: Retention, written: Path, at: Callable[[str], None]) -> None:
    """Delete expired checkpoints and leftovers of interrupted deletions.

    Ignores checkpoints of later steps than ``written``: they are damaged, or training would have resumed from them.
    """
    at("retention:begin")
    root = written.parent
    folders = [path for path in complete(root) if parse_step(path) <= parse_step(written)]
    for path in set(folders) - retention.select_kept(folders):
        path.rename(root / f"{_DELETING}{path.name}")  # a partly deleted folder must not look like a checkpoint
    sync_folder(root)
    for path in sorted(root.glob(f"{_DELETING}*")):
        _delete_checkpoint(path, at)
    at("retention:end")


def _delete_checkpoint(path: Path, at: Callable[[str], None]) -> None:
    for number, file in enumerate(sorted(path.iterdir())):
        if number == 1:
            at("retention:in-delete")
        file.unlink()
    shutil.rmtree(path)
