"""Compares the code, packages and data of a run's hosts before the run starts."""

from __future__ import annotations

import hashlib
import logging
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import worldsize
from worldsize.config.search_path import foreign_roots, get_bundle_folder, list_search_roots
from worldsize.core import Recipe
from worldsize.data.source import check_paths
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.record.environment import capture_environment
from worldsize.world.environments import Node

_logger = logging.getLogger(__name__)


def collect_host_facts(recipe: Recipe, place: Node) -> dict[str, Any]:
    """Return this host's facts, including those that must or should be equal on all hosts."""
    environment = capture_environment()
    return {
        "node": place.rank,
        "host": socket.gethostname(),
        "must_match": {
            "Python": platform.python_version(),
            "torch": environment["torch"]["version"],
            "NCCL": environment["torch"]["nccl"],
            "packages": _compute_digest(f"{name}=={version}" for name, version in environment["packages"].items()),
            "code": code_digest([root for root in list_search_roots() if root not in foreign_roots()]),
            "data": _describe_data(recipe),
        },
        "should_match": {
            "driver": environment["driver"],
            "lock": lock_digest(),
            "vector instructions": environment["vector_instructions"],
        },
        "versions": environment["packages"],
    }


def lock_digest() -> str | None:
    """Return a digest of uv.lock, from the working directory or worldsize's clone; or None."""
    locks = (folder / "uv.lock" for folder in (Path.cwd(), get_bundle_folder()))
    return next((hashlib.sha256(lock.read_bytes()).hexdigest()[:12] for lock in locks if lock.exists()), None)


def _compute_digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def code_digest(roots: Sequence[Path]) -> str:
    """Return a digest of worldsize's Python files, and of recipes and plugins below ``roots``."""
    own = Path(worldsize.__file__).parent
    folders = [own, *(root / kind for root in roots for kind in ("recipes", "plugins"))]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    return _compute_digest(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)


def _describe_data(recipe: Recipe) -> str:
    try:
        check_paths(recipe)
    except ConfigError as error:
        return f"with missing files ({str(error).rstrip('.')})"
    return data_digest(recipe.files())


def data_digest(files: Mapping[str, Path]) -> str:
    """Return a digest of file names and sizes, or name a missing file.

    The contents are hashed only on the launching host.
    """
    if missing := [name for name in sorted(files) if not files[name].exists()]:
        return f"without {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
    return _compute_digest(f"{name} {files[name].stat().st_size}" for name in sorted(files))


def check_hosts(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]], *, on_mismatch: str) -> None:
    """Raise WorldsizeError if a host's ``must_match`` facts differ from the first host's.

    With ``on_mismatch="warn"``, log a warning instead.
    """
    differences = [
        f"{other['host']} (node {other['node']}) has {name} {its_value}, {first['host']} has {value}"
        for other in others
        for name, value in first["must_match"].items()
        if (its_value := other["must_match"].get(name)) != value
    ]
    if not differences:
        return
    if on_mismatch == "warn":
        _logger.warning("%s", "; ".join(differences))
        return
    raise WorldsizeError(
        f"the hosts differ: {'; '.join(differences)}. Make the hosts identical, or set cluster.on_node_mismatch=warn."
    )
