"""Streams of the libraries whose states checkpoints can hold, each over the samples 0 to SAMPLES - 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import grain
from torch.utils.data import IterableDataset, RandomSampler
from torchdata.nodes import IterableWrapper, Loader, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES, SHARDS = 96, 24


def table(shards: int = SHARDS) -> Any:
    return datasets.Dataset.from_dict({"row": list(range(SAMPLES))}).to_iterable_dataset(num_shards=shards)


def row(sample: Any) -> int:
    return int(sample["row"] if isinstance(sample, dict) else sample)


def loader(**options: Any) -> Any:
    return StatefulDataLoader(range(SAMPLES), batch_size=None, **options)


def nodes(root: Any) -> Any:
    """Return a loader that ends: one that restarts itself has a stale state if resumed at the end of an epoch."""
    return Loader(root, restart_on_stop_iteration=False)


def grain_loader() -> Any:
    """Return a loader whose states are bytes."""
    whole = grain.sharding.NoSharding()
    sampler = grain.samplers.IndexSampler(SAMPLES, shard_options=whole, shuffle=True, num_epochs=1, seed=2)
    return grain.DataLoader(data_source=list(range(SAMPLES)), sampler=sampler)


class Plain(IterableDataset[int]):
    """A stateless stream that counts the samples read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(SAMPLES):
            self.read += 1
            yield number


class Sharded:
    """A divisible stream with a state of a few kilobytes and keys that JSON does not support."""

    num_shards = 12

    def __init__(self, rows: range = range(SAMPLES)) -> None:
        self.rows, self.done, self.read = rows, 0, [0]

    def shard(self, num_shards: int, index: int) -> Sharded:
        part = type(self)(self.rows[index::num_shards])
        part.read = self.read  # one count for all parts
        return part

    def __iter__(self) -> Iterator[int]:
        while self.done < len(self.rows):
            self.done += 1
            self.read[0] += 1
            yield self.rows[self.done - 1]

    def state_dict(self) -> Any:
        return {"done": self.done, ("rows", 1): bytes(range(256)) * 32, 7: {1.5, None}}

    def load_state_dict(self, state: Any) -> None:
        assert state[("rows", 1)] == bytes(range(256)) * 32
        assert state[7] == {1.5, None}
        self.done = state["done"]


DIVIDED: dict[str, Callable[[], Any]] = {
    "datasets": table,
    "datasets, mapped": lambda: table().map(lambda sample: {"row": sample["row"]}).with_format("torch"),
    "datasets, shuffled": lambda: table().shuffle(seed=3, buffer_size=1),
    "of one's own": Sharded,
}
WHOLE: dict[str, Callable[[], Any]] = {
    "datasets, few shards": lambda: table(shards=3),
    "torchdata": loader,
    "torchdata, shuffled": lambda: loader(shuffle=True),
    "torchdata, workers": lambda: loader(num_workers=1, shuffle=True, snapshot_every_n_steps=7),
    "torchdata, nodes": lambda: Loader(IterableWrapper(range(SAMPLES)), restart_on_stop_iteration=False),
    "torchdata, shuffled nodes": lambda: Loader(
        SamplerWrapper(RandomSampler(range(SAMPLES))), restart_on_stop_iteration=False
    ),
    "grain": lambda: grain.MapDataset.range(SAMPLES).seed(5).shuffle().to_iter_dataset(),
    "grain, loader": grain_loader,
    "grain, filtered": lambda: grain.MapDataset.range(SAMPLES).to_iter_dataset().filter(lambda each: each >= 0),
}
STATEFUL = {**DIVIDED, **WHOLE}
