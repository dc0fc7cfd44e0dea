"""What must be alike on all hosts of a run."""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import worldsize
from worldsize.config.search_path import bundle, foreign_roots, roots
from worldsize.config.settings import Settings
from worldsize.core import Recipe
from worldsize.errors import WorldsizeError
from worldsize.reproducibility.environment import capture_environment
from worldsize.world.environments import Node


def facts_of(recipe: Recipe, place: Node) -> dict[str, Any]:
    """Which host this is and what must be alike on all hosts, by name; ``also``: what had better be."""
    environment = capture_environment()
    return {
        "node": place.rank,
        "host": socket.gethostname(),
        "alike": {
            "Python": platform.python_version(),
            "torch": environment["torch"]["version"],
            "NCCL": environment["torch"]["nccl"],
            "packages": _digest(f"{name}=={version}" for name, version in environment["packages"].items()),
            "code": code_digest([root for root in roots() if root not in foreign_roots()]),
            "data": data_digest(recipe.files()),
        },
        "also": {
            "driver": environment["driver"],
            "lock": lock_digest(),
            "vector instructions": environment["vector_instructions"],
        },
        "versions": environment["packages"],
    }


def lock_digest() -> str | None:
    """Of the lock of the working directory, else of worldsize's own clone; None: there is none."""
    locks = (folder / "uv.lock" for folder in (Path.cwd(), bundle()))
    return next((hashlib.sha256(lock.read_bytes()).hexdigest()[:12] for lock in locks if lock.exists()), None)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def code_digest(roots: Sequence[Path]) -> str:
    """Of the Python files of worldsize, and of recipes and plugins below ``roots``; the run folder has the others."""
    own = Path(worldsize.__file__).parent
    folders = [own, *(root / kind for root in roots for kind in ("recipes", "plugins"))]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    return _digest(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)


def data_digest(files: Mapping[str, Path]) -> str:
    """Of names and sizes, or what is missing; the contents were hashed where the run was launched."""
    if lost := [name for name in sorted(files) if not files[name].exists()]:
        return f"without {lost[0]}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
    return _digest(f"{name} {files[name].stat().st_size}" for name in sorted(files))


def check_alike(settings: Settings, first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Raise WorldsizeError (or warn, by ``cluster.nodes_differ``) where a host differs from the first."""
    found = [
        f"{other['host']} (node {other['node']}) has {name} {other['alike'].get(name)}, {first['host']} has {value}"
        for other in others
        for name, value in first["alike"].items()
        if other["alike"].get(name) != value
    ]
    if not found:
        return
    if settings.config["cluster"]["nodes_differ"] == "warn":
        print("warning: " + "; ".join(found), file=sys.stderr, flush=True)
        return
    raise WorldsizeError(
        "the hosts differ: " + "; ".join(found) + ". Make them alike, or accept it with cluster.nodes_differ=warn."
    )
