"""Tokenize text into a folder of shards, once, before training.

The input is divided into pieces, which a pool of processes tokenizes in a working folder. When all pieces are finished,
the shards are moved into place and a manifest is written. After an interruption, the next preparation reuses the
finished pieces. The resulting bytes do not depend on the number of processes or on interruptions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, final

from filelock import FileLock, Timeout

from worldsize.data.texts import Encoder, TextFormat, Tokenizer, choose_token_dtype, input_files
from worldsize.data.token_shards import (
    MANIFEST,
    Made,
    ShardInput,
    hash_file,
    read_shard_sizes,
    split_into_pieces,
    tokenize_piece,
    write_json,
)
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.world.processes import die_with_parent

_SCHEMA = 1
_PIECES = ".pieces"
_REQUEST = "request.json"
_LOCK = ".lock"
OnError = Literal["stop", "skip"]
Progress = Callable[[int, int], None]  # progress callback; receives finished and total input bytes


@final
@dataclass(frozen=True)
class Preparation:
    """Settings for preparing token shards from text.

    Attributes:
        inputs: Input files and folders.
        tokenizer: The tokenizer.
        form: Location of the documents within files.
        shard_bytes: Approximate input bytes per shard.
        on_error: Policy for unreadable documents. "stop": raise an error; "skip": omit and count them.
    """

    inputs: Sequence[Path]
    tokenizer: Tokenizer
    form: TextFormat = field(default_factory=TextFormat)
    shard_bytes: int = 64 << 20
    on_error: OnError = "stop"

    def write_shards(
        self, folder: Path, *, processes: int, progress: Progress = lambda done, total: None
    ) -> dict[str, Any]:
        """Create the shards in ``folder``, unless they already exist, and return the manifest.

        Raises:
            ConfigError: the folder contains other files or shards, or an input or the tokenizer is missing.
            WorldsizeError: a document cannot be read, or another process is preparing the folder.
        """
        encoder, files = self.tokenizer.load_encoder(), input_files(self.inputs)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"failed to create {folder}: {error.strerror}. Choose a different folder.") from None
        with _lock_folder(folder):
            with _create_pool(processes, self.tokenizer) as pool:
                digests = dict(zip(files, pool.map(hash_file, files.values()), strict=True))
                request = self._build_request(encoder, files, digests)
                done = _read_finished_manifest(folder, request, self.on_error)
                if done is not None:
                    return done
                work = _open_work_folder(folder, request)
                pieces = list(split_into_pieces(files.values(), self.form, work, size=self.shard_bytes))
                _make_all(pieces, partial(_tokenize_piece, form=self.form), self.on_error, pool, progress)
            return _finalize_shards(folder, pieces, request, encoder)

    def _build_request(self, encoder: Encoder, files: Mapping[str, Path], digests: Mapping[str, str]) -> dict[str, Any]:
        """Return everything that determines the bytes of the shards, in the manifest's format."""
        return {
            "schema": _SCHEMA,
            "tokenizer": {**asdict(self.tokenizer), "sha256": encoder.sha256, "vocabulary": encoder.vocabulary},
            "format": asdict(self.form),
            "shard_bytes": self.shard_bytes,
            "inputs": [
                {"name": name, "bytes": path.stat().st_size, "sha256": digests[name]} for name, path in files.items()
            ],
        }


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / _LOCK, timeout=0):
            yield
    except Timeout:
        raise WorldsizeError(
            f"another process is preparing {folder}. Wait for it to finish, or choose a different folder."
        ) from None


# ---------------------------------------------------------------- existing content of the folder


def _read_finished_manifest(folder: Path, request: Mapping[str, Any], on_error: OnError) -> dict[str, Any] | None:
    """Return the manifest of the requested shards, or None if ``folder`` lacks a manifest.

    Raises:
        ConfigError: the folder contains other shards, or some are missing or damaged.
    """
    if not (folder / MANIFEST).exists():
        return None
    manifest = _read_json(folder / MANIFEST)
    _check_same(folder, {key: manifest.get(key) for key in request}, request)
    try:
        sizes, skipped = read_shard_sizes(manifest), int(manifest["skipped"])
    except (ValueError, KeyError, TypeError):
        raise _create_damage_error(folder / MANIFEST) from None
    for name, size in sizes.items():
        present = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if present != size:
            raise ConfigError(
                f"{folder / name} has {present:,} bytes, expected {size:,}. Restore the file, or remove {folder} and "
                "run worldsize prepare again."
            )
    if skipped and on_error == "stop":
        raise ConfigError(
            f"{folder} was prepared with --on-error skip, which skipped {skipped:,} documents. Pass --on-error skip, "
            "or choose a different folder."
        )
    shutil.rmtree(folder / _PIECES, ignore_errors=True)  # left over if killed after writing the manifest
    return manifest


