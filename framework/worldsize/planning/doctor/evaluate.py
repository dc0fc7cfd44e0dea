"""Everything that was found → one report."""

from __future__ import annotations

from worldsize.core import Cluster
from worldsize.planning.doctor import hosts, links, network
from worldsize.planning.doctor.edges import measured
from worldsize.planning.doctor.found import Found
from worldsize.planning.doctor.report import Check, Report


def evaluate(found: Found, cluster: Cluster, *, needed_bytes: float) -> Report:
    """``needed_bytes``: of disk, for two checkpoints."""
    checks: list[Check] = [
        *network.answers(found),
        *network.meeting(found),
        *hosts.alike(found),
        *hosts.data(found),
        *hosts.folder(found),
        *hosts.disk(found, needed_bytes=needed_bytes),
        *hosts.clock(found),
        *(hosts.devices(found, per_node=cluster.processes_per_node) if cluster.device == "cuda" else ()),
        *network.interfaces(found),
        *network.collective(found),
        *links.checks(found, cluster),
    ]
    names = [check.check for check in checks]
    checks.sort(key=lambda check: names.index(check.check))  # those of one name together
    between = measured(found.edges, cluster.processes_per_node)
    left_out = ("versions", "nonce")
    told = [{key: value for key, value in facts.items() if key not in left_out} for facts in found.hosts.values()]
    return Report(checks, links.tiers(between, found.rings), links.pairs(between, found), told)
