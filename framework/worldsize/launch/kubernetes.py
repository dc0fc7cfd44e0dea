"""Launches runs on Kubernetes with kubectl, as a JobSet or else an indexed Job."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

from worldsize.core import BatchLauncher, Cluster, ConfigError, OneOf, Plan, Range
from worldsize.core.launcher import cluster_option
from worldsize.files import read_regular
from worldsize.launch.image_launcher import ImageLauncher, job_name
from worldsize.launch.node import NodeLauncher
from worldsize.launch.templates import render_template
from worldsize.net.credentials import read_key, write_key
from worldsize.strict_json import LARGEST

_RUN_FILES = "/etc/worldsize/run"
_FILES = ("config.yaml", "overrides.yaml", "run_manifest.json")  # an examination has only config.yaml
MANIFESTS = "kubernetes.yaml"
_PATIENCE = 60.0  # timeout of kubectl in seconds


@final
@dataclass(frozen=True)
class Kubernetes(ImageLauncher, NodeLauncher, BatchLauncher):
    """Runs an agent in one pod per node; the image must contain the code and the environment."""

    run_root: str = cluster_option("/runs")  # root of the run folders in the pods; must be on one of the volumes
    workdir: str | None = cluster_option(None)  # the project's folder in the image
    namespace: str = cluster_option("default")
    kind: Annotated[str, OneOf("auto", "jobset", "job")] = cluster_option("auto")  # auto: jobset if installed
    volumes: Sequence[Mapping[str, str]] = cluster_option(())  # shared by all pods: [{claim: NAME, path: /runs}]
    service_account: str | None = cluster_option(None)
    node_selector: Mapping[str, str] = cluster_option({})
    gpus_per_node: Annotated[int | None, Range(least=0)] = cluster_option(None)
    cpus: str | None = cluster_option(None)
    memory: str | None = cluster_option(None)  # per pod, e.g. 64Gi
    pod_restarts: Annotated[int, Range(least=0)] = 3  # maximum restarts of failed pods
    python: str = "python"  # interpreter in the image
    kubectl: Sequence[str] = ("kubectl",)  # command and its options, e.g. [kubectl, --context, mine]
    shares_run_folder = False
    finds_job_by = ("namespace",)

    def check(self, cluster: Cluster) -> None:
        if not self.image:
            raise ConfigError(
                "the Kubernetes launcher requires cluster.image. Set it to an image with the code and the environment."
            )
        self.check_image()
        if not any(Path(self.run_root).is_relative_to(each["path"]) for each in self.volumes):
            raise ConfigError(
                f"cluster.run_root={self.run_root} is not on any of cluster.volumes, so the run folder would be lost "
                "with its pod. Set cluster.volumes='[{claim: NAME, path: /runs}]'."
            )

    def write(self, plan: Plan) -> None:
        """Write the manifests, including the run's key but excluding secrets in the configuration."""
        manifests = plan.run_dir / MANIFESTS
        manifests.touch(mode=0o600)
        manifests.write_text(self._full_manifests(plan, {}, jobset=self.kind != "job"))

    def submit(self, plan: Plan) -> str:
        if shutil.which(self.kubectl[0]) is None:
            raise ConfigError(
                f"{self.kubectl[0]} not found. Install it, or apply the manifests printed by launch=show."
            )
        secrets = {"secrets": plan.secrets["WORLDSIZE_SECRETS"]} if plan.secrets else {}
        jobset = self._has_jobsets()
        self._run_kubectl("apply", "-f", "-", text=self._full_manifests(plan, secrets, jobset=jobset))
        return f"{'jobset' if jobset else 'job'}/{job_name(plan)}"

    def _full_manifests(self, plan: Plan, secrets: Mapping[str, str], *, jobset: bool) -> str:
        """Render the manifests with the files, the key and the secrets for the pods."""
        write_key(plan.run_dir)
        keys = {"agents.key": read_key(plan.run_dir).secret.decode()}
        return self._manifests(plan, _collect_files(plan.run_dir), {**keys, **secrets}, jobset=jobset)

    def describe(self, plan: Plan) -> str:
        hidden = {"agents.key": "(created at launch)"}
        return self._manifests(plan, {}, hidden, jobset=self.kind != "job")

    def state(self, job: str) -> str | None:
        """Return the job's last condition type, or "Running"; None if the job is over."""
        description = self._run_kubectl("get", job, "-o", "json", "--ignore-not-found")
        if not description.strip():  # the job was deleted or cleaned up
            return None
        status = json.loads(description).get("status", {})
        conditions = [each["type"] for each in status.get("conditions", []) if each["status"] == "True"]
        return None if {"Complete", "Completed", "Failed"} & set(conditions) else (conditions or ["Running"])[-1]

    def log_command(self, job: str, *, follow: bool) -> Sequence[str]:
        which = ["--selector", f"worldsize/run={job.partition('/')[2]}", "--prefix", "--tail=-1"]
        how = ["--follow", "--max-log-requests=1000"] if follow else []
        return [*self.kubectl, f"--namespace={self.namespace}", "logs", *which, *how]

    def cancel(self, job: str) -> None:
        self._run_kubectl("delete", job)

    def _has_jobsets(self) -> bool:
        if self.kind != "auto":
            return self.kind == "jobset"
        return "jobsets" in self._run_kubectl("api-resources", "--api-group=jobset.x-k8s.io", "--output=name")

    def _run_kubectl(self, *words: str, text: str | None = None) -> str:
        """Run kubectl; return its output.

        Raises:
            ConfigError: kubectl fails; the error includes its message.
        """
        command = [*self.kubectl, f"--namespace={self.namespace}", *words]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"{self.kubectl[0]} failed: {error}. Check that this machine can reach the cluster."
            ) from error
        if done.returncode:
            raise ConfigError(f"kubectl failed: {done.stderr.strip()}")
        return done.stdout

    def _manifests(self, plan: Plan, files: Mapping[str, str], secrets: Mapping[str, str], *, jobset: bool) -> str:
        name, parts = job_name(plan), _list_jobs(plan)
        run = Path(self.run_root, *plan.run_dir.parts[-2:])
        first = f"{name}-{parts[0][0]}-0-0.{name}" if jobset else f"{name}-0.{name}"
        place = {"WORLDSIZE_NODES": str(plan.cluster.nodes), "WORLDSIZE_FIRST": first}
        limits = {"nvidia.com/gpu": self.gpus_per_node, "cpu": self.cpus, "memory": self.memory}
        return render_template(
            "kubernetes.yaml.j2",
            run_id=plan.run_dir.name,
            name=name,
            namespace=self.namespace,
            jobset=jobset,
            parts=parts,
            nodes=plan.cluster.nodes,
            max_restarts=self.pod_restarts,
            grace=int(self.save_grace) + 10,
            service_account=self.service_account,
            node_selector=dict(self.node_selector),
            image=self.image,
            command=[self.python, "-m", "worldsize", "agent", "--from", _RUN_FILES, str(run)],
            workdir=self.workdir,
            variables={**plan.environment, **place},
            limits={key: str(value) for key, value in limits.items() if value is not None},
            run_files=_RUN_FILES,
            volumes=self.volumes,
            files={_build_key(path): text for path, text in files.items()},
            paths={_build_key(path): path for path in files},
            secrets=dict(secrets),
        )


def _collect_files(run: Path) -> dict[str, str]:
    """Collect the files that pods copy into their run folders, by path.

    Raises:
        ConfigError: a plugin copied to the run folder contains a file that is not text.
    """
    there = [path for path in _FILES if (run / path).exists()]
    paths = [*there, *(file.relative_to(run).as_posix() for file in run.glob("plugins/**/*") if file.is_file())]
    try:
        return {path: read_regular(run / path, at_most=LARGEST).decode() for path in paths}
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the plugins in {run / 'plugins'} cannot be stored in a ConfigMap: {error}. Add them to the image."
        ) from error


def _build_key(path: str) -> str:
    return path.replace("/", "..")  # ConfigMap keys must not have slashes


def _list_jobs(plan: Plan) -> list[tuple[str, int, int]]:
    """List the jobs as (role, nodes, first node); only one if a node has several roles."""
    size = plan.cluster.processes_per_node
    if any(role.processes % size for role in plan.roles.values()):
        return [("node", plan.cluster.nodes, 0)]
    parts, before = [], 0
    for name, role in plan.roles.items():
        parts.append((name, role.processes // size, before))
        before += role.processes // size
    return parts
