"""Checks each host by itself and against the first one, and the connections between hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from worldsize.core import Cluster
from worldsize.messages import last_error
from worldsize.plan.doctor.findings import Facts, Findings
from worldsize.plan.doctor.report import Check
from worldsize.world.pinning import FEW_CPUS, few_cpus

SKEW = 1.0  # maximum clock skew in seconds; the earliest of several failures is reported as the cause
_INSTALL = (
    "Install the locked packages on this host (uv sync --locked), or set cluster.python to the right interpreter."
)
_REMEDIES = {
    "Python": "Use the same interpreter on all hosts: cluster.python, a container, or the environment created by uv.",
    "torch": _INSTALL,
    "NCCL": _INSTALL,
    "packages": _INSTALL,
    "code": "Check out the same commit on this host. The next launch overwrites local edits.",
    "data": "Copy the same files to this host, or put them on storage shared by all hosts.",
    "driver": "Install the same driver on all hosts: collectives and kernels differ between versions.",
    "vector instructions": "Ranks on different CPU types may differ bitwise. Use the same CPU type on all "
    "hosts, or set ATEN_CPU_CAPABILITY to a level supported by all of them (default, avx2 or avx512).",
    "lock": "Copy the same uv.lock to this host, and install it (uv sync --locked).",
}


def compare_hosts(findings: Findings) -> Iterator[Check]:
    """Check that software, code and data on each host match the first host."""
    if (first := findings.first) is None:
        return
    for name, value in {**first["must_match"], **first["should_match"]}.items():
        for facts in findings.hosts.values():
            own = {**facts["must_match"], **facts["should_match"]}.get(name)
            if own == value:
                yield Check(name, facts["host"], True, str(value or "none"))
            else:
                detail = f"{own}; {first['host']} has {value}{_versions(facts, first, name)}"
                yield Check(name, facts["host"], False, detail, _REMEDIES[name])


def _versions(facts: Facts, first: Facts, name: str) -> str:
    """List up to five packages that differ, with both versions; empty unless ``name`` is "packages"."""
    if name != "packages":
        return ""
    here, there = facts["versions"], first["versions"]
    differ = [each for each in sorted({*here, *there}) if here.get(each) != there.get(each)]
    shown = [f"{each} {here.get(each, 'missing')} ({there.get(each, 'missing')})" for each in differ[:5]]
    return f": {', '.join(shown)}" + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")


def check_data_files(findings: Findings) -> Iterator[Check]:
    """Check that each host can read the recipe's data files."""
    for facts in findings.hosts.values():
        problems = facts["data"]
        if not problems:
            yield Check("data files", facts["host"], True, "readable")
            continue
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        remedy = "Prepare the data on this host, or put the data on shared storage readable by this user."
        yield Check("data files", facts["host"], False, "; ".join(problems[:3]) + more, remedy)


def check_run_folder(findings: Findings) -> Iterator[Check]:
    """Check that all hosts share the run folder and can write to it."""
    unseen = findings.meeting.get("unseen", {})
    for node, facts in findings.hosts.items():
        path, error = facts["folder"]["path"], facts["folder"]["error"]
        remedy = (
            "Mount the folder with write permission for this user, or set run.root to a folder shared by all hosts."
        )
        if error:
            yield Check("run folder", facts["host"], False, f"failed to write {path}: {error}", remedy)
        elif str(node) in unseen:
            yield Check("run folder", facts["host"], False, f"{path} is not shared: {unseen[str(node)]}", remedy)
        else:
            yield Check("run folder", facts["host"], True, "writable, shared" if findings.nodes > 1 else "written")


def check_disk(findings: Findings, *, needed_bytes: float) -> Iterator[Check]:
    """Check that the disk has ``needed_bytes`` free: a checkpoint is kept while the next one is written."""
    for facts in findings.hosts.values():
        free, path = facts["folder"]["free"], facts["folder"]["path"]
        if free >= needed_bytes:
            yield Check("disk", facts["host"], True, f"enough for two checkpoints ({needed_bytes / 1e9:.2g} GB)")
            continue
        detail = f"{free / 1e9:.3g} GB free at {path}, two checkpoints require {needed_bytes / 1e9:.3g} GB"
        yield Check("disk", facts["host"], False, detail, "Remove old runs, or set run.root to a larger file system.")


