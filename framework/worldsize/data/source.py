"""Base classes of the data sets of this package: samples with an index, in files that are read a few at a time.

An :class:`IndexedSource` finds its samples by an index that one pass over the files makes. Lengths of samples can be
given without a list of all of them (:class:`LookedUpLengths`).
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
from worldsize.data.storage.byte_files import COUNTS, ByteFile, SampleError, digests
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.index import Scan, indexed
from worldsize.data.storage.listing import is_url, open_files
from worldsize.record.determinism import stream

_logger = logging.getLogger(__name__)
_TRIES = 1000  # samples that may be bad, of those that could stand in for one
_NEARBY = 1024  # samples after a bad one, of which one stands in for it


class Source(Dataset[Any], ABC):
    """A data set whose samples have numbers from 0; any process may read any of them at any time.

    It is a value: it holds no position, and two with equal arguments have equal samples. What it opens, it opens when
    the first sample is asked for, in the process that asks.

    One that knows how long its samples are has an attribute ``lengths``, for ``length_balanced``: a tensor [samples],
    or what looks them up (:class:`worldsize.data.source.LookedUpLengths`).
    """

    @abstractmethod
    def __len__(self) -> int:
        """Count the samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Read sample ``index``.

        Raises:
            SampleError: it cannot be read.
        """

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples; a source that reads neighbours faster together says so here."""
        return [self[index] for index in indices]

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples, for none of which another stands in: a bad one that is skipped is its SampleError."""
        return self.__getitems__(indices)

    def bad_with(self, index: int) -> range:
        """Return the neighbours of sample ``index``, and itself, that are probably bad if it is."""
        return range(index, index + 1)

    def __iter__(self) -> Iterator[Any]:
        """Read all samples in the order of their numbers."""
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was opened or computed since: another process opens it again."""
        kind = type(self)
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(kind, name, None), cached_property)
        }

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Say what identifies the data: their ``size`` in bytes, and a ``sha256`` that changes when they do."""


@dataclass(frozen=True)
class FileSource(Source):
    """Samples in files, by path or URL.

    Args:
        path: a file, a folder, a pattern such as ``books-*.jsonl`` or a list of these, here or at a URL.
        on_error: what happens if a sample cannot be read. "stop": the run ends; "skip": in training, one that
            can be read stands in for it (:func:`with_stand_ins`); evaluation leaves it out. It is counted and logged.
        cache: keeps indices, and what is read of URLs.
    """

    path: Annotated[str | Sequence[str], FilePath()]
    on_error: Annotated[str, OneOf("stop", "skip")] = "stop"
    cache: Cache = field(default_factory=Cache)

    endings: ClassVar[Sequence[str]] = ("",)
    """How the names of files end that count in a folder."""

    @abstractmethod
    def sample(self, index: int) -> Any:
        """Read sample ``index``; raise :class:`SampleError`, which names the file and the byte, if it is bad."""

    @cached_property
    def files(self) -> Sequence[ByteFile]:
        """The files, in the order of their samples."""
        return open_files(self.path, self.cache, endings=self.endings)

    def __getitem__(self, index: int) -> Any:
        return with_stand_ins(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return self.read_each(indices) if self.on_error == "stop" else with_stand_ins(self, indices)

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        return [self._sample_or_error(index) for index in indices]

    def _sample_or_error(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        try:
            return self.sample(index)
        except SampleError as error:
            if self.on_error == "stop":
                raise SampleError(f"{error} Mend the file, or set on_error=skip of the data.") from error
            return error.with_traceback(None)

    def fingerprint(self) -> Mapping[str, Any]:
        hashed = zip(self.files, digests(self.files), strict=True)
        described = [[file.name.rpartition("/")[2], file.size, digest] for file, digest in hashed]
        total = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        return {"size": sum(file.size for file in self.files), "sha256": total, "files": len(self.files)}


def check_paths(owner: Any) -> None:
    """Look on this machine for the files of each source in the attributes of an object, and in those of such sources.

    Raises:
        ConfigError: a path does not name a file.
    """
    for value in getattr(owner, "__dict__", {}).values():
        several = [*value.values()] if isinstance(value, Mapping) else value
        for each in several if isinstance(several, list | tuple) else [value]:
            if isinstance(each, FileSource):
                paths = [each.path] if isinstance(each.path, str) else each.path
                if not any(map(is_url, paths)):
                    each.files  # noqa: B018 - looks for them
            elif is_dataclass(each):
                check_paths(each)


@dataclass(frozen=True)
class Transformed(Source):
    """Samples of another source, each passed through a function.

    Args:
        source: what is read.
        function: takes a sample and returns what stands for it. What it draws of torch's, NumPy's and Python's random
            numbers follows from the step and the logical rank.
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

    def bad_with(self, index: int) -> range:
        return self.source.bad_with(index)

    @property
    def lengths(self) -> Any:
        """The lengths that ``source`` says, whatever the function makes of its samples; None: it says none."""
        return getattr(self.source, "lengths", None)

    def fingerprint(self) -> Mapping[str, Any]:
        return self.source.fingerprint()


