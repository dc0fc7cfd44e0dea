"""A step's samples depend only on the step and the logical rank, not on the reader or the resume point."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.foreign import DIVIDED, SAMPLES, STATEFUL, WHOLE, Plain, Sharded, loader, row, table
from tests.support.loggers import keep_loggers
from tests.support.own_recipe import write_recipe
from worldsize.checkpoint.format import Checkpoint, Retention, read_checkpoint
from worldsize.checkpoint.save import Saver
from worldsize.core import ConfigError, ShardedStream, StatefulStream, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.data.streams import TrainingStream

CPU = torch.device("cpu")
RANKS, BATCH = 12, 24
STEPS = SAMPLES // BATCH  # of an epoch
Seen = dict[tuple[int, int], list[int]]  # the samples of each step and logical rank


def order(rank: int = 0, size: int = 1, logical_ranks: int = RANKS) -> Order:
    return Order(1, BATCH, logical_ranks, assign_logical_ranks(rank, size, logical_ranks))


def rows(samples: list[Any]) -> list[int]:
    return [row(sample) for sample in samples]


class Reader:
    """A process that reads a stream for its logical ranks."""

    def __init__(self, make: Callable[[], Any], mine: Order, checkpoint: Checkpoint | None, workers: int) -> None:
        torch.manual_seed(0)  # as in training, before the recipe's data are requested
        self.stream, self.mine = TrainingStream(make(), checkpoint=checkpoint, speaks=mine.mine[0] == 0), mine
        first = checkpoint.step if checkpoint else 0
        steps = micro_batches(self.stream, mine, CPU, first=first, workers=workers, collate=rows)
        self.steps = zip(count(first + 1), steps, strict=False)

    def take(self, steps: int) -> Seen:
        return {
            (step, rank): batch.data
            for step, batches in islice(self.steps, steps)
            for rank, batch in zip(self.mine.mine, batches, strict=True)
        }


def saved(root: Path, step: int, states: Mapping[str, Tensor]) -> Checkpoint:
    saver = Saver(root, World("worker", 0, 1, 0, 1, 0, 0, CPU), None, keep=Retention())
    saver.save({"model": {"w": torch.zeros(2)}}, step=step, facts={}, streams=states)
    (done,) = saver.finish()
    saver.close()
    return read_checkpoint(done.path)


def resumed(
    make: Callable[[], Any], root: Path, sizes: Sequence[int], lengths: Sequence[int], *, workers: int = 0
) -> Seen:
    """Return the samples seen by ``sizes`` processes in ``lengths`` steps; each process reads two steps ahead."""
    seen: Seen = {}
    checkpoint, step = None, 0
    for size, length in zip(sizes, lengths, strict=True):
        readers = [Reader(make, order(rank, size), checkpoint, workers) for rank in range(size)]
        step += length
        states: dict[str, Tensor] = {}
        for reader in readers:
            seen |= reader.take(length)
            states |= reader.stream.collect_states(step)
            reader.take(2)
        checkpoint = saved(root, step, states)
    return seen


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_steps_are_the_same_over_resumes_at_other_numbers_of_processes(
    make: Callable[[], Any], workers: int, tmp_path: Path
) -> None:
    """Resume in the middle of an epoch, at its end, and right after it."""
    if workers and getattr(make(), "num_workers", 0):
        pytest.skip("it has processes of its own, and a process that reads ahead may start none")
    alone = Reader(make, order(), None, 0).take(2 * STEPS + 3)
    for epoch in range(2):
        steps = range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1)
        assert Counter(each for (step, _), part in alone.items() if step in steps for each in part) == Counter(
            range(SAMPLES)
        )
    assert resumed(make, tmp_path, (1, 4, 2, 3), (2, 2, 1, 2 * STEPS - 2), workers=workers) == alone


def test_the_workers_of_a_loader_are_refused_below_a_process_that_reads_ahead() -> None:
    with pytest.raises(ConfigError, match=r"num_workers=2 of the StatefulDataLoader: .* Set data_workers=0"):
        next(micro_batches(loader(num_workers=2), order(), CPU, workers=1, collate=rows))


@pytest.mark.parametrize("make", DIVIDED.values(), ids=DIVIDED)
def test_a_process_asks_a_divided_stream_only_for_its_own_parts(make: Callable[[], Any]) -> None:
    """The parts of all logical ranks are disjoint, and only their own process reads and saves them."""
    parts = [Reader(make, order(rank, 4), None, 0) for rank in range(4)]
    seen = [part.take(STEPS) for part in parts]
    assert Counter(each for part in seen for rows_ in part.values() for each in rows_) == Counter(range(SAMPLES))
    names = [set(part.stream.collect_states(STEPS)) for part in parts]
    assert names == [{f"streams/{rank}" for rank in (first, first + 4, first + 8)} for first in range(4)]


def test_a_resume_reads_no_sample_again_where_there_is_a_state(tmp_path: Path) -> None:
    stream = Sharded()
    reader = Reader(lambda: stream, order(0, 3), None, 0)
    reader.take(3)
    assert stream.read == [3 * BATCH // 3]  # a third of the samples, as a third of the logical ranks
    checkpoint = saved(tmp_path, 3, {**reader.stream.collect_states(3), **rest(3, (1, 2))})
    stream = Sharded()
    Reader(lambda: stream, order(0, 12), checkpoint, 0).take(1)
    assert stream.read == [BATCH // 12]


def rest(step: int, ranks: Sequence[int]) -> dict[str, Tensor]:
    """Return the other two processes' states at the end of ``step``."""
    readers = [Reader(Sharded, order(rank, 3), None, 0) for rank in ranks]
    return {
        name: state for each in readers if each.take(step) for name, state in each.stream.collect_states(step).items()
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_what_has_no_state_is_read_again_and_says_at_the_start_what_that_costs(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], logged: None
) -> None:
    alone = Reader(Plain, order(), None, 0)
    assert resumed(Plain, tmp_path, (1, 4, 2), (3, 1, 3), workers=workers) == alone.take(7)
    said = capfd.readouterr().err
    assert "does not define state_dict and load_state_dict" in said
    assert f"from the start, {BATCH} samples per step" in said
    assert "re-reading the training stream: 72 samples up to step 3" in said
    assert not alone.stream.collect_states(7)


