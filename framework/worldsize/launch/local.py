"""Processes of this machine, forked from the launching one, which has imported torch already."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import final

import torch

from worldsize.config.shape import check_gpus
from worldsize.core import Cluster, ConfigError, Job, Launcher, Plan
from worldsize.launch.gang import Gang, Member
from worldsize.run_directory import RunDirectory
from worldsize.world.environments import Placement
from worldsize.world.parent import die_with_parent
from worldsize.world.preemption import SIGNALS
from worldsize.world.world import role_of, role_ranks


@final
@dataclass(frozen=True)
class Local(Launcher):
    """Starts every process by ``fork``: K workers cost one import of torch, not K.

    The launching process must have no threads and no CUDA context at that time. Torch's elastic agent is
    not used: it polls every 0.1 s, waits 30 s for a gang that ignores SIGTERM, and reports whichever
    failed process it sees first, which often is not the one that failed first.
    """

    max_restarts: int = 0
    grace: float = 1.0
    interrupt_grace: float = 1.0
    save_grace: float = 30.0
    terminal_logs: bool = True

    def check(self, cluster: Cluster) -> None:
        if cluster.nodes != 1:
            raise ConfigError(f"the local launcher starts processes on one node; cluster.nodes={cluster.nodes}.")
        if cluster.device == "cuda":
            check_gpus(cluster.processes_per_node, torch.cuda.device_count())

    def launch(self, plan: Plan) -> Job:
        meeting = Path(tempfile.mkdtemp(prefix="worldsize_"))  # mode 0700: only this user can join the run
        run = RunDirectory(plan.run_dir)
        gang = Gang(
            run,
            plan.roles,
            partial(_start, plan, run, meeting),
            meeting,
            grace=self.grace,
            interrupt_grace=self.interrupt_grace,
            save_grace=self.save_grace,
            terminal_logs=self.terminal_logs,
            max_restarts=self.max_restarts,
        )
        for rank in range(plan.world_size):
            gang.add(*role_of(rank, plan.roles))
        return gang

    def describe(self, plan: Plan) -> str:
        lines = [
            f"{plan.world_size} processes on this machine, device {plan.cluster.device}, backend {plan.cluster.backend}"
        ]
        for placement in placements(plan, Path("(private folder)")):
            role, rank = role_of(placement.rank, plan.roles)
            lines.append(f"  [{role} {rank}] RANK={placement.rank} python -m worldsize.worker {plan.run_dir}")
        return "\n".join(lines)


def placements(plan: Plan, meeting: Path) -> list[Placement]:
    """Of every process; ``meeting`` is a private folder in which the ranks meet and leave their heartbeats."""
    return [_placement(plan, meeting, rank) for rank in range(plan.world_size)]


def _placement(plan: Plan, meeting: Path, rank: int) -> Placement:
    size, store = plan.world_size, f"file://{meeting}/store"
    return Placement(rank, size, rank, size, store, plan.attempt, meeting / f"beat_{rank}")


def _start(plan: Plan, run: RunDirectory, meeting: Path, role: str, rank: int, starts: int) -> Member:
    placement = replace(_placement(plan, meeting, role_ranks(plan.roles)[role].start + rank), starts=starts)
    log = run.log(role, rank)
    log.parent.mkdir(exist_ok=True)
    run.error(role, rank).unlink(missing_ok=True)  # of an earlier attempt
    assert placement.heartbeat is not None
    environment = {**_loopback(plan.cluster), **plan.environment, **plan.secrets, **placement.variables()}
    process: BaseProcess = get_context("fork").Process(
        target=_body, args=(run, placement, log, environment, os.getpid())
    )
    with _ready_to_fork():
        process.start()
    return Member(role, rank, process, log, run.error(role, rank), placement.heartbeat)


@contextmanager
def _ready_to_fork() -> Iterator[None]:
    """A child need not look through what was imported here, nor copy its pages; it unblocks signals by itself."""
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.unfreeze()


def _loopback(cluster: Cluster) -> dict[str, str]:
    """All ranks are on this machine: no port of theirs needs to be seen from outside."""
    names = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
    return {names[cluster.backend]: "lo"} if cluster.backend in names and sys.platform == "linux" else {}


def _body(run: RunDirectory, placement: Placement, log: Path, environment: Mapping[str, str], parent: int) -> None:
    """In the forked process."""
    die_with_parent(parent)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher decides
    del sys.argv[1:]  # what was typed may hold a secret, and loggers record it
    _write_to(log)
    os.environ.update(environment)
    from worldsize.worker import play  # imported by the launcher before the fork

    try:
        code = play(run, placement)
    except BaseException:  # the launcher shows the error that play has left
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a thread may be waiting for a peer that will never come
    sys.exit(code)


def _write_to(log: Path) -> None:
    """Send standard output and error, of this process and of what it starts, to one file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
