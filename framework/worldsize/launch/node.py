"""Starts one host's processes by forking, so that torch is imported only once."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, ClassVar

from worldsize.core import Cluster, LaunchMethod, Plan, Range
from worldsize.core.limits import GRACE, SECONDS
from worldsize.healing.membership import MembershipChannel, Pipe
from worldsize.launch.autoscale import AutoscaleProcess
from worldsize.launch.gang import Gang, Graces
from worldsize.launch.members import Member, Members, Terminal, read_log_size
from worldsize.launch.membership_server import MembershipServer
from worldsize.launch.remote import RemoteHosts
from worldsize.observe.health.process import HealthProcess
from worldsize.record.run_directory import RunDirectory, create_parent_folders
from worldsize.world.environments import Node, Placement
from worldsize.world.processes import (
    SIGNALS,
    die_with_parent,
    filter_signals,
    leave_bad_fork,
    leave_hangups,
    ready_to_fork,
)
from worldsize.world.roles import can_heal, find_role, locate_rank, role_ranks
from worldsize.world.scratch import socket_folder
from worldsize.world.topology import variables


@dataclass(frozen=True)
class NodeLauncher(LaunchMethod):
    """Base class of launchers that fork the processes of a host, on each host."""

    heals: ClassVar[bool] = True
    max_restarts: Annotated[int, Range(least=0)] = 0  # maximum restarts of a failed gang from its checkpoint
    grace: Annotated[float, GRACE] = 1.0  # seconds for a failed gang to write its errors before it is killed
    interrupt_grace: Annotated[float, GRACE] = 10.0  # seconds for a run to save after Ctrl-C
    save_grace: Annotated[float, GRACE] = 30.0  # seconds for a run to save after SIGTERM, SIGUSR1 or SIGHUP
    node_timeout: Annotated[float, SECONDS] = 10.0  # seconds without a heartbeat after which a host is lost
    terminal_logs: bool = True  # show each process's output with its "[worker 3]" prefix

    @property
    def requeues(self) -> bool:
        """Whether hosts that lose the first host requeue the run; requires a shared run folder."""
        return False

    def is_current(self) -> bool:
        """Return whether this start of the job still owns the run.

        The first host calls this when another host is lost.
        """
        return True

    def start_node(self, plan: Plan, node: Node, rendezvous: NodeRendezvous, others: RemoteHosts | None = None) -> Gang:
        """Start the processes of ``node``; in a healing gang, also those of ``others``."""
        run = RunDirectory(plan.run_dir)
        terminal = Terminal() if self.terminal_logs else None

        def start_member(role: str, rank: int, starts: int) -> Member:
            elsewhere = others.start_remote_process(role, rank, starts) if others else None
            return elsewhere or start_process(plan, rendezvous, role, rank, starts)

        def find_node(role: str, rank: int) -> int:
            return others.find_node(role_ranks(plan.roles)[role].start + rank) if others else node.rank

        members = Members(
            plan.roles, start_member, max_restarts=self.max_restarts, terminal=terminal, node_of=find_node
        )
        graces = Graces(self.grace, self.interrupt_grace, self.save_grace)
        first = node.rank * rendezvous.local_size
        own = range(first, first + rendezvous.local_size)
        spares = range(plan.world_size, plan.world_size + plan.cluster.waiting)
        try:
            for rank in (*(range(plan.world_size) if others else own), *spares):
                members.add_process(*find_role(rank, plan.roles))
        except BaseException:
            members.kill_processes()  # they would wait for ranks that never start
            shutil.rmtree(rendezvous.folder, ignore_errors=True)
            raise
        server = None
        if can_heal(plan.roles):
            cluster, most = plan.cluster, plan.logical_ranks
            server = MembershipServer(
                members, patience=cluster.timeout, most=most, spares=cluster.waiting, others=others
            )
        leads = node.rank == 0
        helpers: list[AbstractContextManager[object]] = health_processes(plan, node)
        if leads and plan.autoscaler:
            helpers.append(AutoscaleProcess(plan))
        return Gang(run, members, rendezvous.folder, graces, leads=leads, server=server, helpers=helpers)


@dataclass(frozen=True)
class NodeRendezvous:
    """The folder and store through which a node's processes reach the run's other processes."""

    folder: Path  # private folder for this node's heartbeats and sockets; removed after the attempt
    local_size: int
    store: str  # a torch.distributed init method
    variables: Mapping[str, str]
    address: str = "127.0.0.1"  # address of this node for the other nodes

    @staticmethod
    def from_plan(plan: Plan) -> NodeRendezvous:
        """Create the rendezvous for a run on one host, without ports reachable from other hosts."""
        folder, cluster = socket_folder(), plan.cluster
        interface = cluster.interface or ("lo" if sys.platform == "linux" else None)
        network = variables(cluster.backend, interface, cluster.hca)
        return NodeRendezvous(folder, plan.world_size, f"file://{folder}/store", network)

    def placement(self, plan: Plan, rank: int) -> Placement:
        node, local = locate_rank(rank, plan)
        place = Placement(rank, plan.world_size, local, self.local_size, self.store, plan.attempt, node=node)
        return replace(place, heartbeat=self.folder / f"beat_{rank}", address=self.address)


def health_processes(plan: Plan, node: Node) -> list[AbstractContextManager[object]]:
    """Return this host's health monitor, if the run is configured with one."""
    return [HealthProcess(plan.run_dir, plan.health, node=node.rank)] if plan.health else []


