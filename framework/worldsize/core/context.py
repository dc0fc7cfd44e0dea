"""What a process may ask of its run, whether it trains or serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

from worldsize.core.cluster import World
from worldsize.core.numerics import Numerics
from worldsize.core.recipe import EvaluationBatch, MicroBatch, StateDict
from worldsize.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds
    from torch import Tensor


class DataSource(Protocol):
    """Loads data of any step or evaluation, for processes that the training loop hands none."""

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        """Load the data of one logical rank (from 0) in ``step`` (from 1), after injecting faults planned for it."""

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        """Iterate over part ``part`` (from 0) of ``parts`` equal parts of ``split``, as evaluated after ``step``."""


class CheckpointSource(Protocol):
    """The newest checkpoint of the run."""

    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        """Load the newest checkpoint into a state like the one that ``state`` makes.

        Returns:
            The state and the checkpoint's step; None if there is no checkpoint.
        """


class FaultPoints(Protocol):
    """Points at which the configuration may inject a fault, see :mod:`worldsize.train.faults`."""

    def enter(self, step: int) -> None:
        """Report that this process begins or resumes ``step`` (from 1)."""

    def at(self, point: str) -> None:
        """Report that this process reached the point named ``point``."""


class StopFlag(Protocol):
    """Whether somebody has asked this process to end."""

    def is_wanted(self) -> bool:
        """Return True from the first signal on."""


class StepTiming(Protocol):
    """Records the time breakdown of steps in a process that the training loop does not time."""

    def measured(self, step: int) -> AbstractContextManager[None]:
        """Time the computation of ``step`` inside the block; loading its data is not part of it."""


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


def _ignore(losses: Sequence[Tensor], metrics: Mapping[str, Tensor]) -> None:
    pass


@final
@dataclass(frozen=True)
class Rendezvous:
    """Folder and address by which processes that serve and processes that train meet, in one attempt of a run."""

    folder: Path
    """Folder that every process of this attempt shares; only their user may read it."""
    address: str = "127.0.0.1"
    """Address at which other hosts reach this host."""
    timeout: float = 600.0
    """Seconds that a process waits for another."""
    sockets: Path | None = None
    """Folder for Unix sockets, private to this attempt and host. Its path is short, since Unix limits socket paths to
    about 100 bytes. None: ``folder``."""

    def socket(self, name: str) -> Path:
        """Return the path of a Unix socket for processes of this host; it is removed when the attempt ends."""
        return (self.sockets or self.folder) / name


@final
@dataclass(frozen=True)
class RunContext:
    """The run as one process sees it: its world, numerics, data, checkpoints and peers.

    ``RunContext(world)`` alone is the context of a process outside a run: float32, no faults, no checkpoint, no stop
    signal, no timing, and no data except what the training loop hands to a replica.
    """

    world: World
    numerics: Numerics = field(default_factory=Numerics)
    seed: int = 0
    """Seed of the run, from which all random numbers follow."""
    steps: int = 0
    """Steps of the whole run."""
    workers: int = 1
    """Number of processes that train when the attempt begins."""
    logical_ranks: int = 1
    """Number of parts of a step's data, each with its own random stream, whatever the number of processes."""
    rendezvous: Rendezvous | None = None
    """None where no role of the run serves."""
    data: DataSource = field(default_factory=_NoData)
    checkpoints: CheckpointSource = field(default_factory=_NoCheckpoints)
    faults: FaultPoints = field(default_factory=_NoFaults)
    stop: StopFlag = field(default_factory=_NeverStops)
    timing: StepTiming = field(default_factory=_Untimed)
    before_update: Callable[[Sequence[Tensor], Mapping[str, Tensor]], None] = field(default_factory=lambda: _ignore)
    """Called by replicas that go on without dead peers: in each step, before its update, with the losses and metrics
    of the step's StepResult. It may communicate with all workers, and raise if one of them is gone."""
    making_groups: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered by replicas that go on without dead peers, around the making of process groups of their own: the
    connections of these groups are cut as soon as a peer is lost."""

    def meeting_place(self, *, needs: str) -> Rendezvous:
        """Return where this process connects to the processes that serve.

        Raises:
            ConfigError: no process serves, because no launcher started this one; ``needs`` begins the message.
        """
        if self.rendezvous is None:
            raise ConfigError(f"{needs}. Start it with a launcher, which starts every role of a run.")
        return self.rendezvous
