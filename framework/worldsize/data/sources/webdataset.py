"""Samples in tar files, as the library webdataset has them: neighbours whose names differ in their endings alone."""

from __future__ import annotations

import logging
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from typing import IO, Annotated, Any, ClassVar, final

import numpy

from worldsize.core import Limit
from worldsize.data.source import Array, IndexedSource, refuse_compressed
from worldsize.data.sources.images import DECODERS, FORMATS, decoded
from worldsize.data.storage.byte_files import COUNTS, ByteFile, ByteReader, SampleError
from worldsize.data.storage.index import Scan
from worldsize.errors import neighbours

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # key and ending, as webdataset divides them
_META = re.compile(r"__[^/]*__($|/)")  # names that webdataset leaves out
_ROWS = 10_000  # samples that are written to the index at once
_HEADER = tarfile.BLOCKSIZE
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


@final
class KnownEndings(Limit):
    """Endings of names for which there is a decoder."""

    def refusal(self, value: Any) -> str | None:
        endings = value if isinstance(value, list | tuple) else []
        unknown = [each for each in endings if each not in DECODERS]
        return f"has an unknown ending {unknown[0]!r}{neighbours(str(unknown[0]), DECODERS)}" if unknown else None


@final
@dataclass(frozen=True)
class WebDataset(IndexedSource):
    """Tar files of WebDataset: members ``KEY.ENDING`` that follow each other and share their key are a sample.

    A sample is a dict of ``__key__`` and, by ending in lower case, the bytes of each member. It is read at once, by an
    index of where samples begin and end; nothing is extracted. Of a file that was cut off, ``on_error=skip`` leaves out
    the last sample that is there, since it may lack a member.

    Args:
        decode: endings whose bytes are decoded: txt, json, cls (a whole number), npy, and images such as jpg and png,
            which become Pillow's. Of several endings, as in ``x.mask.png``, the last one counts.
        image_formats: the formats of images that are decoded, by Pillow's names, whatever their endings say.
    """

    decode: Annotated[Sequence[str], KnownEndings()] = ()
    image_formats: Sequence[str] = FORMATS

    endings: ClassVar[Sequence[str]] = (".tar",)

    @property
    def kind(self) -> str:
        return f"webdataset-1 on_error={self.on_error}"  # "skip" leaves out what a file lacks that was cut off

    def scanner(self) -> Scan:
        return self._scan

    def _scan(self, file: ByteFile) -> Iterator[Mapping[str, Array]]:
        refuse_compressed(file)
        rows: list[tuple[int, int]] = []
        try:
            for row in _samples(file):
                rows.append(row)
                if len(rows) == _ROWS:
                    yield _columns(rows)
                    rows = []
        except SampleError as error:
            if self.on_error == "stop":
                raise
            COUNTS.skipped += 1
            _logger.warning("what follows in the file is skipped: %s", error)
        yield _columns(rows)

    def __len__(self) -> int:
        return len(self.index["start"])

    def sample(self, index: int) -> dict[str, Any]:
        start, file = int(self.index["start"][index]), self.file_of(index)
        data = file.read(start, start + int(self.index["size"][index]))
        sample: dict[str, Any] = {}
        for member, offset in _members(data, f"{file.name}, byte {start}"):
            parts = _divided(member)
            if parts is None:
                continue
            sample.setdefault("__key__", parts[0])
            content: Any = data[offset : offset + member.size]
            ending = parts[1].rpartition(".")[2]
            if ending in self.decode:
                place = f"{file.name}, byte {start + offset} ({member.name})"
                content = decoded(content, ending, place, self.image_formats)
            sample[parts[1]] = content
        return sample


def _columns(rows: list[tuple[int, int]]) -> dict[str, Array]:
    table = numpy.array(rows, dtype=numpy.uint64).reshape(-1, 2)
    return {"start": table[:, 0], "size": table[:, 1]}


def _divided(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return key and ending of a member that is part of a sample."""
    if not member.isreg() or _META.match(member.name):
        return None
    named = _NAME.fullmatch(member.name)
    return (named[1], named[2].lower()) if named else None


def _samples(file: ByteFile) -> Iterator[tuple[int, int]]:
    """Yield where each sample begins, with its first header, and how many bytes it has."""
    key, begun, ended = None, 0, 0
    endings: set[str] = set()
    with BufferedReader(ByteReader(file)) as reader:
        for member in _checked(reader, file):
            if (parts := _divided(member)) is None:
                continue
            if parts[0] != key:
                if key is not None:
                    yield begun, ended - begun
                key, begun, endings = parts[0], member.offset, set()
            if parts[1] in endings:
                raise SampleError(
                    f"{file.name}, byte {member.offset}: a second {member.name} in one sample. Give it another name."
                )
            endings.add(parts[1])
            ended = member.offset_data + member.size
    if key is not None:
        yield begun, ended - begun


def _checked(reader: IO[bytes], file: ByteFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar file.

    Raises:
        SampleError: it is none, is damaged, or was cut off.
    """
    if file.size == 0:
        raise SampleError(f"{file.name}, byte 0: the file is empty. Bring the whole file.")
    place = 0
    try:
        with tarfile.open(fileobj=reader, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would remember all of them
                place = member.offset
                if member.offset_data + member.size > file.size:
                    raise tarfile.ReadError(
                        f"{member.name} has {member.size:,} bytes, of which {file.size - member.offset_data:,} are here"
                    )
                yield member
            place = archive.offset
    except tarfile.TarError as error:
        raise SampleError(
            f"{file.name}, byte {place}: the tar file is damaged or was cut off: {error}. Bring the whole file."
        ) from None
    if file.size - place < _HEADER and file.size != place:
        raise SampleError(f"{file.name}, byte {place}: the tar file was cut off. Bring the whole file.")
    if file.size == place:
        _logger.warning("%s, byte %d: the tar file has no end mark; it may have been cut off.", file.name, place)


def _members(data: bytes, place: str) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield the members in a part of a tar file, and where in ``data`` the content of each begins."""
    offset = 0
    try:
        while offset < len(data):
            member = tarfile.TarInfo.frombuf(data[offset : offset + _HEADER], tarfile.ENCODING, "surrogateescape")
            begins = offset + _HEADER
            if member.type not in _PLAIN:  # headers of long names stand before the member's own
                with tarfile.open(fileobj=BytesIO(data[offset:]), mode="r:") as archive:
                    member = archive.next() or member
                begins = offset + member.offset_data
            yield member, begins
            offset = begins + -(-member.size // _HEADER) * _HEADER
    except tarfile.TarError as error:
        raise SampleError(
            f"{place}: the tar file has changed: {error}. Bring it back, or remove its index from the cache."
        ) from None
