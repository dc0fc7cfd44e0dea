"""A batch of any type is moved to the device whole, or refused if that is impossible."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from tests.support.own_recipe import write_recipe
from worldsize.core import ConfigError, MicroBatch
from worldsize.data.batches import map_tensors, to_device
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.worker.throughput import _move_to_meta

META, CPU = torch.device("meta"), torch.device("cpu")
Pair = namedtuple("Pair", ["one", "other"])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "a"


class Returning:
    """Returns a different object, and does not accept non_blocking."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Returning:
        return Returning(self.x.to(device))


class InPlace(UserDict[str, Tensor]):
    """Changes itself in place, like BatchEncoding of transformers."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> None:
        self.data = {key: value.to(device, non_blocking=non_blocking) for key, value in self.data.items()}


class Lost:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of any of these batches."""
    found: list[Tensor] = []
    match batch:
        case Returning():
            yield batch.x
        case InPlace():
            yield from batch.data.values()
        case PackedSequence():
            yield batch.data
        case list() | tuple() | dict() | Tensor() | Frozen():
            map_tensors(batch, found.append, lambda own: found.extend(_tensors(own)))
            yield from found


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        [torch.ones(2), (torch.ones(1), "text", None, 3)],
        Pair(torch.ones(2), {"a": torch.ones(1)}),
        OrderedDict(a=torch.ones(2)),
        defaultdict(lambda: torch.ones(1), a=torch.ones(2)),
        Frozen(torch.ones(2)),
        {"own": Returning(torch.ones(2))},
        InPlace(a=torch.ones(2)),
        pack_sequence([torch.ones(2)]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_tensor_of_a_batch_reaches_the_device(batch: Any) -> None:
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    devices = {tensor.device for tensor in _tensors(moved)}
    assert devices == {META}
    assert to_device(batch, CPU) is batch


def test_counting_operations_leaves_a_batch_that_moves_itself_where_it_is() -> None:
    batch = InPlace(a=torch.ones(2))
    assert {tensor.device for tensor in _tensors(_move_to_meta(MicroBatch(batch, 0, 1)).data)} == {META}
    assert {tensor.device for tensor in _tensors(batch)} == {CPU}


def test_an_object_whose_tensors_would_stay_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot move a batch to the device: Lost contains a tensor, 'x'"):
        to_device([Lost(torch.ones(2))], META)


class Rows(TensorDataset):
    def load_batch(self, indices: Tensor) -> list[Any]:
        rows = self.tensors[0][indices]
        return [Frozen(rows), Returning(rows), pack_sequence([rows])]


def test_data_workers_load_batches_of_any_type() -> None:
    order = Order(0, 4, 2, (0, 1))
    here, there = (
        [
            batch
            for step in islice(micro_batches(Rows(torch.arange(8.0)), order, CPU, workers=workers), 2)
            for batch in step
        ]
        for workers in (0, 1)
    )
    for one, other in zip(here, there, strict=True):
        assert [each.tolist() for each in _tensors(one.data)] == [each.tolist() for each in _tensors(other.data)]
        assert type(other.data[0]) is Frozen


_LOADER = """
from torch.utils.data import DataLoader
from worldsize.testing.recipes import Chain

class Own(Chain):
    def data(self, split):
        return DataLoader(super().data(split), batch_size=16)
"""


def test_a_loader_of_batches_is_refused_with_the_remedy(train: Any, tmp_path: Path) -> None:
    text = "# @package _global_\n# own\nsteps: 2\nbatch_size: 4\nrecipe: {_target_: recipes.own.recipe.Own}\n"
    write_recipe(tmp_path, "own", _LOADER, own=text)
    run = train("recipe=own", "cluster.processes=1")
    assert run.code != 0
    assert "Recipe.data returned a batched DataLoader" in run.error
    assert "Return loader.dataset" in run.error
    assert not run.steps() if (run.folder and (run.folder / "metrics.jsonl").exists()) else True


def test_a_loader_of_single_samples_is_a_stream() -> None:
    stream = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=None)
    (batch,) = next(micro_batches(stream, Order(0, 4, 1, (0,)), CPU))
    assert batch.data[0].tolist() == [0.0, 1.0, 2.0, 3.0]
