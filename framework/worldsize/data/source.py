"""Base classes for map-style data sets with samples in files.

An :class:`IndexedSource` locates samples with an index that is built in one pass over the files. Sample lengths can be
looked up on demand (:class:`LookedUpLengths`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from worldsize.core import ConfigError, FilePath, OneOf
from worldsize.data.storage.byte_files import COUNTS, ByteFile, SampleError, compute_digests
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.index import Scan, open_index
from worldsize.data.storage.listing import is_url, open_files
from worldsize.seeds import derive_seed

_logger = logging.getLogger(__name__)
_TRIES = 1000  # maximum number of stand-ins to try for one bad sample
_NEARBY = 1024  # number of samples after a bad one from which to choose its stand-in


class Source(Dataset[Any], ABC):
    """Base class of map-style data sets: any process can read any sample by its index.

    Sources are stateless, and sources with equal arguments have equal samples. Files are opened lazily, in the process
    that requests the first sample.

    A source with known sample lengths has an attribute ``lengths`` for ``length_balanced``: a tensor [samples], or an
    object that looks them up (:class:`worldsize.data.source.LookedUpLengths`).
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Read sample ``index``.

        Raises:
            SampleError: the sample cannot be read.
        """

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples; override this if reading several at once is faster."""
        return [self[index] for index in indices]

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples without stand-ins, with SampleErrors in place of skipped samples."""
        return self.__getitems__(indices)

    def find_bad_range(self, index: int) -> range:
        """Return the samples, e.g. a row group, that are probably unreadable if ``index`` is."""
        return range(index, index + 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples in index order."""
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without cached properties, such as open files, which are recreated."""
        kind = type(self)
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(kind, name, None), cached_property)
        }

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Return the data's ``size`` in bytes and ``sha256``, to recognize changed data."""


