"""Samples in WebDataset tar files: consecutive members that only differ in their endings."""

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
from worldsize.data.sources.images import DECODERS, FORMATS, decode_content
from worldsize.data.storage.byte_files import COUNTS, ByteFile, ByteReader, SampleError
from worldsize.data.storage.index import Scan
from worldsize.errors import neighbours

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # key and ending, split as in the webdataset library
_META = re.compile(r"__[^/]*__($|/)")  # names that the webdataset library skips
_ROWS = 10_000  # samples per write to the index
_HEADER = tarfile.BLOCKSIZE
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


@final
class KnownEndings(Limit):
    """Requires file name endings to have a decoder."""

    def describe_violation(self, value: Any) -> str | None:
        endings = value if isinstance(value, list | tuple) else []
        unknown = [each for each in endings if each not in DECODERS]
        return f"has an unknown extension {unknown[0]!r}{neighbours(str(unknown[0]), DECODERS)}" if unknown else None


@final
@dataclass(frozen=True)
class WebDataset(IndexedSource):
    """WebDataset tar files: consecutive members ``KEY.ENDING`` with the same key form a sample.

    A sample is a dict with ``__key__`` and the bytes of each member, keyed by its ending in lower case. An index stores
    the start and size of each sample, so that one read loads it, without extraction. With ``on_error=skip``, the last
    sample of a truncated file is dropped, since members may be missing.

    Args:
        decode: endings to decode: txt, json, cls (an integer), npy, and images such as jpg and png, which become
            Pillow images. The last ending counts if there are several, as in ``x.mask.png``.
        image_formats: allowed image formats, by their Pillow names; endings do not matter.
    """

    decode: Annotated[Sequence[str], KnownEndings()] = ()
    image_formats: Sequence[str] = FORMATS

    endings: ClassVar[Sequence[str]] = (".tar",)

    @property
    def kind(self) -> str:
        return f"webdataset-1 on_error={self.on_error}"  # "skip" drops the end of a truncated file

    def create_scanner(self) -> Scan:
        return self._scan_file

    def _scan_file(self, file: ByteFile) -> Iterator[Mapping[str, Array]]:
        refuse_compressed(file)
        rows: list[tuple[int, int]] = []
        try:
            for row in _locate_samples(file):
                rows.append(row)
                if len(rows) == _ROWS:
                    yield _build_columns(rows)
                    rows = []
        except SampleError as error:
            if self.on_error == "stop":
                raise
            COUNTS.skipped += 1
            _logger.warning("skipping the rest of the file: %s", error)
        yield _build_columns(rows)

    def __len__(self) -> int:
        return len(self.index["start"])

    def sample(self, index: int) -> dict[str, Any]:
        start, file = int(self.index["start"][index]), self.get_row_file(index)
        data = file.read(start, start + int(self.index["size"][index]))
        sample: dict[str, Any] = {}
        for member, offset in _parse_members(data, f"{file.name}, byte {start}"):
            parts = _split_member_name(member)
            if parts is None:
                continue
            sample.setdefault("__key__", parts[0])
            content: Any = data[offset : offset + member.size]
            ending = parts[1].rpartition(".")[2]
            if ending in self.decode:
                place = f"{file.name}, byte {start + offset} ({member.name})"
                content = decode_content(content, ending, place, self.image_formats)
            sample[parts[1]] = content
        return sample


def _build_columns(rows: list[tuple[int, int]]) -> dict[str, Array]:
    table = numpy.array(rows, dtype=numpy.uint64).reshape(-1, 2)
    return {"start": table[:, 0], "size": table[:, 1]}


def _split_member_name(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return key and ending of a member, or None if it does not belong to a sample."""
    if not member.isreg() or _META.match(member.name):
        return None
    named = _NAME.fullmatch(member.name)
    return (named[1], named[2].lower()) if named else None


def _locate_samples(file: ByteFile) -> Iterator[tuple[int, int]]:
    """Yield the byte offset of each sample's first header, and the sample's size in bytes."""
    key, begun, ended = None, 0, 0
    endings: set[str] = set()
    with BufferedReader(ByteReader(file)) as reader:
        for member in _iterate_members(reader, file):
            if (parts := _split_member_name(member)) is None:
                continue
            if parts[0] != key:
                if key is not None:
                    yield begun, ended - begun
                key, begun, endings = parts[0], member.offset, set()
            if parts[1] in endings:
                raise SampleError(
                    f"{file.name}, byte {member.offset}: duplicate member {member.name} in a sample. Rename the member."
                )
            endings.add(parts[1])
            ended = member.offset_data + member.size
    if key is not None:
        yield begun, ended - begun


def _iterate_members(reader: IO[bytes], file: ByteFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar file.

    Raises:
        SampleError: the file is damaged, truncated, or not a tar file.
    """
    if file.size == 0:
        raise SampleError(f"{file.name}, byte 0: the file is empty. Copy the file again.")
    place = 0
    try:
        with tarfile.open(fileobj=reader, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # would keep all members in memory
                place = member.offset
                if member.offset_data + member.size > file.size:
                    raise tarfile.ReadError(
                        f"found only {file.size - member.offset_data:,} of {member.size:,} bytes of {member.name}"
                    )
                yield member
            place = archive.offset
    except tarfile.TarError as error:
        raise SampleError(
            f"{file.name}, byte {place}: the tar file is damaged or truncated: {error}. Copy the file again."
        ) from None
    if file.size - place < _HEADER and file.size != place:
        raise SampleError(f"{file.name}, byte {place}: the tar file is truncated. Copy the file again.")
    if file.size == place:
        _logger.warning("%s, byte %d: missing end-of-archive marker; the tar file may be truncated.", file.name, place)


def _parse_members(data: bytes, place: str) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield the members in a section of a tar file, with their content's offset in ``data``."""
    offset = 0
    try:
        while offset < len(data):
            member = tarfile.TarInfo.frombuf(data[offset : offset + _HEADER], tarfile.ENCODING, "surrogateescape")
            begins = offset + _HEADER
            if member.type not in _PLAIN:  # an extra header, e.g. for a long name
                with tarfile.open(fileobj=BytesIO(data[offset:]), mode="r:") as archive:
                    member = archive.next() or member
                begins = offset + member.offset_data
            yield member, begins
            offset = begins + -(-member.size // _HEADER) * _HEADER
    except tarfile.TarError as error:
        raise SampleError(
            f"{place}: the tar file changed after it was indexed: {error}. Restore the file, or remove its index from "
            "the cache."
        ) from None
