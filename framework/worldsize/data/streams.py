"""Training streams: data that can only be iterated over, without an index.

If a stream can be sharded (:class:`ShardedStream`), each process reads one shard for each of its logical ranks.
Otherwise every process reads the full stream and uses only its own samples. In both cases, the samples of a step
and the state of each reader after the step depend only on the step and the logical rank.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from worldsize.checkpoint.format import STREAMS, Checkpoint
from worldsize.checkpoint.load import read_tensors
from worldsize.core import Batch, ConfigError, ShardedStream, WorldsizeError
from worldsize.data.batches import Collate
from worldsize.data.data_wait import DataWait, Patience, own_place
from worldsize.data.order import Order
from worldsize.data.stream_state import EndlessReader
from worldsize.data.worker_process import (
    WorkerStacks,
    begin_reader,
    create_shared_stacks,
    describe_worker,
    monitor_steps,
    start_loader,
    worker_context,
)
from worldsize.seeds import derive_seed, seed_generators

_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_WHOLE = "whole"  # name of the single reader of an unsharded stream
_REMEMBERED = 64  # steps to keep states for; limits how far reading may be ahead of a save
_PROGRESS = 10.0  # seconds between progress messages while samples are read again

States = Mapping[str, bytes]  # reader states by reader name


class _Step(NamedTuple):
    number: int
    batches: list[Batch]  # one per logical rank of this process
    states: States | None  # after the step; None: ask the readers before they read the next step
    passes: tuple[int, int] | None = None  # fewest and most completed passes of a reader; None if unsharded


@final
class TrainingStream:
    """A stream of training samples that can resume from a checkpoint.

    Args:
        dataset: The recipe's data set.
        checkpoint: The checkpoint with the stream's states; None reads the stream from its start.
        speaks: Whether this process logs messages about reading; one process is enough.
    """

    def __init__(self, dataset: Iterable[Any], *, checkpoint: Checkpoint | None = None, speaks: bool = False) -> None:
        self._dataset, self._checkpoint, self._speaks = dataset, checkpoint, speaks
        self._remembered: deque[_Step] = deque(maxlen=_REMEMBERED)
        self._reading: _Reading | None = None  # None if a separate process reads

    def read_batches(
        self,
        order: Order,
        first: int,
        collate: Collate,
        *,
        workers: int = 0,
        pinned: bool = False,
        wait: DataWait | None = None,
    ) -> Iterator[Batch]:
        """Yield this process's batches, one per logical rank, from step ``first + 1`` on.

        Args:
            workers: 0 reads in this process; otherwise a single process reads ahead, since more would change the order.
            pinned: Whether to put batches in page-locked memory, for copies to a GPU.
            wait: Monitors waits for steps, except for the first step if samples are read again; None disables this.

        Raises:
            ConfigError: the stream is empty, cannot be read in a separate process, or cannot load its saved states.
        """
        reading = _Reading(self._dataset, order, collate, speaks=self._speaks)
        begin = reading.load_beginning(first, self._checkpoint)
        if workers:
            _check_alone(self._dataset)
            stacks = create_shared_stacks()
            steps: Iterator[_Step | WorldsizeError] = _start_read_ahead(_Ahead(reading, begin), stacks, pinned=pinned)
            place: Callable[[], str] = partial(describe_worker, steps, 0, stacks)
        else:
            self._reading = reading
            steps, place = reading.read_steps(begin), own_place
        unwatched = first + 1 if begin.done < begin.first else 0
        for step in monitor_steps(steps, first, place, wait or DataWait(Patience()), unwatched, ahead=workers > 0):
            if isinstance(step, WorldsizeError):
                raise step
            self._remembered.append(step._replace(batches=[]))
            yield from step.batches

    def count_passes(self, step: int) -> tuple[int, int] | None:
        """Return the fewest and most passes completed by this process's readers after ``step``.

        Returns None if the stream is not sharded, or if ``step`` is no longer remembered.
        """
        return next((each.passes for each in self._remembered if each.number == step), None)

    def collect_states(self, step: int) -> dict[str, Tensor]:
        """Return the states of this process's readers after ``step``, uint8 [bytes] each.

        The result is empty if the stream does not have a state.
        """
        for each in self._remembered:
            if each.number == step:
                states = each.states
                if states is None and each is self._remembered[-1] and self._reading:
                    states = self._reading.collect_reader_states()
                if states is not None:
                    return {f"{STREAMS}/{name}": _convert_to_tensor(state) for name, state in states.items()}
        raise RuntimeError(
            f"the state of the training stream at step {step} is no longer available, because later batches have "
            "already been read."
        )


def _convert_to_tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


@dataclass(frozen=True)
class _Beginning:
    """The last completed step before reading starts, and the reader states to start from.

    Attributes:
        first: The last completed step.
        done: The step after which the states were saved, or 0 without states. Samples of later steps up to ``first``
            are read and dropped.
        states: Reader states by reader name; empty if the stream is read from its start.
    """

    first: int
    done: int = 0
    states: States = field(default_factory=dict)


@final
class _Reading:
    """Reads a stream for all logical ranks of one process."""

    def __init__(self, dataset: Iterable[Any], order: Order, collate: Collate, *, speaks: bool) -> None:
        self._dataset, self._order, self._collate, self._speaks = dataset, order, collate, speaks
        total = order.logical_ranks
        self._divided = total > 1 and _num_shards(dataset) >= total
        # even a single reader calls shard(): after a resume, some streams would otherwise start each pass in the middle
        parts = {str(rank): (total, rank) for rank in order.mine} if self._divided else {_WHOLE: (1, 0)}
        # not a bound method, since a reference cycle would delay the workers' exit
        begin = partial(_start_pass, dataset, order.seed)
        self._readers = {name: EndlessReader(partial(begin, *part)) for name, part in parts.items()}

    def load_beginning(self, first: int, checkpoint: Checkpoint | None) -> _Beginning:
        """Return the starting point for step ``first + 1``, with saved states if there are any."""
        if checkpoint is None or checkpoint.step > first:
            return _Beginning(first)
        saved = {name.removeprefix(f"{STREAMS}/") for name in checkpoint.tensors if name.startswith(f"{STREAMS}/")}
        if not saved:
            return _Beginning(first)
        total = self._order.logical_ranks
        if saved != ({str(rank) for rank in range(total)} if self._divided else {_WHOLE}):
            now = f"{total} readers" if self._divided else "one reader of the whole stream"
            raise ConfigError(
                f"{checkpoint.path} has the states of {len(saved)} reader(s) of the training stream, but the run has "
                f"{now}. Resume with the original stream and logical_ranks, or use --ignore streams to read the stream "
                "from the start (samples of the epoch may be repeated or skipped)."
            )
        tensors = read_tensors(checkpoint, STREAMS, only=self._readers)
        return _Beginning(first, checkpoint.step, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()})

    def read_steps(self, begin: _Beginning, *, with_states: bool = False) -> Iterator[_Step]:
        """Yield the steps after ``begin.first``, endlessly.

        Args:
            begin: The starting point.
            with_states: Whether to attach the states after each step; required if steps are read ahead.
        """
        for name, state in begin.states.items():
            self._readers[name].restore(state)
        self._skip_samples(begin)
        number = begin.first
        while True:
            number += 1
            batches = self._read_batches(number)
            if number == begin.first + 1:
                self._log_reading_cost(number)
            yield _Step(number, batches, self.collect_reader_states() if with_states else None, self._count_passes())

    def collect_reader_states(self) -> States:
        """Return the current states of the readers that have one."""
        return {name: reader.state() for name, reader in self._readers.items() if reader.has_state}

    def _count_passes(self) -> tuple[int, int] | None:
        passes = [reader.passes for reader in self._readers.values()]
        return (min(passes), max(passes)) if self._divided else None

    def _read_batches(self, step: int) -> list[Batch]:
        order = self._order
        if self._divided:
            return [self._collate(self._read_share(step, rank)) for rank in order.mine]
        self._seed_generators(step)
        samples = self._readers[_WHOLE].take_samples(order.batch_size)
        batches = []
        for rank in order.mine:
            self._seed_generators(step, rank)  # collate may use random numbers
            place = rank * order.micro_batch_size
            batches.append(self._collate(samples[place : place + order.micro_batch_size]))
        return batches

    def _read_share(self, step: int, rank: int) -> list[Any]:
        self._seed_generators(step, rank)
        return self._readers[str(rank)].take_samples(self._order.micro_batch_size)

    def _seed_generators(self, *place: int) -> None:
        """Seed the random generators for a step, or for a step and logical rank."""
        seed_generators(derive_seed(self._order.seed, "data", *place), _CPU)

    def _skip_samples(self, begin: _Beginning) -> None:
        """Read and drop the samples of completed steps, with the same random seeds as originally."""
        order, total = self._order, (begin.first - begin.done) * self._order.batch_size
        if total and self._speaks:
            _logger.info("re-reading the training stream: %s samples up to step %d", f"{total:,}", begin.first)
        said = monotonic()
        for step in range(begin.done + 1, begin.first + 1):
            if self._divided:
                for rank in order.mine:
                    self._read_share(step, rank)
            else:
                self._seed_generators(step)
                self._readers[_WHOLE].take_samples(order.batch_size)
            if self._speaks and monotonic() > said + _PROGRESS:
                said = monotonic()
                count = (step - begin.done) * order.batch_size
                _logger.info("re-read %s of %s samples of the training stream", f"{count:,}", f"{total:,}")

    def _log_reading_cost(self, step: int) -> None:
        """Warn if resuming or sharding is inefficient; refuse states that cannot be saved."""
        stateful = bool(self.collect_reader_states())
        if not self._speaks:
            return
        order, name = self._order, type(self._dataset).__name__
        if not stateful:
            _logger.warning(
                "the training stream (%s) does not define state_dict and load_state_dict; resuming re-reads the stream "
                "from the start, %d samples per step. Define both methods, or return an indexable data set.",
                name,
                order.batch_size,
            )
        if not self._divided and len(order.mine) < order.logical_ranks:
            _logger.warning(
                "every process reads the whole training stream (%s) and uses only its part. %s",
                name,
                _suggest_sharding(self._dataset, order.logical_ranks),
            )
        if self._divided and _num_shards(self._dataset) % order.logical_ranks:
            _logger.warning(
                "the %d shards of the training stream (%s) are not divisible by %d logical ranks: ranks with fewer "
                "shards repeat their samples more often. Use a multiple of %d shards.",
                _num_shards(self._dataset),
                name,
                order.logical_ranks,
                order.logical_ranks,
            )


def _start_pass(dataset: Iterable[Any], seed: int, count: int, index: int, number: int) -> Iterable[Any]:
    """Seed the random generators for pass ``number``, and return shard ``index`` of ``count``."""
    seed_generators(derive_seed(seed, "pass", number, index), _CPU)
    if isinstance(dataset, ShardedStream) and _num_shards(dataset):
        return dataset.shard(num_shards=count, index=index)
    return dataset


def _num_shards(dataset: Iterable[Any]) -> int:
    """Return the number of shards of ``dataset``, or 0 if it cannot be sharded."""
    if not isinstance(dataset, ShardedStream):
        return 0
    try:
        inspect.signature(dataset.shard).bind(num_shards=1, index=0)
    except TypeError:
        return 0
    return dataset.num_shards


def _suggest_sharding(dataset: Iterable[Any], logical_ranks: int) -> str:
    if shards := _num_shards(dataset):
        return f"It has {shards} shards. Use a multiple of {logical_ranks} shards to read only a part in each process."
    return "Define num_shards and shard(num_shards, index) (ShardedStream) to read only a part in each process."


def _check_alone(dataset: Iterable[Any]) -> None:
    if isinstance(dataset, DataLoader) and dataset.num_workers:
        raise ConfigError(
            f"data_workers=1 is not supported with num_workers={dataset.num_workers} of the {type(dataset).__name__}: "
            "a data worker cannot start other workers. Set data_workers=0."
        )


@final
class _Ahead(IterableDataset[Any]):
    """Yields steps in a DataLoader worker, and finally a WorldsizeError if reading fails."""

    def __init__(self, reading: _Reading, begin: _Beginning) -> None:
        self._reading, self._begin = reading, begin

    def __iter__(self) -> Iterator[_Step | WorldsizeError]:
        try:
            yield from self._reading.read_steps(self._begin, with_states=True)
        except WorldsizeError as error:  # if raised here, the DataLoader would wrap it in a traceback
            yield error


def _start_read_ahead(steps: _Ahead, stacks: WorkerStacks | None, *, pinned: bool) -> Iterator[_Step | WorldsizeError]:
    loader: DataLoader[_Step | WorldsizeError] = DataLoader(
        steps,
        batch_size=None,
        collate_fn=_return_step,
        num_workers=1,
        worker_init_fn=partial(begin_reader, os.getpid(), stacks),
        pin_memory=pinned,
        multiprocessing_context=worker_context(),
    )
    return start_loader(loader)


def _return_step(step: Any) -> Any:
    return step