def check_clocks(findings: Findings) -> Iterator[Check]:
    """Compare each host's clock with the first host's, measured by messages or else by file timestamps."""
    asked = {int(node): ahead for node, ahead in findings.meeting.get("clocks", {}).items()}
    reference = findings.hosts.get(0, {}).get("ahead")
    for node, facts in findings.hosts.items():
        ahead = asked.get(node)
        if ahead is None and reference is not None and "ahead" in facts:
            ahead = facts["ahead"] - reference
        if node == 0 or ahead is None:
            continue
        ok = abs(ahead) <= SKEW
        detail = (
            f"within {SKEW:g} s of {findings.get_host_name(0)}"
            if ok
            else f"{ahead:+.1f} s from {findings.get_host_name(0)}"
        )
        remedy = (
            ""
            if ok
            else "Synchronize the clock with NTP (chronyc tracking, timedatectl). Logs and failure causes are "
            "ordered by time."
        )
        yield Check("clock", facts["host"], ok, detail, remedy)


def check_cpus(findings: Findings, cluster: Cluster) -> Iterator[Check]:
    """Warn if a host's processes may use fewer CPUs than they need, since they would be slower."""
    for facts in findings.hosts.values():
        usable = facts["cpus"]
        lack = few_cpus(cluster, usable)
        detail = lack or f"{usable} for {cluster.processes_per_node} processes"
        yield Check("CPUs", facts["host"], True, detail, FEW_CPUS if lack else "")


def check_devices(findings: Findings, *, per_node: int) -> Iterator[Check]:
    """Check that each host has a device per process, and that ranks do not share devices."""
    for facts in findings.hosts.values():
        count = facts["devices"]
        ok = count >= per_node
        remedy = f"Check nvidia-smi and CUDA_VISIBLE_DEVICES on this host, or set cluster.processes_per_node={count}."
        yield Check("devices", facts["host"], ok, f"{count} for {per_node} processes", "" if ok else remedy)
    users: dict[str, list[Facts]] = defaultdict(list)
    for rank in findings.ranks:
        users[rank["device"]].append(rank)
    for device, ranks in users.items():
        if device and len(ranks) > 1:  # only GPUs have unique ids
            hosts = ", ".join(dict.fromkeys(str(rank["host"]) for rank in ranks))
            detail = f"ranks {' and '.join(str(rank['rank']) for rank in ranks)} share {device}"
            remedy = "Use one GPU per rank: list each host once, with at most one process per GPU."
            yield Check("one rank per device", hosts, False, detail, remedy)


def check_answers(findings: Findings) -> Iterator[Check]:
    """Check that all hosts have reported, in the run folder or to the first host."""
    for node in range(findings.nodes):
        if node in findings.hosts:
            yield Check("answers", findings.get_host_name(node), True, "yes")
            continue
        remedy = (
            "Check the agent's output above or in the logs of the run folder. Set run.root to a folder that "
            "is shared by all hosts and writable."
        )
        yield Check(
            "answers", findings.get_host_name(node), False, f"no report from node {node} in the run folder", remedy
        )


def check_rendezvous(findings: Findings) -> Iterator[Check]:
    """Check that the first host's name resolves, and that its port answers."""
    came = {facts["node"] for facts in findings.meeting.get("hosts", ())}
    for node, facts in findings.hosts.items():
        first = facts["first"]
        if first is None:
            continue
        name, port = first["name"], first["port"]
        if first["error"]:
            remedy = "Use host names that resolve on all hosts (/etc/hosts, DNS), or addresses."
            yield Check("resolves", facts["host"], False, f"failed to resolve {name}: {first['error']}", remedy)
        else:
            yield Check("resolves", facts["host"], True, f"{name} resolved")
        if why := facts.get("refused"):
            remedy = f"Free port {port} on this host, or set cluster.port to another port."
            yield Check("rendezvous", facts["host"], False, why, remedy)
        elif "unreached" in facts or (findings.meeting and node not in came):
            detail = f"{facts['host']} failed to connect to port {port} of {name}{_format_reason(facts)}"
            remedy = f"Open TCP port {port} of {name} to {facts['host']} (firewall, security group), or set "
            yield Check("rendezvous", facts["host"], False, detail, f"{remedy}cluster.port to another port.")
        elif node in came:
            yield Check("rendezvous", facts["host"], True, f"port {port} of {name}")


