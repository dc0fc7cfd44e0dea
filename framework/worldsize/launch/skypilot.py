"""Launches runs with SkyPilot (`sky jobs launch`), with the run folder in a bucket."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final

from worldsize.core import BatchLauncher, Cluster, ConfigError, OneOf, Plan, Range
from worldsize.core.launcher import cluster_option
from worldsize.core.limits import ReservedNames
from worldsize.launch.image_launcher import ImageLauncher, job_name
from worldsize.launch.node import NodeLauncher
from worldsize.launch.templates import render_template
from worldsize.net.credentials import write_key
from worldsize.world.processes import PREEMPTED

_logger = logging.getLogger(__name__)

TASK = "skypilot.yaml"
_RUN_FILES = "~/worldsize_run"
_BUCKET = re.compile(r"(s3|gs|r2|cos|oci|nebius|https)://.+|/.+")
_OVER = ("SUCCEEDED", "CANCELLED", "FAILED")
_REMEDIES = {
    **{key: f"Set cluster.{key}" for key in ("infra", "accelerators", "cpus", "memory", "job_recovery")},
    "image_id": "Set cluster.image",
    "use_spot": "Set cluster.spot=true",
    "spot_recovery": "Set cluster.job_recovery",
}


@final
@dataclass(frozen=True)
class SkyPilot(ImageLauncher, NodeLauncher, BatchLauncher):
    """Launches a managed job, one agent per node, with its run in ``checkpoint_bucket``.

    If ``checkpoint_bucket`` is a path, all nodes must share that folder. ``image`` sets SkyPilot's ``image_id``.
    """

    accelerators: str | None = cluster_option(None)  # per node, e.g. A100:4
    infra: str | None = cluster_option(None)  # e.g. aws/us-east-1, gcp; None for the cheapest
    spot: bool = cluster_option(False)
    cpus: str | None = cluster_option(None)
    memory: str | None = cluster_option(None)
    checkpoint_bucket: str | None = cluster_option(None)  # s3://..., gs://... or a shared folder
    bucket_mode: Annotated[str, OneOf("MOUNT", "MOUNT_CACHED")] = cluster_option("MOUNT")  # MOUNT_CACHED uploads later
    mount: str = cluster_option("/checkpoints")  # mount point of the bucket on the nodes
    job_recovery: Any = cluster_option(None)  # EAGER_NEXT_REGION, FAILOVER, or any value that SkyPilot accepts
    spot_recovery: Any = cluster_option(None)  # deprecated name of job_recovery
    # any other keys of SkyPilot's resources
    resources: Annotated[Mapping[str, Any], ReservedNames(_REMEDIES, setter="the task")] = cluster_option({})
    setup: Sequence[str] = cluster_option(())  # shell commands that create the environment; default: uv sync
    python: str | None = cluster_option(None)  # interpreter on the nodes; default: the environment's
    restarts_on_errors: Annotated[int, Range(least=0)] = 3  # maximum restarts of a failed job
    managed: bool = True  # a managed job, recovered after a loss; False: a cluster that outlives the run
    sky: Sequence[str] = ("sky",)  # the command, possibly in a separate environment
    shares_run_folder = False
    finds_job_by = ("managed",)

    def check(self, cluster: Cluster) -> None:
        self.check_image()
        if self.spot_recovery is not None:
            _logger.warning(
                "cluster.spot_recovery is deprecated: SkyPilot 0.8 renamed it to job_recovery. "
                "Set cluster.job_recovery=%s instead.",
                self.spot_recovery,
            )
        if self.spot_recovery is not None and self.job_recovery is not None:
            raise ConfigError("cluster.spot_recovery is the old name of cluster.job_recovery. Set only the latter.")
        if self.checkpoint_bucket is None and (self.spot or cluster.nodes > 1):
            raise ConfigError(
                "cluster.checkpoint_bucket is required for spot instances and multiple nodes: it keeps checkpoints "
                "after a preemption, and shares them between nodes. Set it to s3://..., gs://... or another bucket."
            )
        if self.checkpoint_bucket is not None and not _BUCKET.fullmatch(self.checkpoint_bucket):
            raise ConfigError(
                f"cluster.checkpoint_bucket={self.checkpoint_bucket} is not a bucket. Set it to a bucket such as s3://NAME."
            )
        if str(self.checkpoint_bucket).startswith("/") and not os.access(str(self.checkpoint_bucket), os.W_OK):
            raise ConfigError(
                f"cluster.checkpoint_bucket={self.checkpoint_bucket} is not a writable folder. Use a folder that "
                "exists and is writable."
            )
        if self.bucket_mode == "MOUNT_CACHED":
            _logger.warning(
                "MOUNT_CACHED uploads asynchronously, so the newest checkpoint may be incomplete after a preemption "
                "and fail verification. Set checkpoint.allow_older=true to resume from the previous checkpoint."
            )

    def write(self, plan: Plan) -> None:
        write_key(plan.run_dir)
        (plan.run_dir / TASK).write_text(self.describe(plan))

    def submit(self, plan: Plan) -> str:
        if shutil.which(self.sky[0]) is None:
            raise ConfigError(
                f"{self.sky[0]} not found. Install SkyPilot in a separate environment: "
                "uv tool install 'skypilot[CLOUD]'."
            )
        self.write(plan)
        task = plan.run_dir / TASK
        name = job_name(plan)
        how = ["jobs", "launch", "--name", name] if self.managed else ["launch", "--cluster", name]
        secrets = [word for key in plan.secrets for word in ("--secret", key)]
        command = [*self.sky, *how, "--yes", "--detach-run", *secrets, str(task)]
        if subprocess.run(command, env={**os.environ, **plan.secrets}, check=False).returncode:  # prints the cost
            raise ConfigError(f"SkyPilot rejected the task {task}; see its output above.")
        return name

    def describe(self, plan: Plan) -> str:
        shared = self.checkpoint_bucket is not None and self.checkpoint_bucket.startswith("/")
        root = self.checkpoint_bucket if shared else self.mount if self.checkpoint_bucket else "~/runs"
        return render_template(
            "skypilot.yaml.j2",
            run_id=plan.run_dir.name,
            name=job_name(plan),
            nodes=plan.cluster.nodes,
            workdir=os.getcwd(),
            resources=self._resources(),
            run_files=_RUN_FILES,
            run_dir=str(plan.run_dir),
            bucket=None if shared else self.checkpoint_bucket,
            bucket_mode=self.bucket_mode,
            mount=self.mount,
            variables=dict(plan.environment),
            secrets=list(plan.secrets),
            setup=self.setup or ["command -v uv || pip install uv", "uv sync --locked"],
            python=self.python or "uv run --locked python",
            run=Path(str(root), *plan.run_dir.parts[-2:]),
        )

    def _resources(self) -> dict[str, Any]:
        named = {
            "infra": self.infra,
            "accelerators": self.accelerators,
            "cpus": self.cpus,
            "memory": self.memory,
            "image_id": self.image,
            "use_spot": self.spot or None,
            "job_recovery": self._recovery() if self.managed else None,
        }
        return {**{key: value for key, value in named.items() if value is not None}, **self.resources}

    def _recovery(self) -> dict[str, Any]:
        """Return SkyPilot's recovery options, which also restart a preempted run that saved."""
        given = self.job_recovery if self.job_recovery is not None else self.spot_recovery
        own = {"strategy": given} if isinstance(given, str) else dict(given or {})
        codes = {"recover_on_exit_codes": [PREEMPTED], "max_restarts_on_errors": self.restarts_on_errors}
        return {**codes, **own}

    def state(self, job: str) -> str | None:
        command = [*self.sky, "jobs", "queue", "--output", "json"]
        try:
            listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"{self.sky[0]} failed to report the job state: {error}") from error
        states = [str(each.get("status")) for each in listed if each.get("job_name") == job]
        return None if not states or states[0].startswith(_OVER) else states[0]

    def log_command(self, job: str, *, follow: bool) -> Sequence[str]:
        which = ["jobs", "logs", "--name", job] if self.managed else ["logs", job]
        return [*self.sky, *which, *([] if follow else ["--no-follow"])]

    def cancel(self, job: str) -> None:
        how = ["jobs", "cancel", "--name", job] if self.managed else ["cancel", "--all", job]
        if subprocess.run([*self.sky, *how, "--yes"], check=False).returncode:
            raise ConfigError(f"SkyPilot failed to cancel {job}; see its output above.")
