"""Launches runs with Slurm: writes a readable job script and submits it with sbatch."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

from worldsize.core import BatchLauncher, Cluster, ConfigError, OneOf, Plan, Range
from worldsize.core.launcher import cluster_option
from worldsize.core.limits import Form, ReservedNames
from worldsize.errors import MissingProgramError, SchedulerUnreachableError, WorldsizeError
from worldsize.launch.image_launcher import ImageLauncher
from worldsize.launch.node import NodeLauncher
from worldsize.launch.templates import render_template
from worldsize.messages import FIRST_LOST
from worldsize.net.credentials import write_key
from worldsize.world.environments import read_job
from worldsize.world.roles import can_heal

_logger = logging.getLogger(__name__)

_PATIENCE = 60.0  # timeout of Slurm's commands in seconds
_RETRY = 1.0  # seconds between two queries
SCRIPT = "slurm.sh"
_QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED")  # states of a job that waits to start
_OF_CPUS = re.compile("CPU|node configuration")  # matches Slurm's error for nodes with too few CPUs
_UNREACHABLE = re.compile("slurm controller|configuration source|[Mm]unge encode|Protocol authentication")
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
_TIME = Form(
    r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE",
    hint="is not a Slurm time limit. Use minutes, hours:minutes:seconds or days-hours, e.g. cluster.time=02:00:00",
)
_KEYS = {  # sbatch options, long and short, and the key that sets them
    "job-name J": "cluster.job_name",
    "nodes N": "cluster.nodes",
    "ntasks n": "cluster.processes",
    "ntasks-per-node tasks-per-node ntasks-per-core ntasks-per-socket ntasks-per-gpu": "cluster.processes_per_node",
    "cpus-per-task c": "cluster.cpus_per_task",
    "gpus-per-node gpus G gpus-per-task gpus-per-socket": "cluster.gpus_per_node, and cluster.gpu_type for their type",
    "mem": "cluster.memory",
    "time t": "cluster.time",
    "partition p": "cluster.partition",
    "account A": "cluster.account",
    "qos q": "cluster.qos",
    "constraint C": "cluster.constraint",
    "exclude x": "cluster.exclude",
    "exclusive": "cluster.exclusive=true",
    "signal": "launcher.signal_before",
    "requeue no-requeue": "launcher.max_requeues",
    "no-kill k": "strategy.on_failure=heal",
    "wait W": "launcher.wait=true",
}
_REMEDIES = {
    **{name: f"Set {key}" for names, key in _KEYS.items() for name in names.split()},
    **dict.fromkeys(("array", "a"), "Launch several runs with --multirun"),
    **dict.fromkeys(("chdir", "D"), "Launch the run in that folder"),
    **dict.fromkeys(("output", "o", "error", "e", "open-mode"), "Show the job's log with worldsize logs RUN"),
}


@final
@dataclass(frozen=True)
class Slurm(ImageLauncher, NodeLauncher, BatchLauncher):
    """Submits a job in which srun starts one agent per node, in a container if ``image`` is set."""

    heals_over_hosts: ClassVar[bool] = True
    orders_hosts: ClassVar[bool] = True

    job_name: str = cluster_option("worldsize")
    time: Annotated[str | None, _TIME] = cluster_option(None)  # time limit, before which the run saves and is requeued
    partition: str | None = cluster_option(None)
    account: str | None = cluster_option(None)
    qos: str | None = cluster_option(None)
    gpus_per_node: Annotated[int | None, Range(least=0)] = cluster_option(None)
    gpu_type: str | None = cluster_option(None)  # Slurm's name for the GPU type, e.g. a100; None: any
    # per node; None: as many as its processes need
    cpus_per_task: Annotated[int | None, Range(least=1)] = cluster_option(None)
    memory: str | None = cluster_option(None)  # per node, e.g. 64G
    constraint: str | None = cluster_option(None)
    exclude: str | None = cluster_option(None)
    exclusive: bool = cluster_option(False)
    setup: Sequence[str] = cluster_option(())  # shell commands before the start, e.g. "module load cuda"
    container_runtime: Annotated[str, OneOf("pyxis", "apptainer")] = cluster_option("pyxis")  # for ``image``
    mounts: Sequence[str] = cluster_option(())  # folders to mount, besides the working directory and run.root
    # further sbatch options by long name; None for a flag
    options: Annotated[Mapping[str, Any], ReservedNames(_REMEDIES, setter="the job script")] = cluster_option({})
    signal_before: Annotated[int, Range(least=0, most=65535)] = 120  # seconds for saving before the time limit
    max_requeues: Annotated[int, Range(least=0)] = 100  # maximum number of requeues by the run itself
    exclude_slow: bool = False  # requeue the run without nodes that have a straggler
    python: str | None = None  # interpreter on the nodes; None: this one, or the image's if there is an image
    wait: bool = False  # wait until the job has ended

    def check(self, cluster: Cluster) -> None:
        """Raise ConfigError if Slurm would not accept the job (``sbatch --test-only``)."""
        self.check_image()
        _check_gpus(self, cluster)
        if shutil.which("sbatch") is None:
            raise MissingProgramError(
                "sbatch not found. Launch from a login node of the cluster, or set cluster=laptop."
            )
        plan = Plan(Path("run"), cluster, {}, {})
        try:
            _run_command(["sbatch", "--test-only"], self.describe(plan))
        except ConfigError as error:
            if (cpus := _compute_cpus(self, cluster)) and _OF_CPUS.search(str(error)):
                more = f"The job requests {cpus} CPUs per node; set cluster.cpus_per_task to change this."
                raise ConfigError(f"{error}. {more}") from None
            raise

    def write(self, plan: Plan) -> None:
        self._write_script([plan])

    def submit(self, plan: Plan) -> str:
        return self.submit_all([plan])[0]

    def submit_all(self, plans: Sequence[Plan]) -> Sequence[str]:
        """Submit a job for one run, or a job array for several."""
        script = self._write_script(plans)
        job = _run_command(["sbatch", "--parsable", str(script)], environment=plans[0].secrets).split(";")[0].strip()
        return [f"{job}_{task}" for task in range(len(plans))] if len(plans) > 1 else [job]

    def _write_script(self, plans: Sequence[Plan]) -> Path:
        """Write the script to each run's folder; return its path in the first."""
        text = self.describe_all(plans)
        for plan in plans:
            write_key(plan.run_dir)
            (plan.run_dir / "logs").mkdir(exist_ok=True)
            (plan.run_dir / SCRIPT).write_text(text)
        return plans[0].run_dir / SCRIPT

    def describe(self, plan: Plan) -> str:
        return self.describe_all([plan])

    def describe_all(self, plans: Sequence[Plan]) -> str:
        """Return the job script for one run, or for a job array of several."""
        cluster = plans[0].cluster
        runs = [shlex.quote(str(plan.run_dir)) for plan in plans]
        array = len(plans) > 1
        python = self.python or ("python" if self.image else sys.executable)
        return render_template(
            "slurm.sh.j2",
            options=_build_options(self, plans),
            run_id=plans[0].run_dir.name + (" and others" if array else ""),
            setup=self.setup,
            folder=shlex.quote(os.getcwd()),
            variables=[(name, shlex.quote(value)) for name, value in plans[0].environment.items()],
            runs=runs if array else [],
            run='"${runs[$SLURM_ARRAY_TASK_ID]}"' if array else runs[0],
            # in an array, a task's SLURM_JOB_ID may be the whole array's ID and so refer to all tasks
            job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if array else "$SLURM_JOB_ID",
            python=shlex.quote(self.python or sys.executable),
            cpus='--cpus-per-task="$SLURM_CPUS_PER_TASK"' if _compute_cpus(self, cluster) else "--cpu-bind=none",
            srun_options="".join(f" {shlex.quote(word)}" for word in _container(self, plans, "pyxis")),
            agent=shlex.join([*_container(self, plans, "apptainer"), python]),
            max_requeues=self.max_requeues,
            exclude_slow=self.exclude_slow,
            heals=can_heal(plans[0].roles),
            first_lost=FIRST_LOST,
            spare_nodes=cluster.spare_nodes,
            excluded=shlex.quote(self.exclude or ""),
        )

    def state(self, job: str) -> str | None:
        """Return the job's state in Slurm, such as PENDING; None if the job has ended."""
        try:
            state = _query_job(job).get("JobState")
        except WorldsizeError as error:
            if "Invalid job id" in str(error):  # Slurm forgets old jobs
                return None
            raise
        return None if state in _OVER else state

    @property
    def requeues(self) -> bool:
        job = read_job(os.environ)
        return job is not None and job.get("requeues", self.max_requeues) < self.max_requeues

    def is_current(self) -> bool:
        """Return whether Slurm confirms within ``node_timeout`` seconds that this start still runs.

        Returns True outside of a Slurm job. Other nodes requeue the job when they lose the first node, so a first node
        that cannot reach Slurm must not continue.
        """
        job, deadline = read_job(os.environ), time.monotonic() + self.node_timeout
        while job is not None:
            try:
                name = f"{job['array']}_{job['array_task']}" if "array" in job else job["id"]
                facts = _query_job(name, patience=max(_RETRY, deadline - time.monotonic()))
                is_queued = facts.get("JobState") in _QUEUED
                return not is_queued and facts.get("Restarts") == str(job["requeues"])
            except WorldsizeError as error:
                _logger.warning("%s", error)
            if time.monotonic() > deadline:
                return False
            time.sleep(_RETRY)
        return True  # not in a Slurm job

    def cancel(self, job: str) -> None:
        _run_command(["scancel", job])


