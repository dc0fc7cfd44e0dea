"""How processes start, and how a job that they make up ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from worldsize.core.cluster import Cluster, Role
from worldsize.errors import ConfigError

OF_CLUSTER = "worldsize.of_cluster"  # in a field's metadata


def cluster_option(default: Any = MISSING) -> Any:
    """Declare a field of a launcher that describes its cluster: users set it as ``cluster.NAME``.

    Other fields of a launcher are set as ``launcher.NAME``. Without a default the option must be given.
    """
    metadata = {OF_CLUSTER: True}
    if default is MISSING:
        return field(kw_only=True, metadata=metadata)
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Plan:
    """A validated run: everything that a launcher needs to start it.

    ``secrets`` are variables of every process too, but must not be written, shown or put on a command line.
    """

    run_dir: Path
    cluster: Cluster
    roles: Mapping[str, Role]
    environment: Mapping[str, str]
    attempt: int = 1
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def world_size(self) -> int:
        """Processes of all roles together."""
        return sum(role.processes for role in self.roles.values())


@dataclass(frozen=True)
class Failure:
    """The first process that failed, and why."""

    role: str
    rank: int
    cause: str
    exit_code: int
    step: int | None = None  # that it was in, if it is known
    time_ns: int = 0  # since 1970, on its host's clock; 0: a signal or a lost host ended it, before its peers noticed


@dataclass(frozen=True)
class Outcome:
    """How a job ended: ``exit_reason`` is "completed", "failed", "interrupted", or "preempted": saved, start it again;
    of jobs of a scheduler "submitted" or "ended".

    ``steps``: the step after which it began, and the last one it completed, where they are known.
    ``first_step_at``: Unix time at which it completed its first step.
    """

    exit_reason: str
    exit_code: int
    failure: Failure | None = None
    steps: tuple[int, int] | None = None
    first_step_at: float | None = None


class Job(ABC):
    """Processes that a launcher has started. ``ids``: of the jobs that it has submitted, one a run."""

    ids: Sequence[str] = ()

    @abstractmethod
    def wait(self) -> Outcome:
        """Block until all processes have ended, and say how."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the processes to end; :meth:`wait` says how they did."""


class Launcher(ABC):
    """How processes start. Every process runs ``python -m worldsize.worker RUN_DIR`` or its equivalent.

    ``max_restarts``: times that a gang that failed is started again from its last checkpoint.
    """

    max_restarts: int = 0
    submits: ClassVar[bool] = False  # hands the run over to others, who record its attempts
    sweeps: ClassVar[bool] = False  # takes the runs of a sweep together, see launch_all
    elsewhere: ClassVar[bool] = False  # the run's folder is where the processes are, out of the launching one's sight

    @property
    def other_hosts(self) -> Sequence[str]:
        """Names of the hosts that take part beside this one, where they are known."""
        return ()

    @property
    def waits(self) -> bool:
        """Whether the job of ``launch`` can be waited for, until the run has ended."""
        return not self.submits

    def check(self, cluster: Cluster) -> None:  # noqa: B027 - not every launcher has something to check
        """Raise ConfigError for a cluster that this launcher cannot start, before a run folder exists."""

    def write(self, plan: Plan) -> None:  # noqa: B027 - most start processes from the run folder as it is
        """Put what ``launch`` hands over, a script and keys, into the run folder."""

    @abstractmethod
    def launch(self, plan: Plan) -> Job:
        """Start the processes of ``plan``, and return without waiting for them."""

    def launch_all(self, plans: Sequence[Plan]) -> Job:
        """The runs of a sweep, all of one shape, as one job."""
        raise NotImplementedError

    def state(self, job: str) -> str | None:
        """The scheduler's word for a job that was submitted; None: it is over.

        Raises:
            WorldsizeError: it does not answer.
        """
        return None

    def log_command(self, job: str, *, follow: bool) -> Sequence[str]:
        """What shows the logs of a job whose run folder is elsewhere; nothing: they are in the run folder."""
        return ()

    def cancel(self, job: str) -> None:
        """End a job that was submitted."""
        raise ConfigError(f"{type(self).__name__} submits no jobs.")

    @abstractmethod
    def describe(self, plan: Plan) -> str:
        """What ``launch`` would do, as a text that a person can read or run."""
