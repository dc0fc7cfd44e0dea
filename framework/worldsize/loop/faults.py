"""Fault injection from the configuration, to rehearse failures on your own cluster.

    train.py 'faults=[{action: kill, rank: 1, step: 7}, {action: raise, point: "checkpoint:after-shards", step: 20}]'

Points: checkpoint:begin, checkpoint:in-shard, checkpoint:after-shard, checkpoint:after-shards,
checkpoint:after-manifest, checkpoint:after-complete, checkpoint:after-rename, retention:begin,
retention:in-delete, retention:end, evaluate:begin, push:begin, push:next-server, push:end, update:continue,
process:begin, load:begin, step:data, step:compute, copies:sent; in healing gangs also log:begin and log:end, before
the update.

Within a step: step:forward and step:backward before the passes of a micro-batch, and step:reduce after them;
step:reduced once gradients and buffers have been combined over all ranks; step:update before the optimizer's step, and
step:updated after it. Faults at these points happen in the first micro-batch of the step.

Action "disk_full", at a point of a save, raises the error of a full disk.

    train.py checkpoint.every=10 'faults=[{action: disk_full, rank: 0, point: "checkpoint:in-shard", step: 20}]'

Action "slow" repeats whenever its point is reached, e.g. for a rank that is slow from step 100 on, or has slow data.

    train.py 'faults=[{action: slow, rank: 2, seconds: 0.05, step: 100}]'
    train.py 'faults=[{action: slow, rank: 2, seconds: 0.05, point: "step:data"}]'

Action "perturb" makes a process allocate memory at different addresses, at every point it reaches. The result must not
change.

    train.py 'faults=[{action: perturb, rank: null, attempt: null}]'

Action "flip" changes a bit of a value, see :mod:`worldsize.loop.bit_flips`.
"""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar, final, get_args

import torch
from torch import Tensor

from worldsize.core import FlipTarget
from worldsize.core.limits import GRACE, Range, check_limits
from worldsize.errors import ConfigError, neighbours
from worldsize.loop.bit_flips import Flip, PlannedFlip, ProcessFlips

T = TypeVar("T")

_BLOCKS = 64  # blocks of each kind in a perturbation
_LARGEST = 4096  # elements per block, few enough for the allocator to reuse it rather than return it to the system


