"""Start a real Slurm of several nodes on this machine: munged, slurmctld and one slurmd per node, on loopback."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from getpass import getuser
from pathlib import Path

from tests.support.waiting import wait_until
from worldsize.testing.hosts import Hosts

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
_CONF = """\
ClusterName=worldsize{port}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=8
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{task}
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=60
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=30
AccountingStorageType=accounting_storage/none
NodeName=127.0.0.[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF
"""
_CGROUPS = "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n"


def missing() -> str | None:
    """Explain why Slurm cannot run here, or return None if it can."""
    absent = [name for name in NEEDED if _program(name) is None]
    return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)" if absent else None


def _program(name: str) -> str | None:
    """Return the path of a program that may be installed for root only."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Slurm:
    """A running Slurm."""

    folder: Path
    inside: Sequence[str] = ()  # a command prefix that starts daemons in different namespaces

    @property
    def environment(self) -> dict[str, str]:
        own = {"PATH": f"{commands}:{os.environ['PATH']}"} if (commands := self.folder / "bin").exists() else {}
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), **own}

    def ask(self, *words: str, **variables: str) -> str:
        environment = {**os.environ, **self.environment, **variables}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    def nodes(self) -> list[str]:
        """Return the state of each node, or nothing while the controller is not up."""
        with suppress(subprocess.CalledProcessError):
            return self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split()
        return []

    def facts(self, job: str) -> dict[str, str]:
        """Return Slurm's description of a job."""
        try:
            words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        except subprocess.CalledProcessError:  # the controller is busy
            words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        return self.facts(job)["JobState"]

    def daemon(self, node: str) -> int:
        """Return the process id of a node's daemon."""
        return int((self.folder / "run" / f"slurmd.{node}.pid").read_text())

    def processes(self, node: str, command: str = "") -> list[int]:
        """Return the processes of a node's jobs whose command line begins like this, oldest first."""
        own = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.folder}/slurm.conf".encode()}
        there = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if own <= _variables(path)]
        return sorted(pid for pid in there if _command(pid).startswith(command))

    def kill(self, node: str) -> None:
        """Kill everything on a node, as if its power were cut: its daemon, job scripts, steps and their processes."""
        os.kill(self.daemon(node), signal.SIGKILL)
        there = self.processes(node)
        daemons = {parent for parent in map(_parent, there) if parent and _name(parent).startswith("slurmstepd")}
        for pid in (*daemons, *there):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def start(self, node: str) -> None:
        """Start the daemon of a node."""
        _run(self, "slurmd", "-N", node, "-f", f"{self.folder}/slurm.conf")

    def wait_for(self, job: str, *states: str, seconds: float = 180) -> None:
        wait_until(lambda: self.state(job) in states, lambda: f"job {job} is {self.state(job)}.", seconds)


def _variables(environ: Path) -> set[bytes]:
    with suppress(OSError):
        return {*environ.read_bytes().split(b"\0")}
    return set()


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _parent(pid: int) -> int | None:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


@contextmanager
def running(
    folder: Path,
    *,
    port: int,
    nodes: int = 2,
    cpus: int = 4,
    task: str = "none",
    proctrack: str = "linuxproc",
    inside: Sequence[str] = (),
) -> Iterator[Slurm]:
    """Run Slurm while the context is open; it takes ``port`` and one port per node after it.

    ``task``: plugin that binds processes to CPUs; each node claims ``cpus`` of them.
    """
    slurm = Slurm(folder, inside)
    for name in ("munge", "state", "run", "log"):
        (folder / name).mkdir(mode=0o700 if name == "state" else 0o755, parents=True)
    folder.chmod(0o755)
    (folder / "cgroup.conf").write_text(_CGROUPS)
    shape = {"port": port, "first": port + 1, "last": port + nodes, "nodes": nodes}
    host, plugins = socket.gethostname().split(".")[0], {"proctrack": proctrack, "task": task, "cpus": cpus}
    names = {"folder": folder, "host": host, "user": getuser(), **plugins}
    (folder / "slurm.conf").write_text(_CONF.format(**shape, **names))
    try:
        _start(slurm, nodes)
        yield slurm
    finally:
        if not inside:  # process ids of a different namespace are meaningless here
            _stop(folder)


@contextmanager
def running_on(hosts: Hosts, folder: Path, *, port: int) -> Iterator[Slurm]:
    """Run Slurm while the context is open, on hosts with a network: the last one controls, the others are its nodes.

    Its commands, also a job's, reach the controller from every host, as if it had a separate network.
    """
    slurm, last = Slurm(folder), hosts.count
    for name in ("munge", "state", "run", "log", "bin", *(f"spool.h{host}" for host in range(1, last))):
        (folder / name).mkdir(mode=0o700 if name == "state" else 0o755, parents=True)
    for name in ("sbatch", "scontrol", "scancel", "sinfo"):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec ip netns exec {hosts.name}h{last} {_program(name)} "$@"\n')
        command.chmod(0o755)
    shape = {"port": port, "first": port + 1, "last": port + 1, "nodes": 0, "host": f"h{last}"}
    names = {"folder": folder, "proctrack": "linuxproc", "task": "none", "cpus": 4, "user": getuser()}
    nodes = f"NodeName=h[1-{last - 1}] Port={port + 1} CPUs=4 RealMemory=4000"
    lines = _CONF.format(**shape, **names).replace("(127.0.0.1)", "").splitlines()
    lines = [nodes if line.startswith("NodeName=") else line for line in lines]
    (folder / "cgroup.conf").write_text(_CGROUPS)
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    try:
        _authenticate(slurm)
        _run(replace(slurm, inside=hosts.wrap_command(last, [])), "slurmctld", "-c", "-f", f"{folder}/slurm.conf")
        for host in range(1, last):
            replace(slurm, inside=hosts.wrap_command(host, [])).start(f"h{host}")
        _wait_for_nodes(slurm, last - 1)
        yield slurm
    finally:
        _stop(folder)


def _authenticate(slurm: Slurm) -> None:
    munge, log = slurm.folder / "munge", slurm.folder / "log"
    (munge / "key").write_bytes(secrets.token_bytes(128))
    (munge / "key").chmod(0o600)
    own = [f"--key-file={munge}/key", f"--socket={munge}/socket", f"--seed-file={munge}/seed"]
    own += [f"--pid-file={slurm.folder}/run/munged.pid", f"--log-file={log}/munged.log"]
    _run(slurm, "munged", "--force", *own)


def _start(slurm: Slurm, nodes: int) -> None:
    _authenticate(slurm)
    _run(slurm, "slurmctld", "-c", "-f", f"{slurm.folder}/slurm.conf")
    for node in range(1, nodes + 1):
        (slurm.folder / f"spool.127.0.0.{node}").mkdir()
        slurm.start(f"127.0.0.{node}")
    _wait_for_nodes(slurm, nodes)


def _wait_for_nodes(slurm: Slurm, nodes: int) -> None:
    log = slurm.folder / "log" / "slurmctld.log"
    wait_until(lambda: slurm.nodes() == ["idle"] * nodes, lambda: log.read_text()[-2000:])


def _run(slurm: Slurm, name: str, *words: str) -> None:
    path = _program(name)
    assert path is not None
    subprocess.run([*slurm.inside, path, *words], env={**os.environ, **slurm.environment}, check=True, timeout=60)


def _stop(folder: Path) -> None:
    for file in (folder / "run").glob("*.pid"):
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)
    for environ in Path("/proc").glob("[0-9]*/environ"):  # processes left behind by jobs
        with suppress(OSError):
            if f"SLURM_CONF={folder}/slurm.conf".encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