def with_stand_ins(source: Source, indices: Sequence[int]) -> list[Any]:
    """Read several samples of ``source``; others of it stand in for those that cannot be read.

    The stand-in is one of the 1,024 samples, or of as many as are bad together, after those that are bad with it. A
    hash of its number chooses which, so that bad neighbours do not share one. If that one is bad, it is sought in the
    same way from there, twice as far. So it depends on the sample's number and on the data alone.

    Raises:
        SampleError: nothing that is good was found.
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
        bad = source.bad_with(later)
        reach = min(length, max(2 * reach if number else reach, len(bad)))
        later = (bad.stop + stream(0, "stand-in", index, number) % reach) % length
        (sample,) = source.read_each([later])
        if not isinstance(sample, SampleError):
            return sample
    raise SampleError(f"{error} What follows it is as bad; nothing can stand in for it. Mend the files.") from error


def count_skipped(index: int, error: SampleError) -> None:
    """Count and log a sample that cannot be read."""
    COUNTS.skipped += 1
    _logger.warning("sample %d is skipped: %s", index, error)


Array = NDArray[Any]
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True)
class IndexedSource(FileSource):
    """Samples that an index finds: arrays of which each row is a sample, or a part of a file with several."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the rule that makes the index, with its version, and all arguments that it depends on."""

    @abstractmethod
    def scanner(self) -> Scan:
        """Return what makes the index: a function that is called with each file in turn (:func:`indexed`).

        It raises SampleError if a file is not of this kind.
        """

    @cached_property
    def index(self) -> Mapping[str, Array]:
        """The index of all files, mapped from disk."""
        made = indexed(self.kind, self.files, self.cache, self.scanner())
        if not made:
            names = self.files[0].name if len(self.files) == 1 else f"{self.files[0].name} and the files after it"
            raise ConfigError(f"{names}, byte 0: there is no sample. Check the path of the data.")
        return made

    @property
    def lengths(self) -> LookedUpLengths | None:
        """The lengths of the samples: what the index has as ``size``, such as their bytes; None: it has none."""
        sizes = self.index.get("size")
        return None if sizes is None else LookedUpLengths(lambda indices: sizes[indices])

    def file_of(self, row: int) -> ByteFile:
        """Return the file of a row of the index."""
        return self.files[int(self.index["file"][row])]


def refuse_compressed(file: ByteFile) -> None:
    """Raise SampleError if a file is compressed as a whole, so that its samples cannot be read one by one."""
    head = file.read(0, min(6, file.size))
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise SampleError(
                f"{file.name}, byte 0: the file is compressed with {name}, which can only be read from its beginning. "
                "Decompress it."
            )


@final
class LookedUpLengths:
    """The lengths of the samples of a source, looked up where they are asked for.

    Args:
        look_up: returns the lengths of the samples with these numbers: whole numbers [numbers], of any type.
    """

    def __init__(self, look_up: Callable[[NDArray[numpy.int64]], NDArray[Any]]) -> None:
        self._look_up = look_up

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return the lengths of the samples ``indices``, int64 [indices]."""
        return torch.from_numpy(self._look_up(indices.numpy()).astype(numpy.int64))
