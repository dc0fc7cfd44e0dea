"""What the hosts and processes of an examined cluster leave for each other: JSON files in the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Facts = Mapping[str, Any]


def leave(folder: Path, name: str, facts: Facts) -> None:
    """Write ``name``.json, whole or not at all. Raises OSError."""
    folder.mkdir(exist_ok=True)
    draft = folder / f".{name}_{os.getpid()}"
    draft.write_text(json.dumps(dict(facts)))
    draft.replace(folder / f"{name}.json")


def left(folder: Path, name: str) -> Facts:
    """What :func:`leave` has written; nothing if it is not there."""
    with suppress(OSError, ValueError):
        facts: Facts = json.loads((folder / f"{name}.json").read_text())
        return facts
    return {}


@dataclass(frozen=True)
class Found:
    """Everything that was found. ``meeting``: what the first host has learned from the others.

    ``names``: of the nodes as the launcher knows them, where it does.
    """

    nodes: int
    hosts: Mapping[int, Facts]
    meeting: Facts = field(default_factory=dict)
    ranks: Sequence[Facts] = ()
    edges: Sequence[Facts] = ()
    rings: Mapping[str, Facts] = field(default_factory=dict)
    names: Sequence[str] = ()

    def name(self, node: int) -> str:
        if node in self.hosts:
            return str(self.hosts[node]["host"])
        return self.names[node] if node < len(self.names) else f"node {node}"

    @property
    def first(self) -> Facts | None:
        """The host that the others are compared with."""
        return self.hosts[min(self.hosts)] if self.hosts else None


def read(folder: Path, nodes: int, names: Sequence[str] = ()) -> Found:
    meeting = left(folder, "meeting")
    hosts = {int(facts["node"]): facts for facts in meeting.get("hosts", ())}
    for path in sorted(folder.glob("node_*.json")):
        facts = left(folder, path.stem)
        # a host's clock against that of the file system, for those that nobody has asked
        hosts[int(facts["node"])] = {**facts, "ahead": facts["written"] - path.stat().st_mtime}
    ranks = [left(folder, path.stem) for path in sorted(folder.glob("rank_*.json"))]
    return Found(nodes, dict(sorted(hosts.items())), meeting, ranks, names=names, **left(folder, "links"))
