"""Recipes on Hugging Face datasets train like a plain loop over torch's DataLoader on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from worldsize.core import Batch, ConfigError, Recipe, World
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import evaluation_batches, micro_batches
from worldsize.strategies.ddp import DDP
from worldsize.testing.port import PortConfig, same_losses

ROWS, BATCH, STEPS, WORDS = 50, 8, 20, 30  # 20 steps draw each sample three times
CONFIG = PortConfig(batch_size=BATCH, steps=STEPS)
Original = Callable[[nn.Module, Iterator[Batch]], Generator[Tensor, None, nn.Module]]


def points() -> datasets.Dataset:
    """Return samples of equal length, without padding."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 4, generator=generator)
    return datasets.Dataset.from_dict({"inputs": inputs.tolist(), "target": inputs.sin().sum(1).tolist()})


def sentences() -> datasets.Dataset:
    """Return samples of unequal length."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(1, WORDS, (2 + row % 7,), generator=generator) for row in range(ROWS)]
    return datasets.Dataset.from_dict({"words": [row.tolist() for row in rows], "row": list(range(ROWS))})


def padded(samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pad sentences given as lists of numbers or as tensors."""
    words = [torch.as_tensor(sample["words"]) for sample in samples]
    return {
        "words": nn.utils.rnn.pad_sequence(words, batch_first=True),
        "lengths": torch.tensor([float(len(row)) for row in words]),
    }


@dataclass(frozen=True)
class Points(Recipe):
    """A regression on dicts of tensors, batched by torch's own collate."""

    dataset: Any

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, split: str) -> Any:
        return self.dataset

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch["inputs"]).squeeze(1), batch["target"])

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
        errors = (model(batch["inputs"]).squeeze(1) - batch["target"]).square()
        return {"error": (errors.double().sum(), torch.tensor(len(errors)))}


@dataclass(frozen=True)
class Sentences(Recipe):
    """Return the length of a sentence, from its padding."""

    dataset: Any

    def model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode="sum", padding_idx=0), nn.Linear(8, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def data(self, split: str) -> Any:
        return self.dataset

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        return padded(samples)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch["words"]).squeeze(1), batch["lengths"])

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
        errors = (model(batch["words"]).squeeze(1) - batch["lengths"]).square()
        return {"error": (errors.double().sum(), torch.tensor(len(errors)))}


def lists_of(config: PortConfig) -> list[list[int]]:
    """Return the sample indices of each step, over all of its logical ranks."""
    order, ranks = config.order(), range(config.micro_batches)
    steps = range(1, config.steps + 1)
    return [
        torch.cat([order.compute_indices(step, rank, ROWS) for rank in ranks]).tolist() for step in steps
    ]  # as a plain loop's sampler yields them


def plain_loop(recipe: Recipe, batches: Callable[[], Iterable[Batch]]) -> Original:
    """Return a loop written without worldsize; it uses its own batches instead of those passed to it."""

    def original(model: nn.Module, _: Iterator[Batch]) -> Generator[Tensor, None, nn.Module]:
        optimizer = recipe.optimizer(model)
        for batch in batches():
            loss = recipe.loss(model, batch)
            assert isinstance(loss, Tensor)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield loss
        return model

    return original


