"""Compare our own code with libraries that could replace it; see docs/decisions.

uv run python benchmarks/libraries.py blocks|rows|memory
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import torch
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from worldsize.data.sources.arrow import Parquet
from worldsize.data.storage.cache import Cache, RemoteFile, RemoteSystem
from worldsize.plan.rehearsal.memory import MemoryRecorder

BLOCK = 1 << 20
BLOCKS = 64
READS, PIECE = 5_000, 4_096
ROWS, FILES, DRAWN = 200_000, 4, 64


def seconds(work: Callable[[], Any]) -> float:
    """Run ``work``, and return the CPU seconds used by this process."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


class _FarFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start=start, end=end)  # type: ignore[no-any-return]


class _Far(AbstractFileSystem):  # type: ignore[misc]
    """A fake remote file system for fsspec, which reads local files."""

    protocol = "far"
    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": Path(path).stat().st_size, "type": "file", "mtime": 1}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with Path(path).open("rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> _FarFile:
        return _FarFile(self, path, mode, block_size or BLOCK, cache_type="none")


def blocks(folder: Path) -> Iterator[str]:
    """Compare our cache of remote files with fsspec's ``blockcache``: blocks kept after a crash, small reads."""
    file = folder / "file"
    file.write_bytes(os.urandom(BLOCKS * BLOCK))

    def theirs() -> Any:
        return fsspec.filesystem(
            "blockcache", fs=_Far(), cache_storage=str(folder / "fsspec"), skip_instance_cache=True
        )

    def ours() -> RemoteFile:
        return RemoteFile(
            RemoteSystem(_Far()), str(file), _Far().info(str(file)), Cache(str(folder / "own"), 20e9, BLOCK)
        )

    def read_theirs(numbers: Sequence[int]) -> None:
        opened = theirs().open(str(file), block_size=BLOCK)
        for number in numbers:
            opened.seek(number * BLOCK)
            opened.read(PIECE)

    def read_ours(numbers: Sequence[int]) -> None:
        for number in numbers:
            ours().read(number * BLOCK, number * BLOCK + PIECE)

    for read in (read_theirs, read_ours):
        if not (child := os.fork()):
            read(range(10))
            os._exit(9)
        os.waitpid(child, 0)
    kept = theirs()
    kept.load_cache()
    entries = kept._metadata.cached_files[-1].values()
    yield f"kept of 10 blocks whose reader was killed, fsspec: {sum(len(each['blocks']) for each in entries)}"
    yield f"kept of 10 blocks whose reader was killed, ours: {len(list((folder / 'own').glob('blocks/*/*/*')))}"

    opened, own = theirs().open(str(file), block_size=BLOCK), ours()
    opened.read()
    own.read(0, own.size)
    places = [random.randrange(BLOCKS * BLOCK - PIECE) for _ in range(READS)]

    def through_theirs() -> None:
        for place in places:
            opened.seek(place)
            opened.read(PIECE)

    def through_ours() -> None:
        for place in places:
            own.read(place, place + PIECE)

    for name, work in (("fsspec", through_theirs), ("ours", through_ours)):
        yield f"a read of {PIECE} kept bytes, {name}: {seconds(work) / READS * 1e6:.0f} µs"


def rows(folder: Path) -> Iterator[str]:
    """Compare reads of random rows from Parquet files with ``pyarrow.dataset``."""
    draw = numpy.random.default_rng(0)
    for number in range(FILES):
        columns = {"x": draw.standard_normal(ROWS), "text": [os.urandom(32).hex() for _ in range(ROWS)]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{number}.parquet", row_group_size=10_000)
    theirs = pyarrow.dataset.dataset([str(folder / f"{number}.parquet") for number in range(FILES)])
    ours = Parquet(path=str(folder), cache=Cache(str(folder / "cache")))
    places = [random.randrange(len(ours)) for _ in range(DRAWN)]
    works: dict[str, Callable[[], Any]] = {
        "take of one": lambda: [theirs.take([place]) for place in places],
        f"take of {DRAWN}": lambda: theirs.take(places),
        "ours, nothing decoded": lambda: [ours[place] for place in places],
        "ours, row groups decoded": lambda: [ours[place] for place in places],
    }
    for name, work in works.items():
        yield f"a row of {len(ours):,}, {name}: {seconds(work) / DRAWN * 1e3:.2f} ms"
    if theirs.take(places).to_pylist() != [ours[place] for place in places]:
        raise ValueError("the rows differ")


def memory(_: Path) -> Iterator[str]:
    """Compare our measurement of the peak memory of two steps with torch's ``MemTracker``."""
    inputs, labels = torch.randn(128, 64), torch.randint(10, (128,))

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        hidden = nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 256), nn.GELU()
        model = nn.Sequential(*hidden, nn.Linear(256, 10))
        return model, torch.optim.Adam(model.parameters(), foreach=False)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    recorder = MemoryRecorder()
    with recorder.recording():
        pair = built()
        recorder.log.begin_training()
        for _step in range(2):
            step(*pair)
    ours = recorder.log.compute_training_peak()

    pair = built()
    tracker = MemTracker()
    tracker.track_external(*pair)
    with tracker:
        for _step in range(2):
            tracker.reset_mod_stats()  # otherwise it refuses a second call of the root module
            step(*pair)
    (theirs,) = tracker.get_tracker_snapshot("peak").values()
    yield f"MemTracker: { {getattr(part, 'value', part): nbytes for part, nbytes in theirs.items()} }"
    yield f"ours: {dict(ours.parts)}, {ours.nbytes} together"


COMPARISONS = {"blocks": blocks, "rows": rows, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparison", choices=COMPARISONS)
    comparison = COMPARISONS[parser.parse_args().comparison]
    with tempfile.TemporaryDirectory() as folder:
        for line in comparison(Path(folder)):
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
