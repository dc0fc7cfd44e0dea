"""What the data sets of this package have in common: samples with an index, in files that are read a few at a time."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

from torch.utils.data import Dataset

from worldsize.core import FilePath, OneOf
from worldsize.data.storage.byte_files import ByteFile, SampleError, digests
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.open_files import open_files
from worldsize.data.storage.read_counts import COUNTS

_logger = logging.getLogger(__name__)
_TRIES = 1000  # samples in turn that may be bad


class Source(Dataset[Any], ABC):
    """A data set whose samples have numbers from 0; any process may read any of them at any time.

    It is a value: it holds no position, and two with equal arguments have equal samples. What it opens, it opens when
    the first sample is asked for, in the process that asks.
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
        on_error: what happens if a sample cannot be read. "stop": the run ends; "skip": the next sample that can be
            read stands in for it, which is counted and logged, and depends on the data alone.
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
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        try:
            return self.sample(index)
        except SampleError as error:
            if self.on_error == "stop":
                raise SampleError(f"{error} Mend the file, or set on_error=skip of the data.") from error
            return self._next_good(index, error)

    def _next_good(self, index: int, error: SampleError) -> Any:
        COUNTS.skipped += 1
        _logger.warning("sample %d is skipped: %s", index, error)
        later = index
        for _ in range(min(_TRIES, len(self))):
            later = self.following(later) % len(self)
            try:
                return self.sample(later)
            except SampleError:
                continue
        raise SampleError(f"{error} What follows it is as bad; nothing can stand in for it. Mend the files.") from error

    def following(self, index: int) -> int:
        """Return the first sample after ``index`` that may be good if that one is bad."""
        return index + 1

    def fingerprint(self) -> Mapping[str, Any]:
        hashed = zip(self.files, digests(self.files), strict=True)
        described = [[file.name.rpartition("/")[2], file.size, digest] for file, digest in hashed]
        total = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        return {"size": sum(file.size for file in self.files), "sha256": total, "files": len(self.files)}


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

    def fingerprint(self) -> Mapping[str, Any]:
        return self.source.fingerprint()
