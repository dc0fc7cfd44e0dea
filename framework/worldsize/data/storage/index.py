"""Indices of files, such as where each line begins: made once by one process, then memory-mapped by all.

The disk space of indices is bounded: those unused for longest are removed first, and none that a process uses.
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
_TELLS = 5.0  # seconds between two lines about progress
Array = NDArray[Any]
Scan = Callable[[ByteFile], Iterator[Mapping[str, Array]]]


def indexed(kind: str, files: Sequence[ByteFile], cache: Cache, scan: Scan) -> Mapping[str, Array]:
    """Return the index of ``files``: arrays by name, mapped from disk, with the rows of each file in turn.

    One process of those that share the cache makes it; the others wait. It is made anew if a file has changed, or if
    what is on disk is damaged. When one has been made, those unused for longest are removed until all take at most the
    capacity of the cache; none that is in use is.

    Args:
        kind: names what ``scan`` does, with a version: another one never reads this index.
        scan: yields the index of one file in parts, which are arrays by name. The first one has a number for each row;
            others may be longer or shorter. Which file a row is of is added as ``file``.

    Returns:
        No array at all if there is no row.
    """
    described = [[file.identity, file.size, file.stamp] for file in files]
    facts = {"kind": kind, "files": described}
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    folder = cache.made("index") / key[:32]
    if (index := _opened(folder, facts)) is not None:
        return index
    with _turn(folder.with_suffix(".lock"), files):
        if (index := _opened(folder, facts)) is not None:
            return index
        if folder.exists():
            _logger.warning("the index of %s in %s is damaged, and is made anew.", _named(files), folder)
        _make(folder, facts, files, scan)
        made = _opened(folder, facts)
    if made is None:
        raise WorldsizeError(f"the index in {folder} was changed while it was made. Start again.")
    make_room(folder.parent, cache.capacity)
    return made


@final
class Index(dict[str, Array]):
    """The arrays of an index by name, which no process removes while this lives."""

    def __init__(self, arrays: Mapping[str, Array], held: Opened) -> None:
        super().__init__(arrays)
        self._held = held


@contextmanager
def _turn(lock: Path, files: Sequence[ByteFile]) -> Iterator[None]:
    """Hold the lock within the block, and say for whom one waits if it takes long."""
    held = FileLock(lock)
    try:
        held.acquire(timeout=_TELLS)
    except Timeout:
        _logger.info("waiting for another process that makes the index of %s", _named(files))
        held.acquire()
    except OSError as error:
        raise WorldsizeError(
            f"the index of {_named(files)} cannot be written: {lock}: {error.strerror}. Set cache.folder of the "
            "data to another."
        ) from None
    try:
        yield
    finally:
        held.release()


def _named(files: Sequence[ByteFile]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def _make(folder: Path, facts: Mapping[str, Any], files: Sequence[ByteFile], scan: Scan) -> None:
    for stale in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(stale)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        arrays = _written(temporary, files, scan)
        digests = {name: LocalFile(temporary / name).digest() for name in arrays}
        described = {**facts, "arrays": arrays, "digests": digests}
        (temporary / FACTS).write_text(json.dumps(described))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        raise WorldsizeError(
            f"the index of {_named(files)} cannot be written: {error.strerror}. Make room in {folder.parent}, or set "
            "cache.folder of the data to another."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _written(folder: Path, files: Sequence[ByteFile], scan: Scan) -> dict[str, list[Any]]:
    """Append each part to a file for each array; return the arrays' types and lengths."""
    opened: dict[str, Any] = {}
    arrays: dict[str, list[Any]] = {}
    told = time.monotonic()
    rows = 0
    with ExitStack() as closing:  # each, even if another has no room for its last bytes
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
                    _logger.info("index of %s: %s", _named(files), done)
    return arrays


def _opened(folder: Path, facts: Mapping[str, Any]) -> Mapping[str, Array] | None:
    """Map an index that is whole and of these files; None: there is none."""
    if (held := in_use(folder)) is None:
        return None
    try:
        described = json.loads((folder / FACTS).read_text())
        if {key: described[key] for key in facts} != facts:
            return None
        arrays = {}
        for name, (dtype, length) in described["arrays"].items():
            path = folder / name
            if LocalFile(path).digest() != described["digests"][name]:
                return None
            mapped = numpy.memmap(path, dtype, "r", shape=(length,)) if length else numpy.empty(0, dtype)
            arrays[name] = mapped.view(numpy.ndarray)  # a memmap's own access to an item takes several times as long
        return Index(arrays, held)
    except (OSError, ValueError, KeyError, TypeError):
        return None


FACTS = "index.json"


def in_use(folder: Path) -> Opened | None:
    """Mark an index as used just now, and keep all processes from removing it while what is returned lives.

    Returns:
        None if there is no such index, or if it is being removed.
    """
    try:
        opened = Opened(folder / FACTS)
        with suppress(OSError):
            os.utime(opened.descriptor)
        _lock(opened, fcntl.LOCK_SH)
        return opened if os.path.samestat(os.fstat(opened.descriptor), (folder / FACTS).stat()) else None
    except OSError:
        return None


def _lock(opened: Opened, kind: int) -> None:
    """Take a lock at once; on a file system without locks nothing is removed, so that one needs none there.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(opened.descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        if kind == fcntl.LOCK_EX:
            raise


def make_room(indices: Path, capacity: float) -> None:
    """Remove the indices unused for longest until all take at most ``capacity`` bytes, and what killed processes left.

    Args:
        indices: the folder that has a folder of each.
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
            taken -= size if _removed(folder) else 0


def _removed(folder: Path) -> bool:
    """Remove an index unless a process uses it; say whether it is gone."""
    try:
        opened = Opened(folder / FACTS)
        _lock(opened, fcntl.LOCK_EX)
        aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        folder.rename(aside)  # so that nobody finds a part of it
        shutil.rmtree(aside)
    except OSError:
        return False
    return True
