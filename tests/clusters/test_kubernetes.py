"""Kubernetes manifests are validated against its published schemas, and their pods' commands run locally."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.clusters.doctor_job import DoctorJob
from tests.clusters.witness import witness

pytestmark = pytest.mark.heavy

VERSIONS = ("1.28", "1.31", "1.34")
BASE = ("recipe=digits", "steps=20", "reproducibility=elastic", "cluster.threads=1", "+cluster=kubernetes")
VOLUME = ("cluster.image=images.example/digits@sha256:" + "0123" * 16, "cluster.volumes=[{claim: shared, path: /runs}]")
ROLES = ("strategy=parameter_server", "strategy.servers=2", "cluster.nodes=3", "cluster.processes_per_node=2")
SHAPES: dict[str, tuple[str, ...]] = {
    "ddp": ("cluster.nodes=2", "cluster.processes_per_node=2"),
    "gpus": (
        *("cluster.nodes=4", "cluster.gpus_per_node=8", "logical_ranks=32"),
        *("cluster.memory=64Gi", "cluster.service_account=trainer"),
    ),
    "roles": ROLES,
    "mixed": (*ROLES, "strategy.servers=1", "logical_ranks=20", "batch_size=80"),
}


def shown(train: Any, *options: str) -> list[dict[str, Any]]:
    run = train(*BASE, *VOLUME, *options, "launch=show")
    assert run.code == 0, run.error
    return list(yaml.safe_load_all(run.output))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_manifests_are_valid_for_jobset_and_for_three_versions_of_kubernetes(train: Any, shape: str, kind: str) -> None:
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet  # type: ignore[import-untyped]  # slow import

    documents = shown(train, *SHAPES[shape], f"cluster.kind={kind}")
    names = {document["metadata"]["name"] for document in documents}
    assert len(names) == 1
    assert len(names.pop()) <= 40
    for document in documents:
        if document["kind"] != "JobSet":
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
            continue
        parsed = JobsetV1alpha2JobSet.from_dict(document)
        assert parsed is not None
        assert parsed.to_dict()["spec"] == document["spec"]  # JobSet accepts every key
        for part in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **part["template"]}
            for version in VERSIONS:
                kubernetes_validate.validate(job, version, strict=True)


def test_roles_are_replicated_jobs_whose_pods_are_numbered_consecutively(train: Any) -> None:
    (jobset,) = [document for document in shown(train, *ROLES) if document["kind"] == "JobSet"]
    parts = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    assert {name: spec["completions"] for name, spec in parts.items()} == {"server": 1, "worker": 2}
    assert variables(parts["worker"])["WORLDSIZE_NODE_OFFSET"] == "1"
    name = jobset["metadata"]["name"]
    assert variables(parts["worker"])["WORLDSIZE_FIRST"] == f"{name}-server-0-0.{name}"


def variables(spec: Any) -> dict[str, str]:
    (container,) = spec["template"]["spec"]["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}


def ended_pods(
    documents: dict[str, Any], tmp_path: Path, environment: dict[str, str]
) -> tuple[list[subprocess.Popen[str]], list[str]]:
    """Run the pod commands of an indexed Job locally, and return the processes and their output."""
    spec = documents["Job"]["spec"]
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (files,) = [
        source["configMap"]["items"]
        for volume in spec["template"]["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
        if "configMap" in source
    ]
    places = {file["key"]: file["path"] for file in files}
    for key, text in {**documents["ConfigMap"]["data"], **documents["Secret"]["stringData"]}.items():
        place = mounted / places.get(key, key)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (container,) = spec["template"]["spec"]["containers"]
    words = [str(mounted) if word == "/etc/worldsize/run" else word for word in container["command"]]
    pods = [
        subprocess.Popen(
            words,
            cwd=tmp_path,
            env={
                **environment,
                **variables(spec),
                "WORLDSIZE_FIRST": "127.0.0.1",
                "JOB_COMPLETION_INDEX": str(index),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(spec["completions"])
    ]
    return pods, [pod.communicate(timeout=240)[0] for pod in pods]


def test_pods_that_kubernetes_would_start_train_to_the_bits_of_one_machine(
    train: Any, command: Any, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    applied = tmp_path / "applied.yaml"
    kubectl = tmp_path / "kubectl"
    # a kubectl that saves applied manifests and prints its arguments for logs
    kubectl.write_text(f'#!/bin/sh\n[ $2 = apply ] && cat > {applied}\n[ $2 = logs ] && echo "$@"\nexit 0\n')
    kubectl.chmod(0o755)
    own = (f"launcher.kubectl=[{kubectl}]", f"launcher.python={warm_python}", f"cluster.run_root={tmp_path}/pods")
    volume = f"cluster.volumes=[{{claim: shared, path: {tmp_path}/pods}}]"
    shared = tmp_path / "shared"  # the pods cannot access it
    run = train(
        *BASE,
        *VOLUME,
        *SHAPES["ddp"],
        *own,
        volume,
        "cluster.kind=job",
        logger=witness(shared),
        WORLDSIZE_PLUGINS=str(shared),
    )
    assert run.code == 0, run.error
    assert "submitted" in run.output
    logs = command("logs", str(run.folder), cwd=tmp_path, environment=environment_without_wandb)
    documents = {document["kind"]: document for document in yaml.safe_load_all(applied.read_text())}
    name = documents["Job"]["metadata"]["name"]
    assert logs.stdout.split() == [
        "--namespace=default",
        "logs",
        "--selector",
        f"worldsize/run={name}",
        "--prefix",
        "--tail=-1",
    ]
    pods, outputs = ended_pods(documents, tmp_path, environment_without_wandb)
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    (result,) = (tmp_path / "pods").rglob("result.json")
    assert (result.parent / "witness.txt").read_text() == f"{result.parent}/plugins/plugins/witness/logger.py"
    alone = train(*BASE[:4], "cluster.processes=4").json("result.json")
    assert json.loads(result.read_text())["state_digest"] == alone["state_digest"]


@pytest.mark.parametrize("launch", ["show", "write"])
def test_no_key_is_shown(train: Any, command: Any, environment_without_wandb: dict[str, str], launch: str) -> None:
    run = train(*BASE, *VOLUME, *SHAPES["ddp"], f"launch={launch}")
    shown = run.output.partition("written to")[0]
    (secret,) = [document for document in yaml.safe_load_all(shown) if document["kind"] == "Secret"]
    assert secret["stringData"] == {"agents.key": "(created at launch)"}
    if launch == "write":
        file = run.folder / "kubernetes.yaml"
        (secret,) = [document for document in yaml.safe_load_all(file.read_text()) if document["kind"] == "Secret"]
        assert secret["stringData"] == {"agents.key": (run.folder / "agents.key").read_text()}
        assert file.stat().st_mode & 0o77 == 0, "only this user may read it"
        words = ("resume", str(run.folder), "steps=30")
        refused = command(*words, cwd=run.folder, environment=environment_without_wandb)
        assert (refused.returncode, "Remove the new options" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (VOLUME[1:], "requires cluster.image"),
        (VOLUME[:1], "is not on any of cluster.volumes"),
        ((*VOLUME, "cluster.kind=pod"), "Available: auto, job, jobset"),
        ((*VOLUME, "launcher.kubectl=[nowhere]"), "nowhere not found"),
    ],
)
def test_what_cannot_be_applied_is_refused(train: Any, options: tuple[str, ...], message: str) -> None:
    run = train(*BASE, *SHAPES["ddp"], *options)
    assert run.code == 2
    assert message in run.error


def test_an_image_without_a_digest_gives_a_warning(train: Any) -> None:
    run = train(*BASE, VOLUME[1], "cluster.image=images.example/digits:latest", *SHAPES["ddp"], "launch=show")
    assert run.code == 0
    assert "is specified without a digest" in run.error
    required = ("cluster.image=images.example/digits:latest", "cluster.image_digest=required")
    refused = train(*BASE, VOLUME[1], *required, *SHAPES["ddp"])
    assert (refused.code, "is specified without a digest" in refused.error) == (2, True)


def test_doctor_reads_the_report_in_the_log_of_the_pods(
    tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    """The job examines the pods, and writes its report to its log and to the run folder on the volume."""
    applied, log, kubectl = tmp_path / "applied.yaml", tmp_path / "log", tmp_path / "kubectl"
    kubectl.write_text(
        f"#!/bin/sh\n[ $2 = apply ] && cat > {applied}.part && mv {applied}.part {applied}\n"
        f"[ $2 = get ] && [ ! -f {log} ] && echo '{{\"status\": {{}}}}'\n"
        f"[ $2 = logs ] && cat {log}\nexit 0\n"
    )
    kubectl.chmod(0o755)
    own = (f"launcher.kubectl=[{kubectl}]", f"launcher.python={warm_python}", f"cluster.run_root={tmp_path}/pods")
    volume = f"cluster.volumes=[{{claim: shared, path: {tmp_path}/pods}}]"
    words = (*BASE, *VOLUME, *SHAPES["ddp"], *own, volume, "cluster.kind=job")
    doctor = DoctorJob(
        words, python=warm_python, folder=tmp_path, environment=environment_without_wandb, submitted=applied
    )
    documents = {document["kind"]: document for document in yaml.safe_load_all(applied.read_text())}
    pods, outputs = ended_pods(documents, tmp_path, environment_without_wandb)
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    lines = [f"[pod/{number}/worldsize] {line}\n" for number, text in enumerate(outputs) for line in text.splitlines()]
    doctor.check(log, "".join(lines), tmp_path / "pods")
