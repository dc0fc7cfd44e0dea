"""Interfaces of launchers, which start the processes of a run and report how they ended.

An :class:`Autoscaler` is a policy that changes the number of processes of a run while it trains. :class:`HealthLimits`
are the thresholds of node health alerts.
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

OF_CLUSTER = "worldsize.of_cluster"  # key in a field's metadata


def cluster_option(default: Any = ...) -> Any:
    """Declare a launcher field that belongs to the cluster: users set it as ``cluster.NAME``.

    Users set the launcher's other fields as ``launcher.NAME``. An option without a default is required.
    """
    metadata = {OF_CLUSTER: True}
    if default is ...:
        return field(kw_only=True, metadata=metadata)
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Plan:
    """A validated run, with everything that a launcher needs to start it.

    Attributes:
        run_dir: The run folder.
        cluster: The machines to run on.
        roles: Roles by name; global ranks are numbered in this order.
        environment: Environment variables for every process.
        attempt: Number of this attempt, from 1.
        secrets: Further environment variables; they must not be written, shown or put on a command line.
        logical_ranks: Logical ranks per step; each training process needs at least one.
        autoscaler: Policy that changes the number of processes; None: only users change it.
        health: Limits for node health; None: do not monitor it.
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
    step: int | None = None  # the step in progress, if known
    time_ns: int = 0  # Unix time in ns on its host's clock; 0, i.e. earliest, if it was killed or its host was lost
    host: str = ""  # host name; empty if unknown
    is_refusal: bool = False  # the process cannot run this configuration, so a restart would fail too
    has_wrong_bits: bool = False  # bits of a process were wrong, so a restart may compute wrong bits again


class MembershipRecord(TypedDict):
    """One membership of a healing gang: the processes that trained together.

    Attributes:
        number: Number of the membership in the attempt, from 1.
        first: Last step completed before the membership began.
        members: Global ranks of its processes.
        lost: Cause of death of each process lost since the previous membership, by its global rank.
        left: Global ranks of processes that left on request.
        ended: Unix time at which the previous membership ended, or at which the processes were started.
        began: Unix time at which all members were training; None if the membership ended earlier.
        hosts: Host name of each member, in the order of ``members``; only if there are several hosts.
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
    """How a job ended.

    Attributes:
        exit_reason: "completed", "failed", "interrupted", "preempted" (saved, can be resumed) or "rewound" (ended to
            go back before a spike). For a job of agents, "ended": the agents record the reason themselves.
        exit_code: Exit code of the launching command.
        failure: The first process that failed.
        steps: The step before the job's first step, and the last completed step, if known.
        first_step_at: Unix time in seconds at which the job completed its first step.
        memberships: The memberships of a healing gang, in order.
    """

    exit_reason: str
    exit_code: int
    failure: Failure | None = None
    steps: tuple[int, int] | None = None
    first_step_at: float | None = None
    memberships: Sequence[MembershipRecord] = ()

    @property
    def is_refused(self) -> bool:
        """Whether a process refused the configuration before the attempt completed a step."""
        completed = self.steps is not None and self.steps[1] > self.steps[0]
        return self.failure is not None and self.failure.is_refusal and not completed


class Job(ABC):
    """Processes that a launcher has started."""

    @abstractmethod
    def wait(self) -> Outcome:
        """Block until all processes have ended, and return the outcome."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the processes to end; :meth:`wait` returns the outcome."""


class LaunchMethod(ABC):
    """Common base of all launchers. New launchers derive from one of its three subclasses below."""

    max_restarts: int = 0  # maximum number of restarts of a failed gang from its last checkpoint
    save_grace: float = 30.0  # seconds between asking a run to save and stop, and killing it
    image: str | None = None  # container image for the processes
    heals: ClassVar[bool] = False  # whether it supports healing gangs on one host, by reporting deaths to the survivors
    heals_over_hosts: ClassVar[bool] = False  # whether it supports healing gangs across several hosts
    orders_hosts: ClassVar[bool] = False  # whether it numbers hosts in the order of ``cluster.topology``

    def check(self, cluster: Cluster) -> None:  # noqa: B027 - not every cluster has something to check
        """Raise ConfigError if this launcher cannot start runs on ``cluster``.

        Called before a run folder exists.
        """

    def write(self, plan: Plan) -> None:  # noqa: B027 - most start processes from the run folder as it is
        """Write files for the scheduler or user, such as a script and keys, into the run folder."""

    @abstractmethod
    def describe(self, plan: Plan) -> str:
        """Describe what would be started, as text for the user to read or run."""


class Launcher(LaunchMethod):
    """Starts the processes of a run directly; the launching command waits for them.

    Every process runs ``python -m worldsize.worker RUN_DIR`` or its equivalent.
    """

    @property
    def other_hosts(self) -> Sequence[str]:
        """Names of the run's other hosts, if known."""
        return ()

    @abstractmethod
    def launch(self, plan: Plan) -> Job:
        """Start the processes of one attempt."""


