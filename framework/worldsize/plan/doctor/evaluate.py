"""Evaluates all findings into one report."""

from __future__ import annotations

from worldsize.core import Cluster
from worldsize.plan.doctor import hosts, link_checks
from worldsize.plan.doctor.findings import Findings, aggregate_links, count_sharing_ranks
from worldsize.plan.doctor.report import Check, Report


def evaluate(findings: Findings, cluster: Cluster, *, needed_bytes: float) -> Report:
    """Return the report on ``findings``; ``needed_bytes``: disk space of two checkpoints."""
    checks: list[Check] = [
        *hosts.check_answers(findings),
        *hosts.check_rendezvous(findings),
        *hosts.compare_hosts(findings),
        *hosts.check_data_files(findings),
        *hosts.check_run_folder(findings),
        *hosts.check_disk(findings, needed_bytes=needed_bytes),
        *hosts.check_clocks(findings),
        *hosts.check_cpus(findings, cluster),
        *(hosts.check_devices(findings, per_node=cluster.processes_per_node) if cluster.device != "cpu" else ()),
        *hosts.interfaces(findings),
        *hosts.collective(findings),
        *link_checks.check_links(findings, cluster),
    ]
    names = [check.check for check in checks]
    checks.sort(key=lambda check: names.index(check.check))  # grouped by name
    between = aggregate_links(findings.edges, cluster.processes_per_node, count_sharing_ranks(cluster))
    left_out = ("versions", "nonce")
    facts_of_hosts = [
        {key: value for key, value in facts.items() if key not in left_out} for facts in findings.hosts.values()
    ]
    return Report(
        checks,
        link_checks.summarize_tiers(between, findings.rings),
        link_checks.list_pairs(between, findings),
        facts_of_hosts,
    )
