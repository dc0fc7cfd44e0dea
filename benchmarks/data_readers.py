"""Read the same samples with each library's loader, from the start or a saved state, and record their order.

``data_resume.py`` runs it with a Python that has the libraries, in one process per rank. A sample is a number and 16
tokens, a step has 48 samples over all ranks, and each library shuffles the samples itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch

STEP = 48  # samples
LENGTH = 16  # tokens per sample
SHARDS = 12
PART = 1000  # samples per input of litdata
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Batches = Iterator[list[int]]
State = Callable[[], Any]


def tokens_of(number: int) -> Any:
    """Return the tokens of a sample, int32 (length,). The first one identifies the sample."""
    return numpy.arange(number * LENGTH, (number + 1) * LENGTH, dtype=numpy.int32)


def rows(numbers: range) -> Iterator[dict[str, Any]]:
    """Yield samples in the form that litdata and MosaicML streaming write."""
    for number in numbers:
        yield {"id": number, "tokens": tokens_of(number).tobytes()}


def write_tokens(folder: Path, count: int) -> None:
    """Write all tokens to one file, as read by worldsize and by the hand-written data set."""
    numpy.save(folder / "tokens.npy", numpy.arange(count * LENGTH + 1, dtype=numpy.int32))


def write_mosaic(folder: Path, count: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"id": "int", "tokens": "bytes"}) as writer:
        for sample in rows(range(count)):
            writer.write(sample)


def write_litdata(folder: Path, count: int) -> None:
    import litdata

    parts = [range(first, min(first + PART, count)) for first in range(0, count, PART)]
    litdata.optimize(fn=rows, inputs=parts, output_dir=str(folder), chunk_bytes="64MB", num_workers=1)


def write_datasets(folder: Path, count: int) -> None:
    import datasets

    tokens = numpy.arange(count * LENGTH, dtype=numpy.int32).reshape(count, LENGTH)
    datasets.Dataset.from_dict({"id": numpy.arange(count), "tokens": tokens}).save_to_disk(str(folder))


def read_worldsize(folder: Path, state: Any) -> tuple[Batches, State]:
    """Read like a training run on this rank; the state is just the step number."""
    from worldsize.data.loader import micro_batches
    from worldsize.data.order import Order, assign_logical_ranks
    from worldsize.data.sources.tokens import TokenWindows

    mine = assign_logical_ranks(RANK, WORLD, SHARDS)
    source = TokenWindows(str(folder), length=LENGTH)
    order = Order(seed=7, batch_size=STEP, logical_ranks=SHARDS, mine=mine)
    done, last = state or 0, len(source) // STEP

    def batches() -> Batches:
        nonlocal done
        for step in islice(micro_batches(source, order, torch.device("cpu"), first=done), last - done):
            done += 1
            yield [int(number) // LENGTH for part in step for number in part.data[:, 0]]

    return batches(), lambda: done


class _Rows(torch.utils.data.Dataset[int]):
    """A hand-written data set over the file that worldsize reads."""

    def __init__(self, folder: Path) -> None:
        self._tokens = numpy.load(folder / "tokens.npy", mmap_mode="r")

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> int:
        return int(self._tokens[index * LENGTH : (index + 1) * LENGTH][0]) // LENGTH


def read_torchdata(folder: Path, state: Any) -> tuple[Batches, State]:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rows = _Rows(folder)
    sampler = StatefulDistributedSampler(rows, num_replicas=WORLD, rank=RANK, seed=7)
    loader = StatefulDataLoader(rows, batch_size=STEP // WORLD, sampler=sampler)
    if state is not None:
        loader.load_state_dict(state)
    return (batch.tolist() for batch in loader), loader.state_dict


def read_mosaic(folder: Path, state: Any) -> tuple[Batches, State]:
    from streaming import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=7, batch_size=STEP // WORLD)
    loader = StreamingDataLoader(data, batch_size=STEP // WORLD)
    if state is not None:
        loader.load_state_dict(state)
    return (batch["id"].tolist() for batch in loader), loader.state_dict


def read_litdata(folder: Path, state: Any) -> tuple[Batches, State]:
    import litdata

    data = litdata.StreamingDataset(str(folder), shuffle=True, seed=7, drop_last=True)  # the default if WORLD > 1
    loader = litdata.StreamingDataLoader(data, batch_size=STEP // WORLD)
    if state is not None:
        loader.load_state_dict(state)
    return (batch["id"].tolist() for batch in loader), loader.state_dict


def read_datasets(folder: Path, state: Any) -> tuple[Batches, State]:
    """Read a stream with shuffled shards only; a shuffle buffer would lose samples at each resume."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    stream = datasets.load_from_disk(str(folder)).to_iterable_dataset(num_shards=SHARDS).shuffle(7, buffer_size=1)
    stream = split_dataset_by_node(stream, RANK, WORLD)
    if state is not None:
        stream.load_state_dict(state)
    samples = iter(stream)

    def batches() -> Batches:
        while batch := [sample["id"] for sample in islice(samples, STEP // WORLD)]:
            yield batch

    return batches(), stream.state_dict


@dataclass(frozen=True)
class Peer:
    """A library to compare.

    Attributes:
        modules: Modules to import before the measurement.
        write: Writes the given number of samples to a folder.
        read: Returns an iterator over the remaining steps of an epoch, given a state, and a function for the state.
    """

    modules: tuple[str, ...]
    write: Callable[[Path, int], None]
    read: Callable[[Path, Any], tuple[Batches, State]]


PEERS = {
    "worldsize": Peer(("worldsize.data.loader", "worldsize.data.sources.tokens"), write_tokens, read_worldsize),
    "torchdata": Peer(("torchdata.stateful_dataloader.sampler",), write_tokens, read_torchdata),
    "MosaicML streaming": Peer(("streaming",), write_mosaic, read_mosaic),
    "litdata": Peer(("litdata",), write_litdata, read_litdata),
    "datasets": Peer(("datasets.distributed",), write_datasets, read_datasets),
}


def has(name: str) -> bool:
    """Return whether the library ``name`` is installed in this Python."""
    return importlib.util.find_spec(PEERS[name].modules[0].split(".")[0]) is not None


def megabytes(key: str) -> float:
    """Return the memory of this process in MiB: ``VmRSS``, or ``VmHWM`` for the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def read(name: str, folder: Path, out: Path, *, states: Path | None, steps: int | None) -> None:
    """Read ``steps`` steps, or the rest of the epoch, and write the samples, the measurements and the state.

    Args:
        name: The library.
        folder: Folder of its samples.
        out: Folder to write to, one file per rank.
        states: Folder of the states to resume from; a rank without a state takes a different rank's.
        steps: Number of steps. None for the rest of the epoch, without saving a state.
    """
    peer = PEERS[name]
    for module in peer.modules:
        importlib.import_module(module)
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
    state = None
    if states is not None:
        saved = sorted(states.glob("*.state"))
        state = pickle.loads(saved[RANK % len(saved)].read_bytes())  # trusted: written by this program
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, begun = megabytes("VmRSS"), time.perf_counter()
    batches, state_now = peer.read(folder, state)
    samples = next(batches, [])
    figures = {"seconds": time.perf_counter() - begun, "megabytes": megabytes("VmHWM") - before}
    for batch in islice(batches, None if steps is None else steps - 1):
        samples += batch
    (out / f"{RANK}.json").write_text(json.dumps({**figures, "samples": samples}))
    if steps is not None:
        (out / f"{RANK}.state").write_bytes(pickle.dumps(state_now()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("has", "write", "read"))
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--count", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--states", type=Path)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    if given.action == "has":
        sys.exit(not has(given.name))
    if given.action == "write":
        PEERS[given.name].write(given.folder, given.count)
    else:
        read(given.name, given.folder, given.out, states=given.states, steps=given.steps)


if __name__ == "__main__":
    main()
