"""Flips of single bits in steps of a small recipe, to measure which of them an audit finds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import (
    BitFlips,
    BitMismatch,
    Event,
    FaultPoints,
    FlipTarget,
    IntegrityConfig,
    Numerics,
    Recipe,
    Replica,
    RunContext,
    Strategy,
    World,
)
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import MicroBatchLoader
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.bit_flips import Flip, PlannedFlip, ProcessFlips
from worldsize.testing.training import create_cluster

_SEED, _PASSES = 3, 2  # seed of a run, and logical ranks per process


@final
@dataclass(frozen=True)
class FlipCase:
    """A flip in process ``rank``."""

    rank: int
    flip: Flip


@final
@dataclass(frozen=True)
class FlipResult:
    """The result of a step with a flip.

    Attributes:
        case: The flip.
        is_changed: Whether it changed a bit of a gradient or loss of its process, as compared by SHA-256.
        found: The events of all processes, by rank; None if a process did not detect the flip.
        is_false_alarm: Whether the same step without the flip was reported.
    """

    case: FlipCase
    is_changed: bool
    found: tuple[BitMismatch | None, ...]
    is_false_alarm: bool


def draw_flips(
    count: int, size: int, targets: Sequence[FlipTarget], *, values: int, seed: int, batch_bits: int = 32
) -> list[FlipCase]:
    """Draw flips in one of ``size`` processes, in one of the first ``values`` values of a step.

    ``batch_bits``: bits of an element of the batch's first tensor that may change, such as 8 for tokens below 256.
    """
    drawn = random.Random(seed)
    cases = []
    for _ in range(count):
        target = drawn.choice(targets)
        is_batch = target == "batch"
        skip = drawn.randrange({"weight": 1, "activation": 2 * _PASSES, "batch": 2 * _PASSES}.get(target, values))
        bit = drawn.randrange(batch_bits if is_batch else 32)
        flip = Flip(target, name="0" if is_batch else None, skip=skip, bit=bit)
        cases.append(FlipCase(drawn.randrange(size), flip))
    return cases


def run_flips(
    strategy: Strategy,
    recipe: Recipe,
    world: World,
    cases: Sequence[FlipCase],
    *,
    batch_size: int,
    logical_tensor: int = 1,
) -> list[FlipResult]:
    """Compute an audited step for each of ``cases``, always from the same state; all ranks must call it."""
    numerics = Numerics(logical_tensor=logical_tensor)
    return list(FlipTrial(strategy, recipe, world, batch_size=batch_size, numerics=numerics).run(cases))


@final
class FlipTrial:
    """A replica whose steps can be repeated with and without flips."""

    def __init__(
        self,
        strategy: Strategy,
        recipe: Recipe,
        world: World,
        *,
        batch_size: int,
        audit: float = 1.0,
        logical_ranks: int | None = None,
        numerics: Numerics | None = None,
    ) -> None:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(5)
        parts = strategy.data_parallel(create_cluster(world.size))
        total = logical_ranks or _PASSES * parts
        self.points, self.world = _Points(), world
        self.events: list[BitMismatch] = []
        order = Order(_SEED, batch_size, total, ())
        self._loader = MicroBatchLoader(recipe.data("train"), order, world.device, get_collate_fn(recipe))
        self.context = RunContext(
            world,
            numerics=numerics or Numerics(),
            seed=_SEED,
            logical_ranks=total,
            faults=self.points,
            audit_data=self._loader.load,
            integrity=IntegrityConfig(audit=audit, on_mismatch="warn"),
            emit=self._record_event,
        )
        self.replica: Replica = strategy.replica(recipe, self.context)
        self._own = assign_logical_ranks(strategy.data_rank(world), parts, total, self.replica.dealing)
        self.run_step(1)
        self._state = {name: shard.clone() for name, shard in self.list_state()}

    def run(self, cases: Sequence[FlipCase]) -> Iterator[FlipResult]:
        """Yield the result of each case."""
        for place, case in enumerate(cases):
            clean, alarms = self._watch_step(place + 2, None)
            flipped, events = self._watch_step(place + 2, case)
            own = (clean != flipped, events[0] if events else None, bool(alarms))
            rows = [own] * self.world.size
            dist.all_gather_object(rows, own, group=self.world.group)
            found = tuple(event for _, event, _ in rows)
            yield FlipResult(case, rows[case.rank][0], found, any(alarm for *_, alarm in rows))

    def run_step(self, step: int) -> list[bytes]:
        """Compute a step; return the bytes of its losses."""
        result = self.replica.step([self._loader.load(step, logical_rank) for logical_rank in self._own])
        return [_read_bytes(loss) for loss in result.losses]

    def plan(self, case: FlipCase | None, step: int) -> None:
        """Plan the flip of ``case``, if any, for ``step``, which is computed next."""
        flips = None
        if case is not None and case.rank == self.world.rank:
            flips = ProcessFlips([PlannedFlip(case.flip, step, f"{_SEED}/{step}")])
            flips.step = step
        self.points.watched = _WatchedFlips(flips)

    def restore(self) -> None:
        """Restore the state after the first step."""
        for name, shard in self.list_state():
            shard.copy_(self._state[name])

    def clone_state(self) -> list[Tensor]:
        """Return copies of this process's shards of the state."""
        return [shard.clone() for _, shard in self.list_state()]

    def _watch_step(self, step: int, case: FlipCase | None) -> tuple[list[bytes], list[BitMismatch]]:
        self.events.clear()
        self.plan(case, step)
        watched = self.points.watched
        assert watched is not None
        losses = self.run_step(step)
        self.points.watched = None
        self.restore()
        return [*watched.digests, *losses], [*self.events]

    def list_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this process's shard of each tensor of the state."""
        for name, each in split_tensors(self.replica.state())[0].items():
            if not each.is_meta:
                yield name, get_local_shard(each).detach()

    def _record_event(self, event: Event) -> None:
        if isinstance(event, BitMismatch):
            self.events.append(event)


@final
class _Points(FaultPoints):
    """Fault points with the flips of the current step."""

    def __init__(self) -> None:
        self.watched: _WatchedFlips | None = None

    def report_step(self, step: int) -> None: ...

    def report_point(self, point: str) -> None: ...

    @property
    def flips(self) -> BitFlips | None:
        return self.watched


@final
class _WatchedFlips(BitFlips):
    """Flips of a process, if any, with the SHA-256 of each gradient that it computed afterwards."""

    def __init__(self, flips: ProcessFlips | None) -> None:
        self._flips = flips
        self.digests: list[bytes] = []

    def plans(self, target: FlipTarget) -> bool:
        return target == "gradient" or (self._flips is not None and self._flips.plans(target))

    def flip(self, target: FlipTarget, tensors: Mapping[str, Tensor]) -> None:
        if self._flips is not None:
            self._flips.flip(target, tensors)
        if target == "gradient":
            self.digests += [hashlib.sha256(_read_bytes(each)).digest() for each in tensors.values()]

    def flipping_passes(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self._flips is None else self._flips.flipping_passes(model)


def _read_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
