"""Write run folders as runs leave them, with known figures and without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldsize.record.manifest import write_manifest
from worldsize.record.run_directory import RunDirectory

START = 1_795_000_000.0
HOSTILE = "<script>alert('x')</script>&\"$_{\ud800"


def write_run(
    folder: Path,
    *,
    steps: int = 200,
    ranks: int = 4,
    nodes: int = 2,
    attempts: Sequence[dict[str, Any]] | None = None,
    phases: bool = True,
    servers: int = 0,
    loss: float = 2.0,
    overrides: Sequence[str] = ("recipe=digits",),
    metric: str = "accuracy",
    **manifest: Any,
) -> Path:
    """Write a run of ``steps`` steps, all of them logged; its last rank computes 20 % longer."""
    (folder / "timing").mkdir(parents=True)
    (folder / "config.yaml").write_text("key: never-to-be-shown\n")
    own = [0.010 * (1.2 if rank == ranks - 1 else 1 + 0.01 * rank) for rank in range(ranks)]
    lines = []
    for step in range(1, steps + 1):
        facts = {"facts": {"servers": [_load(index) for index in range(servers)]}} if servers else {}
        lines.append({"event": "step", **_step(step, own, loss), **facts})
        if step % 40 == 0:
            lines.append({"event": "evaluation", "step": step, "metrics": {metric: 1 - 1 / (1 + step / 20)}})
    _write_lines(folder / "metrics.jsonl", lines)
    for rank in range(ranks):
        timing = [_timing(step, own[rank], max(own), phases) for step in range(1, steps + 1)]
        path = RunDirectory(folder).get_timing_file(rank)
        path.parent.mkdir(exist_ok=True)
        _write_lines(path, timing)
    facts = _manifest(
        folder.name, ranks, nodes, servers, [attempt(1, steps=[0, steps])] if attempts is None else list(attempts)
    )
    write_manifest(folder / "run_manifest.json", {**facts, "overrides": list(overrides), **manifest})
    return folder


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _step(step: int, own: Sequence[float], loss: float) -> dict[str, Any]:
    return {
        "step": step,
        "samples": 96 * step,
        "loss": loss / (1 + step / 30) + 0.03 * math.sin(step),
        "lr": 0.005 * (1 - step / 250),
        "grad_norm": None,
        "skipped": 0,
        "data_seconds": 0.001,
        "step_seconds": [max(own) + 0.003 + 0.0002 * (step * rank % 3) for rank in range(len(own))],
        "samples_per_second": 96 / (max(own) + 0.004),
    }


def _timing(step: int, own: float, slowest: float, phases: bool) -> dict[str, Any]:
    split = {"compute_seconds": own, "communication_seconds": slowest - own + 0.002, "update_seconds": 0.001}
    times = {"step": step, "step_seconds": slowest + 0.003, "data_seconds": 0.001 + 0.0005 * (step % 50 == 0)}
    return {**times, **(split if phases else {})}


def _load(index: int) -> dict[str, Any]:
    table = {"rows": 900, "evicted": 0, "missed": 0, "hottest": [[7, 30 + index], [3, 11]]}
    traffic = {"pushes": 4, "pulls": 4, "bytes_in": 80_000, "bytes_out": 70_000 + 9000 * index}
    state = {"step": 1, "lost_updates": 0, "refused": 0, "longest_queue": 1 + index, "seconds": 0.02}
    return {**state, **traffic, "tables": {"words": table}}


def attempt(number: int, *, steps: Sequence[int] | None, reason: str = "completed", **facts: Any) -> dict[str, Any]:
    """Return the record of an attempt of 60 s that starts 5 s after the last, and needs 4 s to its first step."""
    begun = START + 65 * (number - 1)
    return {
        "number": number,
        "start": "2026-11-18T08:26:40+00:00",
        "start_at": begun,
        "end": None,
        "end_at": begun + 60,
        "steps": steps,
        "first_step_at": begun + 4 if steps else None,
        "exit_reason": reason,
        "exit_code": 0 if reason == "completed" else 1,
        "hosts": ["gpu-a", "gpu-b"],
        "world_size": 4,
        "pid": 1,
        **facts,
    }


def _manifest(name: str, ranks: int, nodes: int, servers: int, attempts: list[dict[str, Any]]) -> dict[str, Any]:
    roles = [{"role": "server", "processes": servers}, {"role": "worker", "processes": ranks}]
    total = servers + ranks
    return {
        "run_id": name,
        "parent_run": None,
        "attempts": attempts,
        "command": ["/somewhere/train.py"],
        "config": {"steps": 200, "batch_size": 96, "precision": "fp32", "run": {"group": None}, "faults": []},
        "config_sha256": "ab" * 32,
        "reproducibility": {"level": "bitwise", "why": "on this CPU"},
        "code": {"commit": "c0ffee" * 6, "dirty": False},
        "environment": {"python": "3.11.7", "platform": "Linux", "torch": {"version": "2.15.0"}, "packages": {}},
        "hardware": [{"host": "gpu-a", "cpu": "EPYC", "cores": 64, "memory": 2**38, "gpus": []}],
        "cluster": {
            "name": "slurm",
            "nodes": nodes,
            "processes": total,
            "processes_per_node": total // nodes,
            "backend": "gloo",
            "device": "cpu",
            "roles": roles,
            "links": {"network": {"bandwidth": 1.25e9, "latency": 5e-5}},
            "groups": {"data": [list(range(servers, total))]},
        },
        "determinism": {"seed": 7, "logical_ranks": 4},
        "data": {"files": {}, "sha256": ""},
        "results": None,
    }
