"""Checks how the hosts connect: names, the rendezvous port, interfaces, a first collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from worldsize.messages import last_error
from worldsize.plan.doctor.findings import Facts, Findings
from worldsize.plan.doctor.report import Check


def answers(findings: Findings) -> Iterator[Check]:
    """Check that every host has reported, in the run's folder or to the first host."""
    for node in range(findings.nodes):
        if node in findings.hosts:
            yield Check("answers", findings.name(node), True, "yes")
            continue
        remedy = (
            "Read what its agent says, above or in the logs of the run's folder. It must see that folder: set run.root "
            "to one that all hosts share and may write."
        )
        yield Check("answers", findings.name(node), False, f"node {node} has left nothing in the run's folder", remedy)


def meeting(findings: Findings) -> Iterator[Check]:
    """Check that the first host's name can be resolved, and that its port answers."""
    came = {facts["node"] for facts in findings.meeting.get("hosts", ())}
    for node, facts in findings.hosts.items():
        first = facts["first"]
        if first is None:
            continue
        name, port = first["name"], first["port"]
        if first["error"]:
            remedy = "Name the hosts so that all of them know each other: /etc/hosts, DNS, or addresses in their place."
            yield Check("resolves", facts["host"], False, f"{name} leads nowhere: {first['error']}", remedy)
        else:
            yield Check("resolves", facts["host"], True, f"{name} is known")
        if why := facts.get("refused"):
            remedy = f"Free port {port} there, or name another one with cluster.port."
            yield Check("rendezvous", facts["host"], False, why, remedy)
        elif "unreached" in facts or (findings.meeting and node not in came):
            detail = f"port {port} of {name} does not answer {facts['host']}{_because(facts)}"
            remedy = f"Open TCP port {port} of {name} to {facts['host']} (firewall, security group), or name another "
            yield Check("rendezvous", facts["host"], False, detail, f"{remedy}one with cluster.port.")
        elif node in came:
            yield Check("rendezvous", facts["host"], True, f"port {port} of {name}")


def _because(facts: Facts) -> str:
    return f": {facts['unreached']}" if "unreached" in facts else ""


def interfaces(findings: Findings) -> Iterator[Check]:
    """Check that the interface of the collectives exists, and that other hosts can reach its address."""
    unreached = _unreached(findings)
    for node, facts in findings.hosts.items():
        interface = facts["interface"]
        if interface is None:
            continue
        if interface["error"]:
            yield Check("interface", facts["host"], False, interface["error"], _other(facts))
            continue
        name = f"{interface['name']} {interface['address']}"
        deaf = [source for source, targets in unreached.items() if node in targets]
        if deaf:
            detail = f"{name} is not reached by {', '.join(map(findings.name, deaf))}: {unreached[deaf[0]][node]}"
            yield Check("interface", facts["host"], False, detail, _other(facts))
        else:
            reached_text = ", reached by the others" if node in unreached and len(unreached) > 1 else ""
            yield Check("interface", facts["host"], True, f"{interface['name']}{reached_text}")


def _unreached(findings: Findings) -> dict[int, dict[int, str]]:
    tried: Mapping[str, Mapping[str, str]] = findings.meeting.get("unreached", {})
    return {int(source): {int(target): why for target, why in lost.items()} for source, lost in tried.items()}


def _other(facts: Facts) -> str:
    """Suggest a suitable interface."""
    leads, own = facts["interface"]["leads"], facts["interface"]["name"]
    if leads and leads != own:
        return (
            f"{leads} ({facts['interfaces'][leads]['address']}) leads to the first host: set cluster.interface={leads}."
        )
    return "Open all TCP ports between the hosts (ranks listen on any), or name another with cluster.interface."


def others(facts: Facts, used: str | None) -> str:
    """List the interfaces of a host other than the one in use."""
    named = [f"{name} {each['address']}" for name, each in facts["interfaces"].items() if name not in (used, "lo")]
    return ", ".join(named)


def collective(findings: Findings) -> Iterator[Check]:
    """Check that the ranks have connected and summed a few bytes."""
    if not findings.meeting or not findings.hosts:
        return
    everyone = ", ".join(findings.name(node) for node in findings.hosts)
    if skipped := findings.meeting.get("skipped"):
        yield Check("all-reduce", everyone, False, f"not tried: {skipped}", "Mend what is red above, then look again.")
        return
    late = [rank for rank in findings.ranks if not rank["joined"]]
    failure = findings.meeting.get("outcome", {}).get("failure")
    if not late and not failure:
        yield Check("all-reduce", everyone, True, f"{len(findings.ranks)} ranks agree")
        return
    hosts = ", ".join(dict.fromkeys(str(rank["host"]) for rank in late)) or everyone
    if failure and len(late) in (0, len(findings.ranks)):
        hosts = _host_of(failure, findings) or hosts
    who = f"ranks {', '.join(str(rank['rank']) for rank in late)} did not finish it; " if late else ""
    cause = f"{failure['role']} {failure['rank']}: {last_error(failure['cause'])}" if failure else "no cause"
    remedy = "Read the logs of these ranks in the run's folder; with NCCL, its own log lies beside them."
    yield Check("all-reduce", hosts, False, f"{who}{cause}", remedy)


def _host_of(failure: Facts, findings: Findings) -> str | None:
    """Return the place of the first failure: a host or a rank."""
    if failure["role"] == "node":
        return findings.name(failure["rank"])
    return next((str(rank["host"]) for rank in findings.ranks if rank["rank"] == failure["rank"]), None)
