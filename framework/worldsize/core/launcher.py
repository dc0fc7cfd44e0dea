"""Contracts of launchers: how the processes of a run start, and how the job that they form ends.

An :class:`Autoscaler` is a policy that changes the number of processes of a run while it trains. :class:`HealthLimits`
are the figures of a node that raise an alert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

from worldsize.core.cluster import Cluster, Role
from worldsize.core.limits import NO_KEY, SECONDS, SHARE, Key, Range

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
        environment: Environment variables of every process.
        attempt: Number of this attempt, from 1.
        secrets: Further environment variables, which must not be written, shown or put on a command line.
        logical_ranks: Logical ranks of a step, of which each process that trains needs one.
        autoscaler: Policy that changes the number of processes; None: only people do.
        health: What is watched of the nodes; None: nothing.
    """

    run_dir: Path
    cluster: Cluster
    roles: Mapping[str, Role]
    environment: Mapping[str, str]
    attempt: int = 1
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    logical_ranks: int = 1
    autoscaler: Autoscaler | None = None
    health: HealthLimits | None = None

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
    step: int | None = None  # the step that it was computing, if known
    time_ns: int = 0  # Unix time on its host's clock; 0: a signal or a lost host ended it, before its peers noticed
    host: str = ""  # name of its host; empty: not known


class MembershipRecord(TypedDict):
    """One membership of a gang that heals: the processes that trained together, and from which step on.

    Attributes:
        number: Its number in the attempt, from 1.
        first: Last step that was completed before it began.
        members: Global ranks of its processes.
        lost: Causes by the global ranks of those that died since the membership before.
        left: Global ranks of those that were asked to leave.
        ended: Unix time at which the membership before ended, or at which the processes were started.
        began: Unix time at which all members trained; None: it ended before.
        hosts: Names of the members' hosts, in their order, if there are several hosts.
    """

    number: int
    first: int
    members: list[int]
    lost: dict[str, str]
    left: list[int]
    ended: float
    began: float | None
    hosts: NotRequired[list[str]]


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        exit_reason: "completed", "failed", "interrupted" or "preempted" (saved, and can be resumed). For a job of
            agents "ended": they record the reason themselves.
        exit_code: Exit code for the command that waited.
        failure: The first process that failed.
        steps: The step after which the job began, and the last step that it completed, if known.
        first_step_at: Unix time in seconds at which it completed its first step.
        memberships: Those of a gang that heals, in order.
    """

    exit_reason: str
    exit_code: int
    failure: Failure | None = None
    steps: tuple[int, int] | None = None
    first_step_at: float | None = None
    memberships: Sequence[MembershipRecord] = ()


class Job(ABC):
    """Processes that a launcher has started."""

    @abstractmethod
    def wait(self) -> Outcome:
        """Block until all processes have ended, and return how they ended."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the processes to end; :meth:`wait` returns how they ended."""


class LaunchMethod(ABC):
    """The base of every way to start a run. Derive from one of the three below."""

    max_restarts: int = 0  # how often a failed gang is restarted from its last checkpoint
    save_grace: float = 30.0  # seconds between asking a run to save and end, and killing it
    image: str | None = None  # container image in which it starts processes
    heals: ClassVar[bool] = False  # whether it tells the processes of one host which of them live
    heals_over_hosts: ClassVar[bool] = False  # and those of several hosts
    orders_hosts: ClassVar[bool] = False  # whether it numbers them in the order of ``cluster.topology``

    def check(self, cluster: Cluster) -> None:  # noqa: B027 - not every cluster has something to check
        """Raise ConfigError for a cluster that cannot be started on, before a run folder exists."""

    def write(self, plan: Plan) -> None:  # noqa: B027 - most start processes from the run folder as it is
        """Write the files that a scheduler or a person needs, such as a script and keys, into the run folder."""

    @abstractmethod
    def describe(self, plan: Plan) -> str:
        """Describe what would be started, as text that a person can read or run."""


class Launcher(LaunchMethod):
    """Starts the processes of a run immediately; the launching command waits for them.

    Every process runs ``python -m worldsize.worker RUN_DIR`` or its equivalent.
    """

    @property
    def other_hosts(self) -> Sequence[str]:
        """Names of the other hosts of the run, if they are known."""
        return ()

    @abstractmethod
    def launch(self, plan: Plan) -> Job:
        """Start the processes of one attempt."""


class AgentLauncher(LaunchMethod):
    """Starts ``worldsize agent RUN_DIR`` on every host and waits for them. The agents record the run's attempts."""

    hosts: Sequence[str] = ()  # names that this machine can resolve; the first host leads

    @abstractmethod
    def launch_agents(self, plan: Plan) -> Job:
        """Start an agent on each host."""


