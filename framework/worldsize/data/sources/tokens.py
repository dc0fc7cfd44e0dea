"""Token files: folders from ``worldsize prepare``, NumPy arrays, or raw integers."""

from __future__ import annotations

import bisect
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, NamedTuple, final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldsize.core import OneOf, Range
from worldsize.data.source import FileSource
from worldsize.data.storage.byte_files import ByteFile, SampleError
from worldsize.data.storage.listing import expand_ranges, open_files
from worldsize.data.token_shards import Prepared, read_prepared_manifest
from worldsize.errors import ConfigError

_HEADER = 4096  # bytes to read for the header of a one-dimensional array
Numbers = NDArray[Any]


@final
class Vector:
    """A one-dimensional integer array in a file, read in slices.

    Args:
        file: an ``.npy`` file, or a file of raw integers.
        dtype: dtype for a file without a header.

    Raises:
        ConfigError: an ``.npy`` file does not contain a one-dimensional integer array.
        SampleError: the file is truncated or too long.
    """

    def __init__(self, file: ByteFile, dtype: str) -> None:
        self.file = file
        self._dtype, self._start = numpy.dtype(dtype), 0
        if file.name.endswith(".npy"):
            self._dtype, self._start = _read_header(file)
        self.length, rest = divmod(file.size - self._start, self._dtype.itemsize)
        if rest:
            place = f"{file.name}, byte {file.size - rest}"
            raise SampleError(f"{place}: the last token is incomplete. Copy the file again.")

    def read(self, start: int, stop: int) -> Numbers:
        """Return elements ``start`` to ``stop`` (exclusive), [stop - start]."""
        size = self._dtype.itemsize
        return numpy.frombuffer(self.file.read(self._start + start * size, self._start + stop * size), self._dtype)


def _read_header(file: ByteFile) -> tuple[numpy.dtype[Any], int]:
    """Return the dtype of an ``.npy`` file, and the byte offset of its data."""
    head = io.BytesIO(file.read(0, min(_HEADER, file.size)))
    try:
        version = numpy.lib.format.read_magic(head)
        read = numpy.lib.format.read_array_header_1_0 if version == (1, 0) else numpy.lib.format.read_array_header_2_0
        shape, _, dtype = read(head)
    except Exception as error:  # NumPy parses the header as Python, which can raise any error
        raise ConfigError(f"{file.name} is not an .npy file: {error}. Write it with numpy.save.") from None
    if dtype.kind not in "iu":
        raise ConfigError(f"{file.name} has dtype {dtype}; tokens must be integers. Convert the file.")
    if len(shape) != 1:
        raise ConfigError(f"{file.name} has {len(shape)} dimensions, expected 1. Flatten the array.")
    expected = head.tell() + shape[0] * dtype.itemsize
    if file.size != expected:
        raise SampleError(f"{file.name} has {file.size} bytes, expected {expected} bytes. Copy the file again.")
    return dtype, head.tell()


@dataclass(frozen=True)
class TokenFiles(FileSource):
    """Base class of sources that read token files.

    Args:
        length: number of tokens to predict per sample; a sample has ``length + 1`` tokens.
        dtype: dtype of tokens in files without a header, such as ``.bin``.
    """

    length: Annotated[int, Range(least=1)] = 1024
    dtype: Annotated[str, OneOf("uint8", "uint16", "uint32", "int32", "int64")] = "uint16"

    endings: ClassVar[Sequence[str]] = (".npy", ".bin")

    @cached_property
    def listed(self) -> Sequence[ByteFile]:
        """All files at the path: token files and document boundaries."""
        return open_files(self.path, self.cache, endings=self.endings)

    @cached_property
    def files(self) -> Sequence[ByteFile]:
        """The token files, without files of document boundaries."""
        files = [file for file in self.listed if not file_name(file).startswith("documents_")]
        if not files:
            raise ConfigError(
                f"{self.listed[0].name} contains document boundaries, but the token files (tokens_*.npy) are missing. "
                "Copy the whole folder."
            )
        return files

    @cached_property
    def prepared(self) -> Sequence[Prepared]:
        """Manifests of ``worldsize prepare``; empty unless every path is a folder with one."""
        paths = [self.path] if isinstance(self.path, str) else self.path
        folders = [folder for path in paths for folder in expand_ranges(path)]
        facts = [read_prepared_manifest(folder, self.listed, self.cache) for folder in folders]
        return [each for each in facts if each] if all(facts) else []

    @property
    def vocabulary(self) -> int | None:
        """Vocabulary size from the manifests, or None without manifests."""
        return max((each.vocabulary for each in self.prepared), default=None)

    def fingerprint(self) -> Mapping[str, Any]:
        if not self.prepared:
            return super().fingerprint()
        total = "".join(each.sha256 for each in self.prepared)
        digest = total if len(self.prepared) == 1 else hashlib.sha256(total.encode()).hexdigest()
        size, tokenizers = sum(file.size for file in self.files), [dict(each.tokenizer) for each in self.prepared]
        return {"size": size, "sha256": digest, "files": len(self.files), "tokenizers": tokenizers}

    @cached_property
    def tokens(self) -> Sequence[Vector]:
        """The token array of each file."""
        return [Vector(file, self.dtype) for file in self.files]


class Window(NamedTuple):
    """Consecutive tokens, int64 [length + 1], with their file index and offset."""

    file: int
    start: int
    tokens: Numbers


@final
class Windows:
    """Windows of ``length + 1`` tokens in all files, in order, that overlap by one token.

    Every token of a file except its first is predicted once. An incomplete window at the end of a file is dropped.

    Raises:
        ConfigError: all files are too short for a window.
    """

    def __init__(self, tokens: Sequence[Vector], length: int) -> None:
        self._tokens, self._length = tokens, length
        self._ends = list(accumulate(max(0, vector.length - 1) // length for vector in tokens))
        if not self._ends[-1]:
            longest = max(tokens, key=lambda vector: vector.length)
            raise ConfigError(
                f"a sample requires {length + 1:,} tokens from the same file; the longest file, {longest.file.name}, "
                f"has {longest.length:,}. Use longer files, or decrease data.length."
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Window:
        file = bisect.bisect_right(self._ends, index)
        start = (index - (self._ends[file - 1] if file else 0)) * self._length
        return Window(file, start, self._tokens[file].read(start, start + self._length + 1).astype(numpy.int64))


@final
@dataclass(frozen=True)
class TokenWindows(TokenFiles):
    """Consecutive windows of tokens, int64 [length + 1], that overlap by one token."""

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self.tokens, self.length)

    def __len__(self) -> int:
        return len(self._windows)

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self._windows[index].tokens)


def file_name(file: ByteFile) -> str:
    """Return the last component of a file's path or URL."""
    return PurePosixPath(file.name).name