@dataclass(frozen=True)
class FileSource(Source):
    """Base class of sources that read samples from local files or URLs.

    Args:
        path: a file, a folder, a pattern such as ``books-*.jsonl``, or a list of these; local paths or URLs.
        on_error: policy for unreadable samples. "stop": raise an error; "skip": count and log them. Training then
            replaces them by readable samples (:func:`read_with_replacements`), and evaluation omits them.
        cache: stores indices and data read from URLs.
    """

    path: Annotated[str | Sequence[str], FilePath()]
    on_error: Annotated[str, OneOf("stop", "skip")] = "stop"
    cache: Cache = field(default_factory=Cache)

    endings: ClassVar[Sequence[str]] = ("",)
    """File name endings to include when ``path`` is a folder."""

    @abstractmethod
    def sample(self, index: int) -> Any:
        """Read sample ``index``; raise :class:`SampleError` with file and byte offset if it is bad."""

    @cached_property
    def files(self) -> Sequence[ByteFile]:
        """The files, in sample order."""
        return open_files(self.path, self.cache, endings=self.endings)

    def __getitem__(self, index: int) -> Any:
        return read_with_replacements(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return self.read_each(indices) if self.on_error == "stop" else read_with_replacements(self, indices)

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        return [self._sample_or_error(index) for index in indices]

    def _sample_or_error(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample index {index} is out of range for {len(self)} samples")
        try:
            return self.sample(index)
        except SampleError as error:
            if self.on_error == "stop":
                raise SampleError(f"{error} Repair the file, or set on_error=skip for the data.") from error
            return error.with_traceback(None)

    def fingerprint(self) -> Mapping[str, Any]:
        hashed = zip(self.files, compute_digests(self.files), strict=True)
        described = [[file.name.rpartition("/")[2], file.size, digest] for file, digest in hashed]
        total = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        return {"size": sum(file.size for file in self.files), "sha256": total, "files": len(self.files)}


def check_paths(owner: Any) -> None:
    """Check that the local files of all sources in an object's attributes exist, recursively.

    Raises:
        ConfigError: a path does not match any file.
    """
    for value in getattr(owner, "__dict__", {}).values():
        several = [*value.values()] if isinstance(value, Mapping) else value
        for each in several if isinstance(several, list | tuple) else [value]:
            if isinstance(each, FileSource):
                paths = [each.path] if isinstance(each.path, str) else each.path
                if not any(map(is_url, paths)):
                    each.files  # noqa: B018 - raises an error if there are none
            elif is_dataclass(each):
                check_paths(each)


@dataclass(frozen=True)
class Transformed(Source):
    """A source that applies a function to each sample of another source.

    Args:
        source: the source to read.
        function: maps a sample to its replacement. The random generators of torch, NumPy and Python are seeded per
            step and logical rank.
    """

    source: Source
    function: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.function(self.source[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self.function(sample) for sample in self.source.__getitems__(indices)]

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        samples = self.source.read_each(indices)
        return [each if isinstance(each, SampleError) else self.function(each) for each in samples]

    def find_bad_range(self, index: int) -> range:
        return self.source.find_bad_range(index)

    @property
    def lengths(self) -> Any:
        """Lengths of the samples in ``source`` (before the function is applied), or None if unknown."""
        return getattr(self.source, "lengths", None)

    def fingerprint(self) -> Mapping[str, Any]:
        return self.source.fingerprint()


def read_with_replacements(source: Source, indices: Sequence[int]) -> list[Any]:
    """Read several samples, replacing unreadable ones by other samples of ``source``.

    A stand-in is chosen by a hash of the bad sample's index, so that bad neighbors get different ones. The candidates
    are the 1,024 samples after the range of probably bad samples (``find_bad_range``), or as many as that range has if
    it is longer. If the stand-in is bad, too, the search continues from it, among twice as many samples. The choice
    depends only on the sample's index and the data.

    Raises:
        SampleError: none of 1,000 candidates was readable.
    """
    samples = source.read_each(indices)
    return [
        _stand_in(source, index, sample) if isinstance(sample, SampleError) else sample
        for index, sample in zip(indices, samples, strict=True)
    ]


def _stand_in(source: Source, index: int, error: SampleError) -> Any:
    count_skipped(index, error)
    length, later, reach = len(source), index, _NEARBY
    for number in range(_TRIES):
        bad = source.find_bad_range(later)
        reach = min(length, max(2 * reach if number else reach, len(bad)))
        later = (bad.stop + derive_seed(0, "stand-in", index, number) % reach) % length
        (sample,) = source.read_each([later])
        if not isinstance(sample, SampleError):
            return sample
    raise SampleError(f"{error} All replacement samples are unreadable, too. Repair the files.") from error


def count_skipped(index: int, error: SampleError) -> None:
    """Count and log a skipped sample."""
    COUNTS.skipped += 1
    _logger.warning("skipping sample %d: %s", index, error)


Array = NDArray[Any]
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True)
class IndexedSource(FileSource):
    """Base class of sources with an index: arrays with one row per sample or group of samples."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Cache key: name and version of the indexing rule, and all arguments that affect it."""

    @abstractmethod
    def create_scanner(self) -> Scan:
        """Return a function that indexes one file.

        :func:`open_index` calls the function for each file in order. The function raises SampleError for a file in the
        wrong format.
        """

    @cached_property
    def index(self) -> Mapping[str, Array]:
        """The index of all files, memory-mapped."""
        made = open_index(self.kind, self.files, self.cache, self.create_scanner())
        if not made:
            names = self.files[0].name if len(self.files) == 1 else f"{self.files[0].name} and the following files"
            raise ConfigError(f"{names}, byte 0: no samples found. Check the data path.")
        return made

    @property
    def lengths(self) -> LookedUpLengths | None:
        """Sample lengths from the index column ``size`` (e.g. in bytes), or None without it."""
        sizes = self.index.get("size")
        return None if sizes is None else LookedUpLengths(lambda indices: sizes[indices])

    def get_row_file(self, row: int) -> ByteFile:
        """Return the file that contains the samples of a row of the index."""
        return self.files[int(self.index["file"][row])]


def refuse_compressed(file: ByteFile) -> None:
    """Raise SampleError for a compressed file, which does not allow random access."""
    head = file.read(0, min(6, file.size))
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise SampleError(
                f"{file.name}, byte 0: {name}-compressed files do not support random access. Decompress the file."
            )


@final
class LookedUpLengths:
    """Sample lengths that are looked up on demand.

    Args:
        look_up: maps sample indices, int64 [samples], to their lengths, of any integer type.
    """

    def __init__(self, look_up: Callable[[NDArray[numpy.int64]], NDArray[Any]]) -> None:
        self._look_up = look_up

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return the lengths of the samples ``indices``; both are int64 [samples]."""
        return torch.from_numpy(self._look_up(indices.numpy()).astype(numpy.int64))