@final
class Heap:
    """Allocates and frees blocks of odd sizes, so that later allocations change addresses."""

    def __init__(self) -> None:
        self._random = random.Random()  # leaves the run's own generators unchanged
        self._kept: list[Tensor | bytearray] = []

    def perturb(self) -> None:
        """Allocate blocks of NaN, then free a random half of all blocks.

        The other half keeps its addresses occupied.
        """
        blocks = [block for _ in range(_BLOCKS) for block in (self._allocate_tensor(), bytearray(self._draw_size()))]
        mixed: list[Tensor | bytearray] = [*self._kept, *blocks]
        self._random.shuffle(mixed)
        self._kept = mixed[: len(mixed) // 2]

    def _allocate_tensor(self) -> Tensor:
        return torch.full((self._draw_size(),), math.nan)

    def _draw_size(self) -> int:
        return 2 * self._random.randrange(_LARGEST // 2) + 1


PERTURB = "perturb"
POINTS = (
    *("checkpoint:begin", "checkpoint:in-shard", "checkpoint:after-shard", "checkpoint:after-shards"),
    *("checkpoint:after-manifest", "checkpoint:after-complete", "checkpoint:after-rename"),
    *("retention:begin", "retention:in-delete", "retention:end", "evaluate:begin", "push:begin", "push:next-server"),
    *("push:end", "update:continue", "process:begin", "load:begin", "copies:sent", "log:begin", "log:end"),
    *("step:data", "step:compute", "step:forward", "step:backward", "step:reduce", "step:reduced", "step:update"),
    "step:updated",
)
_SPACES = {point.partition(":")[0] for point in POINTS}
OUT_OF_MEMORY = 137  # exit code of a process killed by the kernel for lack of memory: 128 + SIGKILL


def _create_signal_sender(number: int) -> Callable[[float], None]:
    return lambda _: os.kill(os.getpid(), number)


def _raise_error(_: float) -> None:
    raise RuntimeError("fault injected by the configuration")


def _fill_disk(_: float) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "fault injected by the configuration")


ACTIONS: Mapping[str, Callable[[float], None]] = {
    "kill": _create_signal_sender(signal.SIGKILL),
    "stop": _create_signal_sender(signal.SIGSTOP),
    "segfault": _create_signal_sender(signal.SIGSEGV),
    "terminate": _create_signal_sender(signal.SIGTERM),
    "interrupt": _create_signal_sender(signal.SIGINT),
    "user_signal": _create_signal_sender(signal.SIGUSR1),
    "out_of_memory": lambda _: os._exit(OUT_OF_MEMORY),
    "raise": _raise_error,
    "disk_full": _fill_disk,
    "sleep": time.sleep,
    "slow": time.sleep,
}
FLIP = "flip"  # changes a value; see worldsize.loop.bit_flips


@final
@dataclass(frozen=True)
class Fault:
    """One fault: its action, its process and its time.

    Without ``point``, it happens at the start of ``step``. With ``point``, it happens when the process first reaches
    that point in or after ``step``. Action "slow" repeats; its default point is "step:compute". Action "flip" also
    takes the keys of :class:`~worldsize.loop.bit_flips.Flip`.
    """

    action: str
    rank: Annotated[int | None, Range(least=0)] = 0  # None: every rank
    step: Annotated[int | None, Range(least=0)] = None  # None: every step
    point: str | None = None
    # attempt of the run, or of a process that restarts individually; None: all attempts
    attempt: Annotated[int | None, Range(least=1)] = 1
    seconds: Annotated[float, GRACE] = 3600.0  # duration of the actions "sleep" and "slow"
    flip: Flip | None = None


@final
@dataclass
class Faults:
    """The faults of a run.

    :meth:`arm_faults` selects the faults of one process; the other methods inject them.
    """

    planned: Sequence[Fault] = ()
    _mine: list[Fault] = field(default_factory=list)
    _step: int = 0
    _heap: Heap = field(default_factory=Heap)
    flips: ProcessFlips | None = None  # of this process

    @staticmethod
    def from_rows(rows: Iterable[Mapping[str, Any]]) -> Faults:
        """Parse the faults in the configuration.

        Raises:
            ConfigError: a key, an action or a point is unknown; the message suggests similar ones.
        """
        return Faults([_parse_fault(row) for row in rows])

    def arm_faults(self, rank: int, attempt: int) -> None:
        """Select the faults of this process: ``rank`` in attempt number ``attempt`` of the run."""
        mine = [f for f in self.planned if f.rank in (None, rank) and f.attempt in (None, attempt)]
        self._mine = [fault for fault in mine if fault.flip is None]
        flips = [
            PlannedFlip(each.flip, each.step, f"{rank}/{each.step}/{place}")
            for place, each in enumerate(mine)
            if each.flip is not None
        ]
        self.flips = ProcessFlips(flips) if flips else None
        self.report_point("process:begin")

    def inject_into_steps(self, steps: Iterable[T], first: int) -> Generator[T]:
        """Yield ``steps``, numbered from ``first + 1``, after injecting each step's faults."""
        for number, step in enumerate(steps, first + 1):
            self.report_step(number)
            yield step

    def report_step(self, step: int) -> None:
        """Inject the faults of ``step``, unless it has already started."""
        if step != self._step:
            self._step = step
            if self.flips is not None:
                self.flips.step = step
            self._inject_faults(None)
            self.report_point("step:data")

    def report_point(self, point: str) -> None:
        """Inject the faults configured for ``point``."""
        if self._mine:
            self._inject_faults(point)

    def _inject_faults(self, point: str | None) -> None:
        for fault in [fault for fault in self._mine if fault.point == point or fault.action == PERTURB]:
            if fault.action == PERTURB:
                self._heap.perturb()
            elif fault.step in (None, self._step) if point is None else self._step >= (fault.step or 0):
                if point is not None and fault.action != "slow":
                    self._mine.remove(fault)
                ACTIONS[fault.action](fault.seconds)


def _parse_fault(row: Mapping[str, Any]) -> Fault:
    action = str(row.get("action"))
    if action not in (actions := (*ACTIONS, PERTURB, FLIP)):
        raise ConfigError(f"faults: unknown action {action!r}{neighbours(action, actions)}")
    if action == FLIP:
        return _parse_flip(row)
    _check_keys(row, _OWN_KEYS)
    point = row.get("point")
    space, colon, _ = str(point).partition(":")
    if point is not None and point not in POINTS and (not colon or space in _SPACES):  # plugins use their own prefix
        raise ConfigError(f"faults: unknown point {point!r}{neighbours(str(point), POINTS)}")
    check_limits(Fault, row, key="faults")
    return Fault(**({"point": "step:compute", **row} if action == "slow" else row))


_OWN_KEYS = [each.name for each in fields(Fault) if each.name != FLIP]


def _check_keys(row: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in row:
        if key not in known:
            raise ConfigError(f"faults: unknown key {key!r}{neighbours(key, known)}")


def _parse_flip(row: Mapping[str, Any]) -> Fault:
    times, bits = ("action", "rank", "step", "attempt"), [each.name for each in fields(Flip)]
    _check_keys(row, (*times, *bits))
    targets = get_args(FlipTarget)
    if (target := row.get("target")) not in targets:
        raise ConfigError(f"faults: unknown target {str(target)!r} of a flip{neighbours(str(target), targets)}")
    if target == "product" and row.get("name") is not None:
        raise ConfigError("faults: name is not supported for target=product, since products have no names. Remove it.")
    check_limits(Flip, {key: row[key] for key in row if key in bits}, key="faults")
    check_limits(Fault, {key: row[key] for key in row if key in times}, key="faults")
    flip = Flip(**{key: value for key, value in row.items() if key in bits})
    return Fault(**{key: value for key, value in row.items() if key in times}, flip=flip)