def _check_gpus(launcher: Slurm, cluster: Cluster) -> None:
    """Raise ConfigError for GPUs requested twice, for a CPU run, or by type without a number."""
    others = [
        name
        for name, value in launcher.options.items()
        if name.startswith("gpus") or (name.startswith(("gres", "tres-per")) and "gpu" in str(value))
    ]
    if launcher.gpus_per_node and others:
        raise ConfigError(
            f"cluster.gpus_per_node and cluster.options.{others[0]} both request GPUs. "
            f"Set cluster.gpus_per_node and cluster.gpu_type, and remove cluster.options.{others[0]}."
        )
    if others and cluster.device == "cpu":
        given = f"cluster.options.{others[0]}={launcher.options[others[0]]}"
        raise ConfigError(f"{given} requests GPUs, but cluster.device=cpu. Set cluster.gpus_per_node instead.")
    if launcher.gpu_type and not launcher.gpus_per_node:
        raise ConfigError(f"cluster.gpu_type={launcher.gpu_type} requires GPUs. Set cluster.gpus_per_node.")


def _compute_cpus(launcher: Slurm, cluster: Cluster) -> int | None:
    """Return the CPUs to request per node; None if other options determine them."""
    is_told = launcher.exclusive or any(name.startswith("cpus-per") for name in launcher.options)
    return launcher.cpus_per_task or (None if is_told else cluster.cpus_per_node)


