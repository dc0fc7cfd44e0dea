"""Compare the speed of our loader and torch's DataLoader on the same data sets.

uv run python benchmarks/loader.py 7 0.5       # rounds, and seconds of each measurement
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from worldsize.data.loader import micro_batches
from worldsize.data.order import Order

BATCH, LENGTH, SAMPLES = 32, 512, 100_000
WORKERS = (0, 1, 2)


class Rows(Dataset[Tensor]):
    """Rows of a memory-mapped array of tokens, loaded one at a time."""

    def __init__(self, path: Path) -> None:
        self.rows = numpy.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Tensor:
        return torch.from_numpy(self.rows[index].astype(numpy.int64))


class WholeBatches(Rows):
    """Rows that are loaded as a whole batch at a time."""

    def load_batch(self, indices: Tensor) -> Tensor:
        return self[indices.numpy()]


class Decoded(Rows):
    """Rows that take about 0.3 ms of CPU time each, like decoding a small image."""

    def __getitem__(self, index: Any) -> Tensor:
        row = super().__getitem__(index)
        for _ in range(100):
            row = row.flip(0)
        return row


def ours(dataset: Rows, workers: int) -> Iterator[Any]:
    return micro_batches(dataset, Order(0, BATCH, 1, (0,)), torch.device("cpu"), workers=workers)


def torchs(dataset: Rows, workers: int) -> Iterator[Any]:
    """Return torch's loader; whole batches use a batch sampler, which is fastest."""
    if isinstance(dataset, WholeBatches):
        sampler = BatchSampler(RandomSampler(dataset), BATCH, drop_last=True)
        return iter(DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=workers))
    return iter(DataLoader(dataset, BATCH, shuffle=True, num_workers=workers))


LOADERS: dict[str, Callable[[Rows, int], Iterator[Any]]] = {"worldsize": ours, "torch": torchs}


def measured(which: str, kind: type[Rows], path: Path, workers: int, seconds: float) -> tuple[float, float]:
    """Return the seconds until the first batch, and the samples per second from then on."""
    begun = time.perf_counter()
    loader = LOADERS[which](kind(path), workers)
    next(loader)
    first, batches = time.perf_counter() - begun, 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds and next(loader, None) is not None:
        batches += 1
    return first, batches * BATCH / (time.perf_counter() - begun)


def processor_time(which: str, kind: type[Rows], path: Path, batches: int = 600) -> float:
    """Return the CPU microseconds per batch without workers."""
    loader = LOADERS[which](kind(path), 0)
    next(loader)
    begun = time.process_time()
    for _ in range(batches):
        next(loader)
    return 1e6 * (time.process_time() - begun) / batches


def row(kind: type[Rows], path: Path, workers: int, rounds: int, seconds: float) -> list[str]:
    """Return the table cells of one comparison: medians over rounds, and medians of ratios within rounds."""
    pairs = []
    for number in range(rounds):
        turns = list(LOADERS)[:: 1 if number % 2 else -1]
        pairs.append({which: measured(which, kind, path, workers, seconds) for which in turns})
    cells = []
    for place, text in ((1, "{:,.0f}"), (0, "{:.3f}")):
        middle = {which: statistics.median(pair[which][place] for pair in pairs) for which in LOADERS}
        ratio = statistics.median(pair["worldsize"][place] / pair["torch"][place] for pair in pairs)
        cells += [text.format(middle["torch"]), f"{text.format(middle['worldsize'])} ({ratio:.2f} ×)"]
    return cells


def main(rounds: int, seconds: float) -> None:
    table = Table("samples", "workers", "torch, samples/s", "worldsize", "first batch: torch, s", "worldsize")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.npy")
        numpy.save(path, numpy.random.default_rng(0).integers(0, 50_000, (SAMPLES, LENGTH), dtype=numpy.uint16))
        kinds = {"one at a time": Rows, "whole batches": WholeBatches, "decoded, one at a time": Decoded}
        for (name, kind), workers in product(kinds.items(), WORKERS):
            table.add_row(name, str(workers), *row(kind, path, workers, rounds, seconds))
        processor = Table("samples", "torch, µs of the processor a batch", "worldsize")
        for name, kind in kinds.items():
            least = {which: min(processor_time(which, kind, path) for _ in range(rounds)) for which in LOADERS}
            ratio = least["worldsize"] / least["torch"]
            processor.add_row(name, f"{least['torch']:.0f}", f"{least['worldsize']:.0f} ({ratio:.2f} ×)")
    Console(width=140).print(table, processor)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