class AgentLauncher(LaunchMethod):
    """Starts ``worldsize agent RUN_DIR`` on every host and waits for the agents.

    The agents record the run's attempts.
    """

    hosts: Sequence[str] = ()  # names that this machine can resolve, the leading host first

    @abstractmethod
    def launch_agents(self, plan: Plan) -> Job:
        """Start an agent on each host."""


class BatchLauncher(LaunchMethod):
    """Submits a run to a scheduler as a job, or prints instructions for submitting it by hand.

    The job's agents record the run's attempts. Users can set ``wait``, ``exclude_slow`` and ``agents`` only if a
    subclass declares them as fields.
    """

    wait: bool = False  # return only when the job has ended
    exclude_slow: bool = False  # save, and requeue the run without the node of a straggler
    agents: bool = False  # start ``worldsize agent RUN_DIR`` on each host instead of the workers
    shares_run_folder: ClassVar[bool] = True  # whether the job writes into the run folder created by this process
    finds_job_by: ClassVar[Sequence[str]] = ()  # names of the options that ``state`` and ``cancel`` need

    @abstractmethod
    def submit(self, plan: Plan) -> str | None:
        """Submit one run.

        Returns:
            The job's id; None if the user has to submit the job, following :meth:`describe`.

        Raises:
            ConfigError: the scheduler rejects the job.
        """

    def describe_all(self, plans: Sequence[Plan]) -> str:
        """Describe what :meth:`submit_all` would submit. By default each run is a separate job."""
        return "\n".join(map(self.describe, plans))

    def submit_all(self, plans: Sequence[Plan]) -> Sequence[str | None]:
        """Submit the runs of a sweep, all of the same shape, and return their job ids.

        By default, each run is a separate job.
        """
        return [self.submit(plan) for plan in plans]

    @abstractmethod
    def state(self, job: str) -> str | None:
        """Return the scheduler's name for the state of a job; None if the job is over.

        Raises:
            WorldsizeError: the scheduler does not answer.
        """

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Cancel a pending or running job."""

    def writes_logs(self, plan: Plan) -> bool:
        """Return whether the output of the processes is in log files, not only in their terminal."""
        return True

    def log_command(self, job: str, *, follow: bool) -> Sequence[str]:
        """Return the command that shows a job's logs; empty if they are in the run folder."""
        return ()


@dataclass(frozen=True)
class GangState:
    """State of a healing gang, as input to an :class:`Autoscaler`.

    Attributes:
        run_dir: The run folder.
        step: Newest step that a process has started; 0 if none has.
        processes: Number of processes that train or are about to join.
        seconds: Seconds since the attempt began.
        least: Lower bound: ``Role.min_processes``, in whole blocks; strategies set it from ``cluster.min_processes``.
        most: Upper bound: the policy's ``max_processes``, or else the number of logical ranks.
    """

    run_dir: Path
    step: int
    processes: int
    seconds: float
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Autoscaler(ABC):
    """Policy for the number of training processes.

    Subclasses are frozen dataclasses whose fields are the options of the policy. The policy runs in its own process
    next to the training processes, so it may block on the network and start threads. Its errors are logged and leave
    the number of processes unchanged.

    Args:
        every: Seconds between two decisions.
        max_processes: Largest number of processes; None: the number of logical ranks.
    """

    every: Annotated[float, SECONDS] = 10.0
    max_processes: Annotated[int | None, Range(least=1)] = None

    @abstractmethod
    def choose_process_count(self, state: GangState) -> int:
        """Return the desired number of training processes; it is clamped to the bounds in ``state``."""


@dataclass(frozen=True)
class HealthLimits:
    """Thresholds of node health alerts (None: unlimited), and how often to check.

    Attributes:
        every: Seconds between two samples of a node.
        memory: Used fraction of the memory of the node, or of the run's container.
        process_memory: Resident bytes of one process of the run.
        swap: Bytes per second that the node reads from and writes to its swap space.
        disk: Used fraction of the file system that holds the run folder.
        temperature: GPU temperature in degrees Celsius.
        network_errors: Network interface errors per minute.
        cpus: CPUs that the run's processes on a node need; an alert is raised if they are bound to fewer.
    """

    every: Annotated[
        float, Range(least=0, most=3600, hint="the unit is seconds; 0 disables the checks"), Key(default=20.0)
    ]
    memory: Annotated[float | None, SHARE, Key(default=0.95)] = None
    process_memory: Annotated[float | None, NO_KEY] = None
    swap: Annotated[float | None, Range(least=0, hint="the unit is bytes/s"), Key(default=10e6)] = None
    disk: Annotated[float | None, SHARE, Key(default=0.95)] = None
    temperature: Annotated[float | None, Range(above=0, hint="the unit is degrees Celsius"), Key(default=90.0)] = None
    network_errors: Annotated[float | None, Range(least=0), Key(default=60.0)] = None
    cpus: Annotated[int | None, NO_KEY] = None