RECIPES: dict[str, Points | Sentences] = {
    "torch": Points(points().with_format("torch")),
    "torch, padded": Sentences(sentences().with_format("torch")),
    "plain, padded": Sentences(sentences()),
    "chosen, padded": Sentences(sentences().remove_columns("row").shuffle(seed=3)),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_table_trains_as_under_a_data_loader_of_torch(recipe: Points | Sentences) -> None:
    def batches() -> Iterable[Batch]:
        return DataLoader(recipe.dataset, batch_sampler=lists_of(CONFIG), collate_fn=get_collate_fn(recipe))

    same_losses(recipe, plain_loop(recipe, batches), CONFIG)


def test_processes_train_a_table_as_one_plain_loop_does() -> None:
    recipe, config = Sentences(sentences()), PortConfig(batch_size=BATCH, steps=STEPS, micro_batches=2)

    def batches() -> Iterable[Batch]:
        return DataLoader(recipe.dataset, batch_sampler=lists_of(config), collate_fn=padded)

    same_losses(recipe, plain_loop(recipe, batches), config, strategy=DDP(), processes=2, tolerance=1e-5)


def test_data_workers_load_a_table() -> None:
    recipe = RECIPES["torch, padded"]

    def loaded(workers: int) -> list[Batch]:
        steps = micro_batches(
            recipe.dataset, CONFIG.order(), CONFIG.device, workers=workers, collate=get_collate_fn(recipe)
        )
        return [batch.data for step in islice(steps, 4) for batch in step]

    for here, there in zip(loaded(0), loaded(1), strict=True):
        assert {name: value.tolist() for name, value in here.items()} == {
            name: value.tolist() for name, value in there.items()
        }


def generated() -> Iterator[dict[str, Any]]:
    yield from sentences()


def files(folder: Path) -> str:
    """Write the sentences as three files."""
    rows = sentences()
    for number in range(3):
        rows.shard(3, number, contiguous=True).to_json(folder / f"{number}.jsonl")
    return str(folder / "*.jsonl")


STREAMS: dict[str, Callable[[Path], Any]] = {
    "of a table": lambda _: sentences().to_iterable_dataset(num_shards=3),
    "of a table, torch": lambda _: sentences().to_iterable_dataset(num_shards=3).with_format("torch"),
    "shuffled": lambda _: sentences().to_iterable_dataset().shuffle(seed=4, buffer_size=10),
    "generated": lambda _: datasets.IterableDataset.from_generator(generated),
    "of files": lambda folder: datasets.load_dataset("json", data_files=files(folder), split="train", streaming=True),
}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_a_stream_trains_as_under_a_data_loader_of_torch(make: Callable[[Path], Any], tmp_path: Path) -> None:
    stream = make(tmp_path)
    recipe = Sentences(stream)

    def batches() -> Iterable[Batch]:
        samples: Any = list(islice(chain.from_iterable(repeat(stream)), BATCH * STEPS))  # it restarts at its end
        return DataLoader(samples, batch_size=BATCH, collate_fn=padded)

    same_losses(recipe, plain_loop(recipe, batches), CONFIG)


@pytest.mark.parametrize("shards", [1, 2])
def test_processes_train_a_stream_as_one_plain_loop_does(shards: int) -> None:
    """A whole pass: torch's DataLoader takes its batches from the stream itself, or from its two halves."""
    steps = ROWS // BATCH
    recipe = Sentences(sentences().to_iterable_dataset(num_shards=shards))
    config = PortConfig(batch_size=BATCH, steps=steps, micro_batches=2)

    def batches() -> Iterable[Batch]:
        if shards == 1:
            return DataLoader(recipe.dataset, batch_size=BATCH, collate_fn=padded)
        halves = [DataLoader(recipe.dataset.shard(2, half), batch_size=BATCH // 2, collate_fn=list) for half in (0, 1)]
        return (padded(first + second) for first, second in zip(*halves, strict=True))

    same_losses(recipe, plain_loop(recipe, batches), config, strategy=DDP(), processes=2, tolerance=1e-5)


def test_a_stream_resumes_at_its_position() -> None:
    order, stream = CONFIG.order(), sentences().to_iterable_dataset(num_shards=3)

    def rows(first: int, count: int) -> list[list[list[int]]]:
        steps = micro_batches(stream, order, CONFIG.device, first=first, collate=padded)
        return [batch.data["words"].tolist() for step in islice(steps, count) for batch in step]

    assert rows(7, 3) == rows(0, 10)[7:]


@pytest.mark.parametrize("dataset", [sentences(), sentences().to_iterable_dataset()], ids=["table", "stream"])
@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_counts_every_row_once(dataset: Any, size: int) -> None:
    device = torch.device("cpu")
    counted = []
    for rank in range(size):
        world = World("worker", rank, size, rank, size, rank, 0, device)
        batches = evaluation_batches(dataset, world, batch_size=BATCH, collate=padded)
        counted += [length for each in batches if each.counted for length in each.data["lengths"].tolist()]
    assert sorted(counted) == sorted(float(len(words)) for words in sentences()["words"])


def test_a_stream_is_not_balanced_by_length() -> None:
    config = PortConfig(batch_size=BATCH, length_balanced=True)
    with pytest.raises(ConfigError, match="requires an indexable data set, but the data are a stream"):
        next(micro_batches(sentences().to_iterable_dataset(), config.order(), config.device, collate=padded))