def test_the_stream_of_the_documentation_resumes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "data.md").read_text()
    (code,) = re.findall(r"^```python\n(class Shards:.*?)^```", page, re.M | re.S)
    space: dict[str, Any] = {}
    exec(code, space)
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text("".join(f"{8 * number + line}\n" for line in range(8)))
    files = [tmp_path / f"{number}.txt" for number in range(12)]

    def make() -> Any:
        return space["Shards"](files)

    assert isinstance(make(), ShardedStream)
    assert isinstance(make(), StatefulStream)
    alone = Reader(make, order(), None, 0).take(10)
    assert resumed(make, tmp_path / "root", (1, 4, 2), (4, 3, 3)) == alone
    assert Counter(each for (step, _), part in alone.items() if step <= STEPS for each in part) == Counter(range(96))


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log to standard error, also in forked processes."""
    from worldsize.messages import show_messages

    keep_loggers(monkeypatch)
    show_messages()


@pytest.mark.parametrize(
    ("make", "size", "messages"),
    [
        (Plain, 1, ["the training stream (Plain) does not define state_dict"]),
        (
            Plain,
            2,
            ["(Plain) does not define", "the whole training stream (Plain) and uses only its part. Define num_shards"],
        ),
        (lambda: table(shards=5), 2, ["It has 5 shards. Use a multiple of 12"]),
        (lambda: table(shards=5), 1, []),
        (
            lambda: table(shards=16),
            1,
            ["the 16 shards of the training stream (IterableDataset) are not divisible by 12"],
        ),
        (lambda: table(shards=24), 3, []),
        (Sharded, 4, []),
        (loader, 2, ["reads the whole training stream (StatefulDataLoader) and uses only its part"]),
    ],
)
def test_one_process_says_once_what_reading_costs(
    make: Callable[[], Any], size: int, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "worldsize"):
        for rank in range(size):
            Reader(make, order(rank, size), None, 0).take(3)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("worldsize")]
    assert len(said) == len(messages)
    for message, line in zip(messages, said, strict=True):
        assert message in line


def test_a_long_skip_shows_how_far_it_is(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, 6.0)  # seconds
    monkeypatch.setattr("worldsize.data.streams.monotonic", lambda: next(clock))
    stream = TrainingStream(Plain(), speaks=True)
    with caplog.at_level(logging.INFO, "worldsize"):
        next(micro_batches(stream, order(), CPU, first=6, collate=rows))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("re-read ")]
    assert said[0].startswith("re-read 48 of 144 samples")


def test_a_shorter_part_begins_again_before_the_others_end() -> None:
    """Five samples in two parts: logical rank 0 has three of them, and rank 1 two."""
    stream = Sharded(range(5))
    mine = Order(0, 2, 2, (0, 1))
    steps = islice(micro_batches(stream, mine, CPU, collate=rows), 6)
    first, second = zip(*([batch.data[0] for batch in step] for step in steps), strict=True)
    assert (first, second) == ((0, 2, 4, 0, 2, 4), (1, 3, 1, 3, 1, 3))


_UNEVEN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worldsize.core import Recipe

class Shards:
    def __init__(self, lengths): self.lengths, self.num_shards = lengths, len(lengths)
    def shard(self, num_shards, index): return Shards(self.lengths[index::num_shards])
    def __iter__(self): return (torch.zeros(1) for length in self.lengths for _ in range(length))
    def state_dict(self): return {}
    def load_state_dict(self, state): ...

class Own(Recipe):
    def __init__(self, lengths): self.lengths = lengths
    def model(self): return nn.Linear(1, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def data(self, split): return Shards(self.lengths) if split == "train" else TensorDataset(torch.zeros(2, 1))
    def loss(self, model, batch): return model(batch).square().mean()
    def evaluate(self, model, batch): return {"error": (model(batch[0]).sum(), torch.tensor(2))}
"""


