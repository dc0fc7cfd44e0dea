"""What a process may ask of its run, whether it trains or serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, final

from worldsize.core.cluster import World
from worldsize.core.numerics import Numerics
from worldsize.core.recipe import EvaluationBatch, MicroBatch, StateDict
from worldsize.errors import ConfigError


class DataSource(Protocol):
    """Data of any part of the run, for processes to which the training loop hands none."""

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        """Draw the data of one logical rank (from 0) in ``step`` (from 1), after the faults planned for that step."""

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        """Iterate over share ``part``, from 0, of ``parts`` equal shares of ``split``, as evaluated after ``step``."""


class CheckpointSource(Protocol):
    """The newest checkpoint of the run."""

    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        """Fill a state like the one that ``state`` makes from the newest checkpoint.

        Returns:
            The state and the checkpoint's step; None if there is no checkpoint.
        """


class FaultPoints(Protocol):
    """Points at which a configuration may have planned a fault, see :mod:`worldsize.engine.faults`."""

    def enter(self, step: int) -> None:
        """Say that this process begins ``step`` (from 1), or goes on with it."""

    def at(self, point: str) -> None:
        """Say that this process passes ``point``."""


class StopFlag(Protocol):
    """Whether somebody has asked this process to end."""

    def is_wanted(self) -> bool:
        """Return True from the first signal on."""


class StepTiming(Protocol):
    """Records where the time of steps goes in a process that the training loop does not time."""

    def measured(self, step: int) -> AbstractContextManager[None]:
        """Time what is computed of ``step`` within the block; its data have been drawn before."""


@final
class _NoData(DataSource):
    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        raise ConfigError(f"step {step} has no data: this process belongs to no run. Start it with a launcher.")

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        raise ConfigError("there are no evaluation data: this process belongs to no run. Start it with a launcher.")


@final
class _NoCheckpoints(CheckpointSource):
    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        return None


@final
class _NoFaults(FaultPoints):
    def enter(self, step: int) -> None: ...

    def at(self, point: str) -> None: ...


@final
class _NeverStops(StopFlag):
    def is_wanted(self) -> bool:
        return False


@final
class _Untimed(StepTiming):
    def measured(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()


@final
@dataclass(frozen=True)
class Rendezvous:
    """The meeting place of processes that serve and processes that train, in one attempt of a run."""

    folder: Path
    """Every process of this attempt sees it; only they and their user may read it."""
    address: str = "127.0.0.1"
    """Address of this host, as the others reach it."""
    timeout: float = 600.0
    """Seconds that a process waits for another."""
    sockets: Path | None = None
    """Private to this attempt and this host, with a short name, as Unix sockets need; None: ``folder``."""

    def socket(self, name: str) -> Path:
        """Return the path of a Unix socket, to which the processes of this host connect; it goes with the attempt."""
        return (self.sockets or self.folder) / name


@final
@dataclass(frozen=True)
class RunContext:
    """The run as one process sees it: its world, numerics, data, checkpoints and peers.

    ``RunContext(world)`` alone is the context of a process outside a run: float32, no faults, no checkpoint, nobody
    that asks it to stop, nothing timed, and no data but what the training loop hands to a replica.
    """

    world: World
    numerics: Numerics = field(default_factory=Numerics)
    seed: int = 0
    """Seed of the run, from which all random numbers follow."""
    steps: int = 0
    """Steps of the whole run."""
    workers: int = 1
    """Processes that train, when the attempt begins."""
    logical_ranks: int = 1
    """Parts of a step's data, each with random numbers of its own; equal for any number of processes."""
    rendezvous: Rendezvous | None = None
    """None where no role of the run serves."""
    data: DataSource = field(default_factory=_NoData)
    checkpoints: CheckpointSource = field(default_factory=_NoCheckpoints)
    faults: FaultPoints = field(default_factory=_NoFaults)
    stop: StopFlag = field(default_factory=_NeverStops)
    timing: StepTiming = field(default_factory=_Untimed)

    def meeting_place(self, *, needs: str) -> Rendezvous:
        """Return where this process finds the processes that serve.

        Raises:
            ConfigError: there are none, because no launcher has started this process; ``needs`` says what is missing.
        """
        if self.rendezvous is None:
            raise ConfigError(f"{needs}. Start it with a launcher, which starts every role of a run.")
        return self.rendezvous