class BatchLauncher(LaunchMethod):
    """Submits a run to a scheduler as a job, or describes it to a person who submits it.

    The job's agents record the run's attempts.

    A launcher offers ``wait``, ``exclude_slow`` and ``agents`` by declaring them as fields.
    """

    wait: bool = False  # return only when the job has ended
    exclude_slow: bool = False  # save, and resume in another job without the node on which a rank is slow
    agents: bool = False  # start ``worldsize agent RUN_DIR`` on each host, where workers are started otherwise
    shares_run_folder: ClassVar[bool] = True  # its processes write into the run folder that this process created
    finds_job_by: ClassVar[Sequence[str]] = ()  # names of the options that ``state`` and ``cancel`` need

    @abstractmethod
    def submit(self, plan: Plan) -> str | None:
        """Submit one run.

        Returns:
            The job's id; None if a person is to submit it, who is shown :meth:`describe`.

        Raises:
            ConfigError: the scheduler refuses the job.
        """

    def describe_all(self, plans: Sequence[Plan]) -> str:
        """Describe what :meth:`submit_all` would submit. By default each run is a separate job."""
        return "\n".join(map(self.describe, plans))

    def submit_all(self, plans: Sequence[Plan]) -> Sequence[str | None]:
        """Submit the runs of a sweep, all of one shape, and return their ids. By default each is a separate job."""
        return [self.submit(plan) for plan in plans]

    @abstractmethod
    def state(self, job: str) -> str | None:
        """Return the scheduler's name for the state of a job; None: the job is over.

        Raises:
            WorldsizeError: the scheduler does not answer.
        """

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End a job."""

    def log_command(self, job: str, *, follow: bool) -> Sequence[str]:
        """Return the command that shows a job's logs; empty if they are in the run folder."""
        return ()


@dataclass(frozen=True)
class GangState:
    """A gang that heals, as a policy sees it.

    Attributes:
        run_dir: The run folder.
        step: Newest step that a process has begun; 0: none.
        processes: Number of processes that train, or are about to join.
        seconds: Seconds since the attempt began.
        least: Least number of processes: ``Role.min_processes``, in whole blocks; strategies take it from
            ``cluster.min_processes``.
        most: Largest number of processes: ``max_processes`` of the policy, else the number of logical ranks.
    """

    run_dir: Path
    step: int
    processes: int
    seconds: float
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Autoscaler(ABC):
    """Says how many processes are to train; derive a frozen dataclass from it, whose fields are its options.

    It is asked in a process of its own beside those that train: it may wait for a network, and start threads. If it
    raises an error, that is logged, and the number of processes stays.

    Args:
        every: Seconds from one question to the next.
        max_processes: Largest number of processes; None: the number of logical ranks.
    """

    every: Annotated[float, SECONDS] = 10.0
    max_processes: Annotated[int | None, Range(least=1)] = None

    @abstractmethod
    def wanted(self, state: GangState) -> int:
        """Return the number of processes that are to train; it is moved into the bounds of ``state``."""


@dataclass(frozen=True)
class HealthLimits:
    """The limits beyond which a figure of a node raises an alert, None for never, and how often they are checked.

    Attributes:
        every: Seconds between two samples of a node.
        memory: Share of the memory of the node, or of the container that the run is in, that is in use.
        process_memory: Resident bytes of one process of the run.
        swap: Bytes that the node reads from and writes to its swap space in a second.
        disk: Share of the file system of the run folder that is in use.
        temperature: Degrees Celsius of a GPU.
        network_errors: Errors of the network interfaces in a minute.
        cpus: CPUs that the run's processes on a node need; an alert is raised if they are bound to fewer.
    """

    every: Annotated[float, Range(least=0, most=3600, hint="it is in seconds; 0: none"), Key(default=20.0)]
    memory: Annotated[float | None, SHARE, Key(default=0.95)] = None
    process_memory: Annotated[float | None, NO_KEY] = None
    swap: Annotated[float | None, Range(least=0, hint="it is in bytes a second"), Key(default=10e6)] = None
    disk: Annotated[float | None, SHARE, Key(default=0.95)] = None
    temperature: Annotated[float | None, Range(above=0, hint="it is in degrees Celsius"), Key(default=90.0)] = None
    network_errors: Annotated[float | None, Range(least=0), Key(default=60.0)] = None
    cpus: Annotated[int | None, NO_KEY] = None
