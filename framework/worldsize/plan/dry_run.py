"""Times a strategy's steps on one rank without peers, optionally in several concurrent processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from threading import BrokenBarrierError
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch._C._distributed_c10d import FakeProcessGroup, FakeStore

from worldsize.config.settings import Settings
from worldsize.config.shape import RunShape
from worldsize.core import ConfigError, RunContext, World
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import micro_batches
from worldsize.devices import synchronize
from worldsize.strategies.synchronous import create_local_replica
from worldsize.world.environments import Placement
from worldsize.world.processes import ready_to_fork
from worldsize.world.world import create_world

T = TypeVar("T")

_SECONDS = 0.25  # minimum total duration of the steps


def slowdown(settings: Settings, kind: str, *, at_once: int = 1, threads: int = 1) -> float:
    """Measure the compute time of a rank's step, as a multiple of a single process's.

    Both use the same micro-batches. The time includes hooks, encoding and copies, but not the work of other ranks. The
    result is the ratio of medians over at least eleven alternating steps each, on this machine's first device of type
    ``kind`` ("cpu", "cuda"). ``at_once`` processes with ``threads`` threads each run concurrently, since copies of many
    processes on few cores slow each other down.

    Raises:
        ConfigError: a rank's computation depends on its peers.
        RuntimeError: the memory is too small for two replicas per process.
    """
    check_alone(settings)
    return run_concurrently(at_once, threads, _slowdown, settings, first_device(kind))


def _slowdown(settings: Settings, device: torch.device) -> float:
    recipe, strategy = settings.recipe, settings.strategy
    numerics = replace(settings.numerics, compile=False)  # the slowdown comes from hooks and copies
    with world_seen_by(0, settings, device) as world:
        single = create_local_replica(
            recipe, recipe.model().to(device), RunContext(World.create_single(device), numerics)
        )
        replica = strategy.replica(recipe, RunContext(world, numerics, logical_ranks=settings.logical_ranks))
        replicas, part = (single, replica), settings.data_part(world)
        order, collate = settings.create_order(part.rank, part.size, replica.dealing), get_collate_fn(recipe)
        batches = micro_batches(recipe.data("train"), order, device, collate=collate)
        turns = ([partial(replica.step, each) for replica in replicas] for each in batches)
        by_itself, under_it = measure_medians(turns, device, _SECONDS)
    return under_it / by_itself


_BACKEND = "fake"


@contextmanager
def world_seen_by(rank: int, shape: RunShape, device: torch.device) -> Iterator[World]:
    """Open the world of a run as seen by ``rank``, with a fake process group if the rank has peers."""
    cluster = shape.cluster
    per_node = cluster.processes_per_node
    joins = cluster.processes > 1
    if joins:
        options = FakeProcessGroup.Options()
        options.simulate_uniform_ranks = True
        dist.init_process_group(
            _BACKEND, store=FakeStore(), rank=rank, world_size=cluster.processes, pg_options=options
        )
    try:
        place = Placement(rank, cluster.processes, rank % per_node, per_node, store="")
        yield create_world(place, cluster, shape.roles, device, host_backend=_BACKEND)
    finally:
        if joins and dist.is_initialized():
            dist.destroy_process_group()


def check_alone(shape: RunShape) -> None:
    """Check that a rank can run without its peers, with fake collectives.

    Raises:
        ConfigError: the strategy has server processes, or several pipeline stages.
    """
    if any(role.serves for role in shape.roles.values()):
        raise ConfigError(
            f"{type(shape.strategy).__name__} has server processes, which cannot run without their peers. "
            "Choose a strategy without servers, such as ddp, zero, fsdp, hsdp or mesh."
        )
    if any(len(stages) > 1 for stages in shape.strategy.groups(shape.cluster).get("pipeline", ())):
        raise ConfigError(
            "a pipeline stage cannot run without its neighbours. Set strategy.pipeline=1 to try the other axes."
        )


_TIMEOUT = 600  # seconds to wait for other processes
_WARM_UP, _TURNS = 2, 11


@final
class SharedBarrier:
    """A barrier that returns the arrival time of the last process."""

    def __init__(self, context: BaseContext, count: int) -> None:
        self._moment = context.Value("d", lock=False)
        self._barrier = context.Barrier(count, self._record_arrival, _TIMEOUT)

    def _record_arrival(self) -> None:
        self._moment.value = time.perf_counter()

    def wait_for_last(self) -> float:
        """Wait for all processes; return the time when the last one arrived, in seconds."""
        self._barrier.wait()
        return float(self._moment.value)

    def abort(self) -> None:
        """Break the barrier, so that all waiting processes raise BrokenBarrierError."""
        self._barrier.abort()


_barriers: list[SharedBarrier] = []  # one in each worker, else empty; a barrier can only be inherited by fork


def run_concurrently(count: int, threads: int, work: Callable[..., T], *given: Any) -> T:
    """Call ``work(*given)`` in ``count`` processes with ``threads`` threads; return one result.

    The processes are forked: this process must not have an OpenMP pool or have used CUDA.

    Raises:
        Exception: raised by ``work`` in one of them.
        BrokenProcessPool: the kernel killed a process.
    """
    context = get_context("fork")
    barrier = SharedBarrier(context, count)
    with ProcessPoolExecutor(count, context, initializer=_init_worker, initargs=(barrier, threads)) as pool:
        with ready_to_fork():
            parts = [pool.submit(_run_or_abort, work, given) for _ in range(count)]
        errors = [error for part in parts if (error := part.exception()) and not isinstance(error, BrokenBarrierError)]
    if errors:
        raise errors[0]
    return parts[-1].result()


def _init_worker(barrier: SharedBarrier, threads: int) -> None:
    _barriers.append(barrier)
    torch.set_num_threads(threads)


def _run_or_abort(work: Callable[..., T], given: tuple[Any, ...]) -> T:
    try:
        return work(*given)
    except BaseException:
        _barriers[0].abort()  # so that other processes do not wait
        raise


def _time_action(action: Callable[[], object], device: torch.device) -> float:
    """Time ``action``, called by all processes at once; return the seconds of the slowest."""
    begun = _barriers[0].wait_for_last()
    action()
    synchronize(device)
    return _barriers[0].wait_for_last() - begun


def measure_medians(
    turns: Iterable[Sequence[Callable[[], object]]], device: torch.device, least_seconds: float
) -> list[float]:
    """Return the median seconds of each action in a turn.

    There are at least eleven turns, and enough for ``least_seconds``, to average out noise from other users of the
    machine.
    """
    taken: list[list[float]] = []
    spent = 0.0
    for number, turn in enumerate(turns):
        seconds = [_time_action(action, device) for action in turn]
        if number < _WARM_UP:
            continue
        taken.append(seconds)
        spent += sum(seconds)
        if len(taken) >= _TURNS and spent >= least_seconds:
            break
    return [statistics.median(each) for each in zip(*taken, strict=True)]


def first_device(kind: str) -> torch.device:
    """Return this machine's first device of type ``kind``, such as "cpu" or "cuda"."""
    return torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