def start_process(plan: Plan, rendezvous: NodeRendezvous, role: str, rank: int, starts: int) -> Member:
    """Start process ``rank`` of ``role`` on this host; it was started ``starts`` times before."""
    import worldsize.worker.process  # noqa: F401 - takes seconds; done once before the fork instead of per worker
    from worldsize.config.recorded import preload_config

    placement = replace(rendezvous.placement(plan, role_ranks(plan.roles)[role].start + rank), starts=starts)
    run = RunDirectory(plan.run_dir)
    preload_config(run)
    log = run.get_log_file(role, rank)
    create_parent_folders(log, run)
    run.get_error_file(role, rank).unlink(missing_ok=True)  # left by an earlier attempt
    log_start = read_log_size(log)
    assert placement.heartbeat is not None
    context = get_context("fork")
    ours, theirs = context.Pipe() if plan.roles[role].restart == "heal" else (None, None)
    environment = {**rendezvous.variables, **plan.environment, **plan.secrets, **placement.variables()}
    body = partial(_run_worker, run, placement, log, environment, os.getpid(), theirs, plan.cluster)
    process: BaseProcess = context.Process(target=body)
    with ready_to_fork(), _block_signals():
        process.start()
    if theirs is not None:
        theirs.close()
    host = socket.gethostname()
    return Member(role, rank, process, log, run.get_error_file(role, rank), placement.heartbeat, ours, host, log_start)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block termination signals during a fork; the child unblocks them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_worker(
    run: RunDirectory,
    placement: Placement,
    log: Path,
    environment: Mapping[str, str],
    parent: int,
    pipe: Pipe | None,
    cluster: Cluster,
) -> None:
    """Run the worker in this forked process, with output to ``log``, and exit."""
    die_with_parent(parent)
    for number in filter_signals(SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    # a terminal sends SIGINT and SIGHUP to every process; only the launcher acts on them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_hangups()
    del sys.argv[1:]  # the command line may contain a secret, and loggers record it
    _write_to(log)
    os.environ.update(environment)
    if cluster.device == "cuda":
        leave_bad_fork([sys.executable, "-m", "worldsize.worker", str(run.path)], pipe.fileno() if pipe else None)
    from worldsize.worker.process import run_role

    try:
        code = run_role(run, placement, MembershipChannel.from_pipe(pipe, cluster.timeout) if pipe else None)
    except BaseException:  # the launcher shows the error that run_role has written
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a thread may be waiting for a peer that will never connect
    sys.exit(code)


def _write_to(log: Path) -> None:
    """Redirect the standard output and error of this process and its children to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    opened = partial(open, mode="w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stdout, sys.stderr = opened(1), opened(2)
