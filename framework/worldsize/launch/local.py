"""Processes of this machine, forked from the launching one, which has imported torch already."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
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
from worldsize.world.world import role_of


@final
@dataclass(frozen=True)
class Local(Launcher):
    """Starts every process by ``fork``: K workers cost one import of torch, not K.

    The launching process must have no threads and no CUDA context at that time. Torch's elastic agent is
    not used: it polls every 0.1 s, waits 30 s for a gang that ignores SIGTERM, and reports whichever
    failed process it sees first, which often is not the one that failed first.
    """

    grace: float = 1.0
    terminal_logs: bool = True

    def check(self, cluster: Cluster) -> None:
        if cluster.nodes != 1:
            raise ConfigError(f"the local launcher starts processes on one node; cluster.nodes={cluster.nodes}.")
        if cluster.device == "cuda":
            check_gpus(cluster.processes_per_node, torch.cuda.device_count())

    def launch(self, plan: Plan) -> Job:
        meeting = Path(tempfile.mkdtemp(prefix="worldsize_"))  # mode 0700: only this user can join the run
        store = f"file://{meeting}/store"
        run = RunDirectory(plan.run_dir)
        gc.freeze()  # workers need not look through what was imported here, nor copy its pages to do so
        members = [_start(plan, run, placement) for placement in placements(plan, store)]
        gc.unfreeze()
        return Gang(run, members, meeting, grace=self.grace, terminal_logs=self.terminal_logs)

    def describe(self, plan: Plan) -> str:
        lines = [
            f"{plan.world_size} processes on this machine, device {plan.cluster.device}, backend {plan.cluster.backend}"
        ]
        for placement in placements(plan, "file://(private folder)/store"):
            role, rank = role_of(placement.rank, plan.roles)
            lines.append(f"  [{role} {rank}] RANK={placement.rank} python -m worldsize.worker {plan.run_dir}")
        return "\n".join(lines)


def placements(plan: Plan, store: str) -> list[Placement]:
    size = plan.world_size
    return [Placement(rank, size, local_rank=rank, local_world_size=size, store=store) for rank in range(size)]


def _start(plan: Plan, run: RunDirectory, placement: Placement) -> Member:
    role, rank = role_of(placement.rank, plan.roles)
    log = run.log(role, rank)
    log.parent.mkdir(exist_ok=True)
    environment = {**_loopback(plan.cluster), **plan.environment, **plan.secrets, **placement.variables()}
    process: BaseProcess = get_context("fork").Process(
        target=_body, args=(run, placement, log, environment, os.getpid())
    )
    process.start()
    return Member(role, rank, process, log, run.error(role, rank))


def _loopback(cluster: Cluster) -> dict[str, str]:
    """All ranks are on this machine: no port of theirs needs to be seen from outside."""
    names = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
    return {names[cluster.backend]: "lo"} if cluster.backend in names and sys.platform == "linux" else {}


def _body(run: RunDirectory, placement: Placement, log: Path, environment: Mapping[str, str], parent: int) -> None:
    """In the forked process."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    del sys.argv[1:]  # what was typed may hold a secret, and loggers record it
    _write_to(log)
    os.environ.update(environment)
    from worldsize.worker import play  # imported by the launcher before the fork

    try:
        play(run, placement)
    except BaseException:  # the launcher shows the error that play has left
        sys.exit(1)


def _write_to(log: Path) -> None:
    """Send standard output and error, of this process and of what it starts, to one file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
