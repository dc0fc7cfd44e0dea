"""Read the same samples by each library's own loader, from the start or where a state says, and say which they were.

It is run by a Python that has the libraries, and one process for each rank: see ``data_resume.py``. A sample is a
number and 16 tokens, a step has 48 samples over all ranks, and all are shuffled by the library itself.
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
LENGTH = 16  # tokens of a sample
SHARDS = 12
PART = 1000  # samples that litdata is given at once
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Batches = Iterator[list[int]]
State = Callable[[], Any]


def tokens_of(number: int) -> Any:
    """Return the tokens of a sample, int32 [length], of which the first says which sample it is."""
    return numpy.arange(number * LENGTH, (number + 1) * LENGTH, dtype=numpy.int32)


def rows(numbers: range) -> Iterator[dict[str, Any]]:
    """Yield samples as litdata and MosaicML streaming write them."""
    for number in numbers:
        yield {"id": number, "tokens": tokens_of(number).tobytes()}


def write_tokens(folder: Path, count: int) -> None:
    """Write what worldsize and a hand-written data set read: all tokens in one file."""
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
    """Read as a run of this rank does; its state is the number of the step alone."""
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
    """A data set as one writes it by hand, over the file that worldsize reads."""

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

    data = litdata.StreamingDataset(str(folder), shuffle=True, seed=7, drop_last=True)  # as it sets where P > 1
    loader = litdata.StreamingDataLoader(data, batch_size=STEP // WORLD)
    if state is not None:
        loader.load_state_dict(state)
    return (batch["id"].tolist() for batch in loader), loader.state_dict


def read_datasets(folder: Path, state: Any) -> tuple[Batches, State]:
    """Read a stream whose shards alone are shuffled: samples in a buffer would be lost at each resume."""
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
    """A library.

    Attributes:
        modules: What is imported before the time begins.
        write: Writes so many samples into a folder.
        read: Returns what reads them, in the steps of an epoch that are left after a state, and what says the state.
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
    """Tell whether this Python has a library."""
    return importlib.util.find_spec(PEERS[name].modules[0].split(".")[0]) is not None


def megabytes(key: str) -> float:
    """Return what the kernel says of this process's memory: ``VmRSS``, or its peak, ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def read(name: str, folder: Path, out: Path, *, states: Path | None, steps: int | None) -> None:
    """Read so many steps, or all that are left of the epoch, and write down the samples, the state and the figures.

    Args:
        name: The library.
        folder: Its samples.
        out: Folder of what is written, in a file for each rank.
        states: Folder of the states at which to go on; a rank that had none takes that of another.
        steps: How many.
    """
    peer = PEERS[name]
    for module in peer.modules:
        importlib.import_module(module)
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
    state = None
    if states is not None:
        saved = sorted(states.glob("*.state"))
        state = pickle.loads(saved[RANK % len(saved)].read_bytes())  # this program wrote it
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
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