def test_shards_of_uneven_lengths_are_warned_of_once(train: Any, tmp_path: Path) -> None:
    recipe = "recipe: {_target_: recipes.own.recipe.Own, lengths: []}"
    text = f"# @package _global_\n# own\nsteps: 8\nbatch_size: 4\n{recipe}\n"
    write_recipe(tmp_path, "own", _UNEVEN, own=text)
    words = ("recipe=own", "cluster.processes=2", "cluster.threads=1", "log_every=1", "checkpoint=none")
    uneven, even = (train(*words, f"recipe.lengths={lengths}") for lengths in ("[10,2]", "[10,10]"))
    assert uneven.code == even.code == 0, uneven.error + even.error
    warning = "are uneven: at step 2, one logical rank is in pass 2 over its shards and another in pass 1"
    assert (uneven.output + uneven.error).count(warning) == (uneven.output + uneven.error).count("are uneven") == 1
    assert "are uneven" not in even.output + even.error


@pytest.mark.parametrize(("make", "logical_ranks"), [(Sharded, 6), (Sharded, 1), (lambda: table(shards=3), 12)])
def test_states_of_other_readers_are_refused_and_can_be_left_out(
    make: Callable[[], Any], logical_ranks: int, tmp_path: Path
) -> None:
    reader = Reader(Sharded, order(), None, 0)
    reader.take(3)
    checkpoint = saved(tmp_path, 3, reader.stream.collect_states(3))
    changed = order(logical_ranks=logical_ranks)
    with pytest.raises(ConfigError, match=r"12 reader\(s\) of the training stream.*--ignore streams"):
        Reader(make, changed, checkpoint, 0).take(1)
    stream = TrainingStream(make())
    batches = next(micro_batches(stream, changed, CPU, first=3, collate=rows))
    assert len(batches) == logical_ranks


def test_a_stream_that_was_read_whole_may_have_other_logical_ranks(tmp_path: Path) -> None:
    """Steps have the same samples, split differently."""
    reader = Reader(loader, order(logical_ranks=12), None, 0)
    reader.take(2)
    checkpoint = saved(tmp_path, 2, reader.stream.collect_states(2))
    seen = Reader(loader, order(logical_ranks=2), checkpoint, 0).take(1)
    assert [each for rank in range(2) for each in seen[3, rank]] == list(range(48, 72))


class Unsavable(Plain):
    def state_dict(self) -> Any:
        return {"files": [{"open": re.compile("x")}]}

    def load_state_dict(self, state: Any) -> None: ...


class Refusing(Sharded):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError("worker_3")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_saved_is_an_error_in_the_first_step(workers: int) -> None:
    message = (
        r"^the training stream's state cannot be saved: state\['state'\]\['files'\]\[0\]\['open'\] is a re.Pattern"
    )
    with pytest.raises(ConfigError, match=message):
        Reader(Unsavable, order(), None, workers).take(1)


def test_a_state_that_the_library_refuses_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    reader = Reader(Sharded, order(), None, 0)
    reader.take(1)
    checkpoint = saved(tmp_path, 1, reader.stream.collect_states(1))
    with pytest.raises(ConfigError, match=r"failed to load its state .*KeyError: 'worker_3'.*--ignore streams"):
        Reader(Refusing, order(), checkpoint, 0).take(1)


def test_a_stream_that_cannot_begin_again_says_so() -> None:
    with pytest.raises(ConfigError, match="cannot be restarted"):
        Reader(lambda: (each for each in range(30)), order(), None, 0).take(2)


def test_a_state_that_was_not_kept_is_an_error_and_not_another_one() -> None:
    reader = Reader(Sharded, order(), None, 0)
    reader.take(2)
    with pytest.raises(RuntimeError, match="at step 1 is no longer available"):
        reader.stream.collect_states(1)


def test_the_protocols_are_what_libraries_have() -> None:
    assert isinstance(table(), ShardedStream)
    assert isinstance(table(), StatefulStream)
    assert isinstance(loader(), StatefulStream)
    assert not isinstance(loader(), ShardedStream)
    assert all(isinstance(make(), ShardedStream) for make in DIVIDED.values())
    assert not any(isinstance(WHOLE[name](), ShardedStream) for name in WHOLE if not name.startswith("datasets"))
