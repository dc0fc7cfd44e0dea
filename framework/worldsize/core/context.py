"""Services of a run for its processes: checkpoints, faults, data and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, final

from worldsize.core.cluster import World
from worldsize.core.events import Emit, Event
from worldsize.core.numerics import Numerics
from worldsize.core.recipe import EvaluationBatch, MicroBatch, StateDict
from worldsize.core.sections import IntegrityConfig
from worldsize.errors import ConfigError

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor, nn


class DataSource(Protocol):
    """Loads the data of any step or evaluation, for processes that do not run the training loop."""

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        """Load the data of ``logical_rank`` (from 0) for ``step`` (from 1), injecting faults."""

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        """Iterate over shard ``part`` (from 0) of ``parts`` of ``split``, evaluated after ``step``."""


class CheckpointSource(Protocol):
    """Access to the newest checkpoint of the run."""

    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        """Load the newest checkpoint into a state built by ``state``.

        Returns:
            The state and the checkpoint's step; None if there is no checkpoint.
        """


class FaultPoints(Protocol):
    """Points at which the configuration may inject a fault; see :mod:`worldsize.loop.faults`."""

    def report_step(self, step: int) -> None:
        """Report that this process starts or resumes ``step`` (from 1)."""

    def report_point(self, point: str) -> None:
        """Report that this process reached the point named ``point``."""

    @property
    def flips(self) -> BitFlips | None:
        """The bits to flip in this process; None if there are none."""
        return None


FlipTarget = Literal["batch", "weight", "activation", "product", "gradient", "optimizer"]
"""Values in which a bit may be flipped; "product": the result of a matrix product."""


class BitFlips(Protocol):
    """Flips bits as a failing processor or memory would; see :mod:`worldsize.loop.bit_flips`."""

    def plans(self, target: FlipTarget) -> bool:
        """Return whether a bit of ``target`` is flipped in the current step."""

    def flip(self, target: FlipTarget, tensors: Mapping[str, Tensor]) -> None:
        """Flip the planned bits of ``tensors``, in place; they have any shapes."""

    def flipping_passes(self, model: nn.Module) -> AbstractContextManager[None]:
        """Flip the planned bits of activations and products of ``model`` in this block."""


class StopFlag(Protocol):
    """Flag that is set once this process is asked to stop."""

    def is_wanted(self) -> bool:
        """Return whether a stop signal has arrived."""


class StepTiming(Protocol):
    """Records the time breakdown of steps in a process that does not run the training loop."""

    def measured(self, step: int) -> AbstractContextManager[None]:
        """Time the computation of ``step`` in this block, which must exclude data loading."""


@final
class _NoData(DataSource):
    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        raise ConfigError(
            f"no data for step {step}: this process is not part of a run. Start the process with a launcher."
        )

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        raise ConfigError("no evaluation data: this process is not part of a run. Start the process with a launcher.")


@final
class _NoCheckpoints(CheckpointSource):
    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        return None


@final
class _NoFaults(FaultPoints):
    def report_step(self, step: int) -> None: ...

    def report_point(self, point: str) -> None: ...


@final
class _NeverStops(StopFlag):
    def is_wanted(self) -> bool:
        return False


@final
class _Untimed(StepTiming):
    def measured(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()


def _skip_norms() -> bool:
    return False


def _ignore_results(losses: Sequence[Tensor], metrics: Mapping[str, Tensor]) -> None:
    pass


def _ignore_event(event: Event) -> None:
    pass


@final
@dataclass(frozen=True)
class Rendezvous:
    """Folder and address where serving and training processes connect in one attempt."""

    folder: Path
    """Folder shared by every process of this attempt and readable only by their user."""
    address: str = "127.0.0.1"
    """Address at which other hosts reach this host."""
    timeout: float = 600.0
    """Seconds that a process waits for another."""
    sockets: Path | None = None
    """Folder for Unix sockets, private to this attempt and host, with a short path because Unix limits socket paths to
    about 100 bytes. None: ``folder``."""

    def get_socket_path(self, name: str) -> Path:
        """Return the path of a Unix socket on this host, removed when the attempt ends."""
        return (self.sockets or self.folder) / name


@final
@dataclass(frozen=True)
class RunContext:
    """Everything a process needs from its run: world, numerics, data, checkpoints and peers.

    ``RunContext(world)`` is the context of a process outside a run: float32, without faults, checkpoints, stop
    signals or timing. The training loop passes data to a replica directly.
    """

    world: World
    numerics: Numerics = field(default_factory=Numerics)
    seed: int = 0
    """Seed of the run; every random number is derived from it."""
    steps: int = 0
    """Total number of steps in the run."""
    workers: int = 1
    """Number of training processes at the start of the attempt."""
    logical_ranks: int = 1
    """Number of micro-batches per step, each with its own random stream, independent of the number of processes."""
    rendezvous: Rendezvous | None = None
    """None if the run has no serving role."""
    data: DataSource = field(default_factory=_NoData)
    checkpoints: CheckpointSource = field(default_factory=_NoCheckpoints)
    faults: FaultPoints = field(default_factory=_NoFaults)
    stop: StopFlag = field(default_factory=_NeverStops)
    timing: StepTiming = field(default_factory=_Untimed)
    before_update: Callable[[Sequence[Tensor], Mapping[str, Tensor]], None] = field(
        default_factory=lambda: _ignore_results
    )
    """Called by healing replicas in each step, before the update, with the losses and metrics of the step's StepResult.
    It may communicate with all workers, and raises if one of them is gone."""
    logs_norm: Callable[[], bool] = field(default_factory=lambda: _skip_norms)
    """Whether replicas compute the norm of the current step's gradient even without clipping, because the step is
    logged; the same on all ranks."""
    audit_data: Callable[[int, int], MicroBatch] = field(default_factory=lambda: _NoData().micro_batch)
    """Loads the data of any (step, logical rank), to audit another process."""
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    """How replicas detect wrong results of processors and memory."""
    emit: Emit = field(default_factory=lambda: _ignore_event)
    """Receives the events of a replica in this process, such as :class:`~worldsize.core.BitMismatch`."""
    making_groups: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context manager that healing replicas enter while they create their own process groups. The connections of these
    groups are closed as soon as a peer is lost."""

    def meeting_place(self, *, needs: str) -> Rendezvous:
        """Return the rendezvous with the serving processes.

        Raises:
            ConfigError: this process was started without a launcher. The message starts with ``needs``.
        """
        if self.rendezvous is None:
            raise ConfigError(f"{needs}. Start the run with a launcher, which starts all roles.")
        return self.rendezvous
