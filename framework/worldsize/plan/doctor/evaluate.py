"""Evaluates all findings into one report."""

from __future__ import annotations

from worldsize.core import Cluster
from worldsize.plan.doctor import hosts, link_checks
from worldsize.plan.doctor.findings import Findings, measured, sharing
from worldsize.plan.doctor.report import Check, Report


def evaluate(findings: Findings, cluster: Cluster, *, needed_bytes: float) -> Report:
    """Check ``findings``, also against ``cluster``; two checkpoints take ``needed_bytes``."""
    checks: list[Check] = [
        *hosts.answers(findings),
        *hosts.meeting(findings),
        *hosts.matches(findings),
        *hosts.data(findings),
        *hosts.folder(findings),
        *hosts.disk(findings, needed_bytes=needed_bytes),
        *hosts.clock(findings),
        *hosts.cpus(findings, cluster),
        *(hosts.devices(findings, per_node=cluster.processes_per_node) if cluster.device != "cpu" else ()),
        *hosts.interfaces(findings),
        *hosts.collective(findings),
        *link_checks.checks(findings, cluster),
    ]
    names = [check.check for check in checks]
    checks.sort(key=lambda check: names.index(check.check))  # grouped by name
    between = measured(findings.edges, cluster.processes_per_node, sharing(cluster))
    left_out = ("versions", "nonce")
    facts_of_hosts = [
        {key: value for key, value in facts.items() if key not in left_out} for facts in findings.hosts.values()
    ]
    return Report(
        checks, link_checks.tiers(between, findings.rings), link_checks.pairs(between, findings), facts_of_hosts
    )
