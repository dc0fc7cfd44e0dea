"""What a run folder says before the first step: configuration, code, environment, data, shape, claim."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from worldsize.config.places import bundle
from worldsize.config.settings import Settings
from worldsize.core import Cluster, Plan
from worldsize.reproducibility import seeds
from worldsize.reproducibility.code import capture_code
from worldsize.reproducibility.data import fingerprint
from worldsize.reproducibility.environment import (
    capture_environment,
    hardware,
    relevant_variables,
    write_environment,
)
from worldsize.reproducibility.manifest import write_manifest
from worldsize.reproducibility.redact import redacted, redacted_arguments, without_credentials
from worldsize.run_directory import RunDirectory
from worldsize.world.world import role_of


def write_record(settings: Settings, plan: Plan, run: RunDirectory, arguments: Sequence[str]) -> None:
    """Fill the run folder with everything that is known before the start."""
    run.config.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(settings.config))))
    run.overrides.write_text(OmegaConf.to_yaml(OmegaConf.create(redacted_arguments(arguments))))
    code = capture_code(Path.cwd(), exclude=Path(settings.config["run"]["root"]).resolve())
    if code.patch:
        run.patch.write_bytes(code.patch)
    lock = write_environment(run.environment, _project())
    manifest = {
        "run_id": run.id,
        "parent_run": None,
        "attempts": [],
        "config": redacted(settings.config),
        "config_sha256": _digest(settings.config),
        "overrides": redacted_arguments(arguments),
        "command": [without_credentials(sys.argv[0]), *redacted_arguments(arguments)],
        "code": code.describe(),
        "environment": {**capture_environment(), "lock_sha256": lock, "image": None},
        "hardware": [hardware()],
        "cluster": _shape(plan),
        "determinism": _determinism(settings),
        "data": fingerprint(settings.recipe.files()),
        "results": None,
        "claim": _claim(settings),
    }
    write_manifest(run.manifest, manifest)


def _project() -> Path:
    """The folder whose lock made this environment: the working directory's, else the clone's."""
    return next((folder for folder in (Path.cwd(), bundle()) if (folder / "uv.lock").exists()), Path.cwd())


def _digest(config: Any) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _shape(plan: Plan) -> dict[str, Any]:
    cluster = plan.cluster
    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "processes": plan.world_size,
        "processes_per_node": cluster.processes_per_node,
        "backend": cluster.backend,
        "ranks": [_rank(plan, rank) for rank in range(plan.world_size)],
        "links": {tier: asdict(link) for tier, link in cluster.links.items()},
    }


def _rank(plan: Plan, rank: int) -> dict[str, Any]:
    role, role_rank = role_of(rank, plan.roles)
    node, local = divmod(rank, plan.cluster.processes_per_node)
    return {"rank": rank, "role": role, "role_rank": role_rank, "node": node, "device": _device(plan.cluster, local)}


def _device(cluster: Cluster, local_rank: int) -> str:
    return f"cuda:{local_rank}" if cluster.device == "cuda" else "cpu"


def _determinism(settings: Settings) -> dict[str, Any]:
    return {
        "seed": settings.seed,
        "streams": seeds.__doc__,
        "logical_ranks": settings.logical_ranks,
        "threads_per_process": settings.cluster.threads,
        "environment": relevant_variables(os.environ),
        **settings.determinism.describe(),
    }


def _claim(settings: Settings) -> dict[str, str]:
    if settings.determinism.reduce == "ordered":
        why = "a function of configuration and seed at any number of processes that divides the logical ranks"
        return {"level": "bitwise", "why": f"{why}; on this CPU or GPU model and this torch build"}
    if settings.determinism.deterministic:
        why = "deterministic kernels, pinned threads and libraries; sums depend on the number of processes"
        return {"level": "same-topology bitwise", "why": why}
    return {
        "level": "tolerance",
        "why": f"reproducibility={settings.determinism.mode} does not pin kernels and threads",
    }
