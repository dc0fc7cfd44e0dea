"""What the sources have in common whose samples are found by an index that one pass over the files makes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from worldsize.core import ConfigError
from worldsize.data.lengths import LookedUpLengths
from worldsize.data.source import FileSource
from worldsize.data.storage.byte_files import ByteFile, SampleError
from worldsize.data.storage.index import Scan, indexed

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