def _build_options(launcher: Slurm, plans: Sequence[Plan]) -> list[tuple[str, Any]]:
    cluster, logs = plans[0].cluster, str(plans[0].run_dir / "logs").replace("%", "%%")
    gpus = f"{launcher.gpu_type}:{launcher.gpus_per_node}" if launcher.gpu_type else launcher.gpus_per_node
    named: dict[str, Any] = {
        "job-name": launcher.job_name,
        "nodes": cluster.all_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": _compute_cpus(launcher, cluster),
        "gpus-per-node": gpus,
        "mem": launcher.memory,
        "time": launcher.time,
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "exclude": launcher.exclude,
        "array": f"0-{len(plans) - 1}" if len(plans) > 1 else None,
        "signal": f"USR1@{launcher.signal_before}",
        "output": f"{logs}/{'slurm_%A_%a.log' if len(plans) > 1 else 'slurm_%j.log'}",
        "open-mode": "append",
    }
    flags = [("exclusive", None)] if launcher.exclusive else []
    given = [(name, value) for name, value in named.items() if value is not None]
    flags += [("no-kill", None)] if can_heal(plans[0].roles) else []
    every = [*given, ("requeue", None), *flags, *launcher.options.items()]
    return [(name, None if value is None else _quote_value(str(value))) for name, value in every]


def _container(launcher: Slurm, plans: Sequence[Plan], runtime: str) -> list[str]:
    """Return the container's arguments: srun options (pyxis) or a command (apptainer)."""
    if launcher.image is None or launcher.container_runtime != runtime:
        return []
    here = Path.cwd()
    runs = {plan.run_dir.absolute().parent for plan in plans}
    folders = [str(here), *sorted(str(each) for each in runs if not each.is_relative_to(here)), *launcher.mounts]
    if runtime == "pyxis":
        mounts = ",".join(each if ":" in each else f"{each}:{each}" for each in folders)
        return [f"--container-image={launcher.image}", f"--container-mounts={mounts}", f"--container-workdir={here}"]
    devices = ["--nv"] if launcher.gpus_per_node else []
    return ["apptainer", "exec", *devices, *(f"--bind={each}" for each in folders), f"--pwd={here}", launcher.image]


def _quote_value(value: str) -> str:
    """Quote a value for an #SBATCH line if it has whitespace, quotes, ``#`` or a backslash.

    Raises:
        ConfigError: the value has several lines.
    """
    if len(value.splitlines()) > 1:
        raise ConfigError(f"an sbatch option must be a single line, got {value!r}.")
    if not re.search(r"[\s#'\"\\]", value):
        return value
    escaped = re.sub(r'([\\"])', r"\\\1", value)
    return f'"{escaped}"'


def _query_job(job: str, patience: float = _PATIENCE) -> dict[str, str]:
    """Query a job's properties, such as its JobState; wait at most ``patience`` seconds."""
    shown = _run_command(["scontrol", "show", "job", "--oneliner", job], patience=patience)
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def _run_command(
    command: Sequence[str],
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    patience: float = _PATIENCE,
) -> str:
    """Run a Slurm command for at most ``patience`` seconds; return its output.

    Raises:
        SchedulerUnreachableError: the command cannot start or reach Slurm, or times out (Slurm may still execute it).
        ConfigError: Slurm rejects the request; the error includes Slurm's message.
    """
    try:
        done = subprocess.run(
            command,
            input=script,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SchedulerUnreachableError(
            f"{command[0]} failed: {error}. Check that the Slurm controller is running."
        ) from error
    if done.returncode:
        said = "; ".join(done.stderr.strip().splitlines())
        if _UNREACHABLE.search(said):
            raise SchedulerUnreachableError(
                f"{command[0]} cannot reach Slurm: {said}. Launch from a login node of the cluster, or check that the "
                "Slurm controller is running."
            )
        raise ConfigError(f"Slurm rejected the request: {said}")
    return done.stdout
