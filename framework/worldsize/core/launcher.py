"""How processes start, and how a job that they make up ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from worldsize.core.cluster import Cluster, Role

OF_CLUSTER = "worldsize.of_cluster"  # in a field's metadata


def cluster_option(default: Any = ...) -> Any:
    """Declare a field of a launcher that describes its cluster: users set it as ``cluster.NAME``.

    Other fields of a launcher are set as ``launcher.NAME``. Without a default the option must be given.
    """
    metadata = {OF_CLUSTER: True}
    if default is ...:
        return field(kw_only=True, metadata=metadata)
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Plan:
    """A validated run: everything that a launcher needs to start it.

    Attributes:
        run_dir: The run folder.
        cluster: The machines to start it on.
        roles: Processes by role; global ranks count through them in this order.
        environment: Variables of every process.
        attempt: Number of this start of the run, from 1.
        secrets: Variables of every process too, which must not be written, shown or put on a command line.
    """

    run_dir: Path
    cluster: Cluster
    roles: Mapping[str, Role]
    environment: Mapping[str, str]
    attempt: int = 1
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def world_size(self) -> int:
        """Number of processes of all roles."""
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
    """The end of a job.

    Attributes:
        exit_reason: "completed", "failed", "interrupted" or "preempted" (it has saved and can be started again); of
            agents "ended", since they record how.
        exit_code: Exit code for the command that waited.
        failure: The first process that failed.
        steps: The step after which it began, and the last one that it completed, where they are known.
        first_step_at: Unix time in seconds at which it completed its first step.
    """

    exit_reason: str
    exit_code: int
    failure: Failure | None = None
    steps: tuple[int, int] | None = None
    first_step_at: float | None = None


class Job(ABC):
    """Processes that a launcher has started."""

    @abstractmethod
    def wait(self) -> Outcome:
        """Block until all processes have ended, and say how."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the processes to end; :meth:`wait` says how they did."""


class LaunchMethod(ABC):
    """The base of every way to start a run. Derive from one of the three below."""

    max_restarts: int = 0  # times that a gang that failed is started again from its last checkpoint
    save_grace: float = 30.0  # seconds that a run which is asked to save and to end has until it is killed

    def check(self, cluster: Cluster) -> None:  # noqa: B027 - not every cluster has something to check
        """Raise ConfigError for a cluster that cannot be started on, before a run folder exists."""

    def write(self, plan: Plan) -> None:  # noqa: B027 - most start processes from the run folder as it is
        """Put what is handed over, a script and keys, into the run folder."""

    @abstractmethod
    def describe(self, plan: Plan) -> str:
        """Say what would be started, as a text that a person can read or run."""


class Launcher(LaunchMethod):
    """Starts the processes of a run here and now, and is waited for.

    Every process runs ``python -m worldsize.worker RUN_DIR`` or its equivalent.
    """

    @property
    def other_hosts(self) -> Sequence[str]:
        """Names of the hosts that take part beside this one, where they are known."""
        return ()

    @abstractmethod
    def launch(self, plan: Plan) -> Job:
        """Start the processes of one attempt."""


class AgentLauncher(LaunchMethod):
    """Starts ``worldsize agent RUN_DIR`` on every host, and is waited for. The agents record the run's attempts."""

    hosts: Sequence[str] = ()  # names by which this machine knows them, the first of which leads

    @abstractmethod
    def launch_agents(self, plan: Plan) -> Job:
        """Start an agent on each host."""


class BatchLauncher(LaunchMethod):
    """Hands a run to a scheduler as a job, whose agents record the run's attempts, or to a person.

    A launcher offers ``wait`` and ``exclude_slow`` by declaring them as fields.
    """

    wait: bool = False  # come back when the job has ended
    exclude_slow: bool = False  # save and go on in another job, without the node on which a rank is slow
    shares_run_folder: ClassVar[bool] = True  # its processes write into the run folder that this process has made
    finds_job_by: ClassVar[Sequence[str]] = ()  # options that ``state`` and ``cancel`` need: names, never a command

    @abstractmethod
    def submit(self, plan: Plan) -> str | None:
        """Hand over one run; return the job's id, or None if a person is to start it, who is shown :meth:`describe`.

        Raises:
            ConfigError: the scheduler refuses the job.
        """

    def submit_all(self, plans: Sequence[Plan]) -> Sequence[str | None]:
        """Hand over the runs of a sweep, all of one shape; the id of each. By default each is a job of its own."""
        return [self.submit(plan) for plan in plans]

    @abstractmethod
    def state(self, job: str) -> str | None:
        """Ask for the scheduler's word for a job; None: it is over.

        Raises:
            WorldsizeError: the scheduler does not answer.
        """

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End a job."""

    def log_command(self, job: str, *, follow: bool) -> Sequence[str]:
        """Name the command that shows a job's logs; empty if they are in the run folder."""
        return ()