def _open_work_folder(folder: Path, request: Mapping[str, Any]) -> Path:
    """Return the working folder: new, or from an interrupted preparation of this request."""
    work = folder / _PIECES
    if (work / _REQUEST).exists():
        _check_same(folder, _read_json(work / _REQUEST), request)
        return work
    if others := sorted(path.name for path in folder.iterdir() if path.name not in (_LOCK, _PIECES)):
        raise ConfigError(f"{folder} is not empty (found {others[0]}); nothing was changed. Choose a new folder.")
    work.mkdir(exist_ok=True)
    write_json(work / _REQUEST, request)
    return work


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        raise _create_damage_error(path) from None
    if not isinstance(content, dict):
        raise _create_damage_error(path)
    return content


def _create_damage_error(path: Path) -> ConfigError:
    return ConfigError(f"{path} is damaged; nothing was changed. Remove the folder and run worldsize prepare again.")


def _check_same(folder: Path, there: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    if differing := [key for key in request if there.get(key) != request[key]]:
        raise ConfigError(
            f"{folder} contains token shards that differ in {' and '.join(differing)}; nothing was changed. "
            "Choose a different folder, or remove the existing one."
        )


# ---------------------------------------------------------------- processing of pieces


_encoder: Encoder | None = None  # loaded once per process


def _create_pool(processes: int, tokenizer: Tokenizer) -> ProcessPoolExecutor:
    context = get_context("fork")
    return ProcessPoolExecutor(processes, context, _begin_process, (os.getpid(), tokenizer))


def _begin_process(parent: int, tokenizer: Tokenizer) -> None:
    global _encoder
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # exit without a traceback
    _encoder = tokenizer.load_encoder()


def _tokenize_piece(piece: ShardInput, on_error: OnError, form: TextFormat) -> None:
    assert _encoder is not None, "each process of the pool begins with it"
    tokenize_piece(piece, _encoder, form, on_error=on_error)


def _make_all(
    pieces: Sequence[ShardInput],
    work: Callable[[ShardInput, OnError], None],
    on_error: OnError,
    pool: ProcessPoolExecutor,
    progress: Progress,
) -> None:
    missing = [piece for piece in pieces if not _is_made(piece, on_error)]
    total = sum(piece.size for piece in pieces)
    done = total - sum(piece.size for piece in missing)
    progress(done, total)
    futures = {pool.submit(work, piece, on_error): piece for piece in missing}
    try:
        for future in as_completed(futures):
            future.result()
            done += futures[future].size
            progress(done, total)
    except BrokenProcessPool:
        raise WorldsizeError(
            "a tokenizer process was killed, possibly because memory ran out. Run the same command again to resume, "
            "with fewer --processes to reduce memory usage."
        ) from None
    finally:
        for future in futures:
            future.cancel()


def _is_made(piece: ShardInput, on_error: OnError) -> bool:
    """Return whether a piece is finished; with "stop", it must not have skipped documents."""
    made = piece.read_record()
    return made is not None and not (made.skipped and on_error == "stop")


def _finalize_shards(
    folder: Path, pieces: Sequence[ShardInput], request: Mapping[str, Any], encoder: Encoder
) -> dict[str, Any]:
    """Move the nonempty pieces to their final names as shards, and write the manifest.

    A piece may already have its final name if an earlier preparation was killed at this point.
    """
    made = {piece: facts for piece in pieces if (facts := piece.read_record())}
    filled = [(piece, facts) for piece, facts in made.items() if facts.tokens]
    if not filled:
        raise WorldsizeError(
            f"no text found in the input: {_format_counts(made.values())}. Check --field and the input."
        )
    shards = [_move_shard(folder, number, piece, facts) for number, (piece, facts) in enumerate(filled)]
    dtype = choose_token_dtype(encoder.vocabulary).name
    manifest = {
        **request,
        "dtype": dtype,
        "tokens": sum(facts.tokens for facts in made.values()),
        "documents": sum(facts.documents for facts in made.values()),
        "empty": sum(facts.empty for facts in made.values()),
        "skipped": sum(facts.skipped for facts in made.values()),
        "bad": [text for facts in made.values() for text in facts.bad][:100],
        "shards": shards,
        "sha256": hashlib.sha256(json.dumps([dtype, shards]).encode()).hexdigest(),
    }
    write_json(folder / MANIFEST, manifest)
    shutil.rmtree(folder / _PIECES)
    return manifest


def _move_shard(folder: Path, number: int, piece: ShardInput, facts: Made) -> dict[str, Any]:
    places = {piece.tokens: f"tokens_{number:05d}.npy", piece.documents: f"documents_{number:05d}.npy"}
    for path, name in places.items():
        if path.exists():
            path.replace(folder / name)
    file, documents = places.values()
    if missing := [name for name in places.values() if not (folder / name).exists()]:
        raise WorldsizeError(
            f"{folder / missing[0]} was written but is now missing. Remove {folder} and run worldsize prepare again."
        )
    return {
        "file": file,
        "tokens": facts.tokens,
        "bytes": (folder / file).stat().st_size,
        "sha256": facts.sha256,
        "documents_file": documents,
        "documents": facts.documents,
        "documents_sha256": facts.documents_sha256,
    }


def _format_counts(made: Any) -> str:
    empty, skipped = sum(facts.empty for facts in made), sum(facts.skipped for facts in made)
    return f"{empty:,} documents are empty, {skipped:,} unreadable"
