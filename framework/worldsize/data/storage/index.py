"""Indices of files, such as line offsets, built by one process and memory-mapped by all.

The disk space is bounded: the least recently used indices are removed first, except indices in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, final

import numpy
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from worldsize.data.storage.byte_files import ByteFile, LocalFile, Opened
from worldsize.data.storage.cache import Cache
from worldsize.errors import WorldsizeError

_logger = logging.getLogger(__name__)
_TELLS = 5.0  # seconds between progress messages
Array = NDArray[Any]
Scan = Callable[[ByteFile], Iterator[Mapping[str, Array]]]


def open_index(kind: str, files: Sequence[ByteFile], cache: Cache, scan: Scan) -> Mapping[str, Array]:
    """Build or open the index of ``files``: memory-mapped arrays by name, in file order.

    Of the processes that share the cache, one builds the index while the others wait. The index is rebuilt if a file
    has changed or the stored index is damaged. Afterwards, the least recently used indices beyond the capacity of the
    cache are removed, except those in use.

    Args:
        kind: name, version and arguments of ``scan``; part of the cache key.
        files: the files to index.
        cache: the folder for the index, and its capacity.
        scan: yields the index of one file in parts, as arrays by name. The first array has one element per row; others
            may have a different length. The array ``file``, the file's index for each row, is added.

    Returns:
        The arrays by name; empty if there are no rows.
    """
    described = [[file.identity, file.size, file.stamp] for file in files]
    facts = {"kind": kind, "files": described}
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    folder = cache.create_folder("index") / key[:32]
    if (index := _load_index(folder, facts)) is not None:
        return index
    with _hold_lock(folder.with_suffix(".lock"), files):
        if (index := _load_index(folder, facts)) is not None:
            return index
        if folder.exists():
            _logger.warning("the index of %s in %s is damaged and will be rebuilt.", _format_files(files), folder)
        _build_index(folder, facts, files, scan)
        made = _load_index(folder, facts)
    if made is None:
        raise WorldsizeError(f"the index in {folder} was modified while it was being built. Try again.")
    make_room(folder.parent, cache.capacity)
    return made


@final
class Index(dict[str, Array]):
    """The arrays of an index, by name, protected from removal while this object exists."""

    def __init__(self, arrays: Mapping[str, Array], held: Opened) -> None:
        super().__init__(arrays)
        self._held = held


@contextmanager
def _hold_lock(lock: Path, files: Sequence[ByteFile]) -> Iterator[None]:
    """Hold the lock within the block; log a message if another process holds it for long."""
    held = FileLock(lock)
    try:
        held.acquire(timeout=_TELLS)
    except Timeout:
        _logger.info("waiting for another process to build the index of %s", _format_files(files))
        held.acquire()
    except OSError as error:
        raise WorldsizeError(
            f"failed to lock the index of {_format_files(files)} with {lock}: {error.strerror}. Set cache.folder to a "
            "different folder."
        ) from None
    try:
        yield
    finally:
        held.release()


def _format_files(files: Sequence[ByteFile]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def _build_index(folder: Path, facts: Mapping[str, Any], files: Sequence[ByteFile], scan: Scan) -> None:
    for stale in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(stale)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        arrays = _write_arrays(temporary, files, scan)
        digests = {name: LocalFile(temporary / name).compute_digest() for name in arrays}
        described = {**facts, "arrays": arrays, "digests": digests}
        (temporary / FACTS).write_text(json.dumps(described))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        raise WorldsizeError(
            f"failed to write the index of {_format_files(files)}: {error.strerror}. Free space in {folder.parent}, "
            "or set cache.folder to a different folder."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_arrays(folder: Path, files: Sequence[ByteFile], scan: Scan) -> dict[str, list[Any]]:
    """Write the index of all files, one file per array; return the arrays' dtypes and lengths."""
    opened: dict[str, Any] = {}
    arrays: dict[str, list[Any]] = {}
    told = time.monotonic()
    rows = 0
    with ExitStack() as closing:  # closes all files, even if the disk is full
        for number, file in enumerate(files):
            for part in scan(file):
                if (length := len(next(iter(part.values())))) == 0:
                    continue
                for name, array in {**part, "file": numpy.full(length, number, dtype=numpy.uint32)}.items():
                    if name not in opened:
                        opened[name] = closing.enter_context((folder / name).open("wb"))
                        arrays[name] = [array.dtype.str, 0]
                    opened[name].write(numpy.ascontiguousarray(array).data)
                    arrays[name][1] += len(array)
                rows += length
                if time.monotonic() - told > _TELLS:
                    told = time.monotonic()
                    done = f"file {number + 1} of {len(files)}, {rows:,} samples"
                    _logger.info("index of %s: %s", _format_files(files), done)
    return arrays


def _load_index(folder: Path, facts: Mapping[str, Any]) -> Mapping[str, Array] | None:
    """Memory-map an index; return None if it is missing, damaged, or does not match ``facts``."""
    if (held := pin_index(folder)) is None:
        return None
    try:
        described = json.loads((folder / FACTS).read_text())
        if {key: described[key] for key in facts} != facts:
            return None
        arrays = {}
        for name, (dtype, length) in described["arrays"].items():
            path = folder / name
            if LocalFile(path).compute_digest() != described["digests"][name]:
                return None
            mapped = numpy.memmap(path, dtype, "r", shape=(length,)) if length else numpy.empty(0, dtype)
            arrays[name] = mapped.view(numpy.ndarray)  # element access in a memmap is several times slower
        return Index(arrays, held)
    except (OSError, ValueError, KeyError, TypeError):
        return None


FACTS = "index.json"


def pin_index(folder: Path) -> Opened | None:
    """Mark an index as recently used, and protect it from removal while the result exists.

    Returns:
        The open file, or None if the index does not exist or is being removed.
    """
    try:
        opened = Opened(folder / FACTS)
        with suppress(OSError):
            os.utime(opened.descriptor)
        _acquire_lock(opened, fcntl.LOCK_SH)
        return opened if os.path.samestat(os.fstat(opened.descriptor), (folder / FACTS).stat()) else None
    except OSError:
        return None


def _acquire_lock(opened: Opened, kind: int) -> None:
    """Take a lock without waiting. On file systems without locks, shared ones always succeed.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: an exclusive lock is not supported by the file system.
    """
    try:
        fcntl.flock(opened.descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        if kind == fcntl.LOCK_EX:
            raise


def make_room(indices: Path, capacity: float) -> None:
    """Remove leftovers, and the least recently used indices beyond ``capacity`` bytes.

    Args:
        indices: the folder with one subfolder per index.
    """
    with FileLock(indices.with_suffix(".lock")):
        for left in indices.glob(".*"):
            with suppress(Timeout, OSError), FileLock(indices / f"{left.name.split('.')[1]}.lock", timeout=0):
                shutil.rmtree(left)
        entries = []
        for facts in indices.glob(f"*/{FACTS}"):
            with suppress(OSError):
                size = sum(each.stat().st_size for each in facts.parent.iterdir())
                entries.append((facts.stat().st_mtime_ns, size, facts.parent))
        taken = sum(size for _, size, _ in entries)
        for _, size, folder in sorted(entries):
            if taken <= capacity:
                return
            taken -= size if _try_remove_index(folder) else 0


def _try_remove_index(folder: Path) -> bool:
    """Remove an index unless a process uses it; return whether it was removed."""
    try:
        opened = Opened(folder / FACTS)
        _acquire_lock(opened, fcntl.LOCK_EX)
        aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        folder.rename(aside)  # so that other processes never see a partial index
        shutil.rmtree(aside)
    except OSError:
        return False
    return True