def _format_reason(facts: Facts) -> str:
    return f": {facts['unreached']}" if "unreached" in facts else ""


def interfaces(findings: Findings) -> Iterator[Check]:
    """Check that the interface for collectives exists, and that other hosts can reach its address."""
    unreached = _parse_unreached(findings)
    for node, facts in findings.hosts.items():
        interface = facts["interface"]
        if interface is None:
            continue
        if interface["error"]:
            yield Check("interface", facts["host"], False, interface["error"], _suggest_interface(facts))
            continue
        name = f"{interface['name']} {interface['address']}"
        deaf = [source for source, targets in unreached.items() if node in targets]
        if deaf:
            detail = (
                f"{name} is not reachable from {', '.join(map(findings.get_host_name, deaf))}: "
                f"{unreached[deaf[0]][node]}"
            )
            yield Check("interface", facts["host"], False, detail, _suggest_interface(facts))
        else:
            reached_text = ", reachable from the other hosts" if node in unreached and len(unreached) > 1 else ""
            yield Check("interface", facts["host"], True, f"{interface['name']}{reached_text}")


def _parse_unreached(findings: Findings) -> dict[int, dict[int, str]]:
    tried: Mapping[str, Mapping[str, str]] = findings.meeting.get("unreached", {})
    return {int(source): {int(target): why for target, why in lost.items()} for source, lost in tried.items()}


def _suggest_interface(facts: Facts) -> str:
    """Suggest the interface that routes to the first host, or else what to check."""
    leads, own = facts["interface"]["leads"], facts["interface"]["name"]
    if leads and leads != own:
        return (
            f"The route to the first host uses {leads} ({facts['interfaces'][leads]['address']}). Set "
            f"cluster.interface={leads}."
        )
    return (
        "Open all TCP ports between the hosts (ranks listen on any port), or set cluster.interface to "
        "another interface."
    )


def list_interfaces(facts: Facts, used: str | None) -> str:
    """List a host's interfaces other than the one in use."""
    named = [f"{name} {each['address']}" for name, each in facts["interfaces"].items() if name not in (used, "lo")]
    return ", ".join(named)


def collective(findings: Findings) -> Iterator[Check]:
    """Check that the ranks have connected and all-reduced a few bytes."""
    if not findings.meeting or not findings.hosts:
        return
    everyone = ", ".join(findings.get_host_name(node) for node in findings.hosts)
    if skipped := findings.meeting.get("skipped"):
        yield Check(
            "all-reduce", everyone, False, f"skipped: {skipped}", "Fix the errors above, then rerun worldsize doctor."
        )
        return
    late = [rank for rank in findings.ranks if not rank["joined"]]
    failure = findings.meeting.get("outcome", {}).get("failure")
    if not late and not failure:
        yield Check("all-reduce", everyone, True, f"{len(findings.ranks)} ranks agree")
        return
    hosts = ", ".join(dict.fromkeys(str(rank["host"]) for rank in late)) or everyone
    if failure and len(late) in (0, len(findings.ranks)):
        hosts = _find_failed_host(failure, findings) or hosts
    who = f"ranks {', '.join(str(rank['rank']) for rank in late)} did not finish; " if late else ""
    cause = f"{failure['role']} {failure['rank']}: {last_error(failure['cause'])}" if failure else "unknown cause"
    remedy = "Check the logs of these ranks in the run folder, including the NCCL logs next to them."
    yield Check("all-reduce", hosts, False, f"{who}{cause}", remedy)


def _find_failed_host(failure: Facts, findings: Findings) -> str | None:
    """Return the host name of the first failure, by node or rank."""
    if failure["role"] == "node":
        return findings.get_host_name(failure["rank"])
    return next((str(rank["host"]) for rank in findings.ranks if rank["rank"] == failure["rank"]), None)
