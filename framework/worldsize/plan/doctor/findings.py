"""Findings that the hosts and processes of a cluster share: JSON files in the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldsize.files import read_regular
from worldsize.strict_json import LARGEST

Facts = Mapping[str, Any]
REPORT = "report"  # name of the facts that say what follows from all others


def write_facts(folder: Path, name: str, facts: Facts) -> None:
    """Write ``name``.json atomically.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    draft = folder / f".{name}_{os.getpid()}"
    draft.write_text(json.dumps(dict(facts)))
    draft.replace(folder / f"{name}.json")


def read_facts(folder: Path, name: str) -> Facts:
    """Read the file of :func:`write_facts`; return an empty mapping if there is none."""
    with suppress(OSError, ValueError):
        facts: Facts = json.loads(read_regular(folder / f"{name}.json", at_most=LARGEST))
        return facts
    return {}


@dataclass(frozen=True)
class Findings:
    """All findings about a cluster."""

    nodes: int  # that the cluster should have
    hosts: Mapping[int, Facts]  # by node
    meeting: Facts = field(default_factory=dict)  # facts that the first host has received from the others
    ranks: Sequence[Facts] = ()  # facts that each process has written about itself
    edges: Sequence[Facts] = ()  # measured links from rank to rank
    rings: Mapping[str, Facts] = field(default_factory=dict)  # measurements of a ring over each tier
    names: Sequence[str] = ()  # of the nodes, where the launcher knows them

    def name(self, node: int) -> str:
        """Return the node's host name from its facts, else from the launcher, else "node 3"."""
        if node in self.hosts:
            return str(self.hosts[node]["host"])
        return self.names[node] if node < len(self.names) else f"node {node}"

    @property
    def first(self) -> Facts | None:
        """The facts of the first host, to compare the others with."""
        return self.hosts[min(self.hosts)] if self.hosts else None


def read_findings(folder: Path, nodes: int, names: Sequence[str] = ()) -> Findings:
    """Read the findings of hosts and ranks in ``folder``; those without any are missing."""
    meeting = read_facts(folder, "meeting")
    hosts = {int(facts["node"]): facts for facts in meeting.get("hosts", ())}
    for path in sorted(folder.glob("node_*.json")):
        facts = read_facts(folder, path.stem)
        # a host's clock relative to the file system's, for hosts that could not be asked
        hosts[int(facts["node"])] = {**facts, "ahead": facts["written"] - path.stat().st_mtime}
    ranks = [read_facts(folder, path.stem) for path in sorted(folder.glob("rank_*.json"))]
    return Findings(nodes, dict(sorted(hosts.items())), meeting, ranks, names=names, **read_facts(folder, "links"))
