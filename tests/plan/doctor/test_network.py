"""Problems in how hosts meet are reported with their cause."""

from __future__ import annotations

from collections.abc import Iterable

from tests.plan.doctor.facts import findings, host, rank
from worldsize.plan.doctor import hosts
from worldsize.plan.doctor.findings import Findings
from worldsize.plan.doctor.report import Check


def bad(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if not check.ok]


def test_a_host_that_reports_nothing_is_named_as_its_launcher_knows_it() -> None:
    by_node = {node: host(node) for node in (0, 1, 3)}
    (check,) = bad(hosts.check_answers(Findings(4, by_node, names=["a", "b", "c", "d"])))
    assert check.host == "c"
    (check,) = bad(hosts.check_answers(Findings(4, by_node)))
    assert check.host == "node 2"


def test_a_blocked_port_is_named_and_hides_nothing_else() -> None:
    came = [host(node) for node in (0, 1, 3)]
    blocked = host(2, unreached="timed out", data=["train.txt: gone"])
    facts = findings(blocked, meeting={"hosts": came, "skipped": "only 3 of 4 hosts have met"})
    (check,) = bad(hosts.check_rendezvous(facts))
    assert (check.check, check.host) == ("rendezvous", "h3")
    assert check.detail == "h3 failed to connect to port 23456 of h1: timed out"
    assert "Open TCP port 23456 of h1 to h3" in check.remedy
    (check,) = bad(hosts.collective(facts))
    assert check.detail == "skipped: only 3 of 4 hosts have met"
    assert not bad(hosts.check_answers(facts))


def test_a_port_that_is_taken_is_blamed_on_the_first_host() -> None:
    first = host(0, refused="port 23456 at h1 cannot be opened: in use")
    (check,) = bad(hosts.check_rendezvous(findings(first)))
    assert check.host == "h1"
    assert "Free port 23456" in check.remedy


def test_a_host_name_that_does_not_resolve_is_named() -> None:
    lost = {"name": "h1", "port": 23456, "address": None, "error": "Name or service not known"}
    checks = bad(hosts.check_rendezvous(findings(host(1, first=lost))))
    assert [(check.check, check.host) for check in checks] == [("resolves", "h2")]


def test_an_interface_that_is_missing_is_named_with_one_that_would_work() -> None:
    interface = {"name": "ib0", "address": None, "leads": "eth0", "error": "no interface ib0"}
    (check,) = bad(hosts.interfaces(findings(host(2, interface=interface))))
    assert (check.host, check.detail) == ("h3", "no interface ib0")
    assert "Set cluster.interface=eth0" in check.remedy


def test_an_interface_that_nobody_has_tried_is_not_reported_as_reached() -> None:
    assert [check.detail for check in hosts.interfaces(findings())] == ["eth0, reachable from the other hosts"] * 4
    three: dict[str, dict[str, str]] = {"0": {}, "1": {}, "3": {}}
    details = [check.detail for check in hosts.interfaces(findings(meeting={"unreached": three}))]
    assert details == [
        f"eth0{suffix}"
        for suffix in (", reachable from the other hosts",) * 2 + ("", ", reachable from the other hosts")
    ]
    assert {check.detail for check in hosts.interfaces(findings(meeting={"unreached": {}}))} == {"eth0"}


def test_an_interface_that_the_others_do_not_reach_is_named() -> None:
    interface = {"name": "ib0", "address": "10.9.0.3", "leads": "eth0", "error": None, "probe": 4000}
    unreached = {"0": {"2": "timed out"}, "1": {"2": "timed out"}, "2": {}, "3": {"2": "timed out"}}
    (check,) = bad(hosts.interfaces(findings(host(2, interface=interface), meeting={"unreached": unreached})))
    assert check.host == "h3"
    assert check.detail == "ib0 10.9.0.3 is not reachable from h1, h2, h4: timed out"
    assert "The route to the first host uses eth0 (10.0.0.3). Set cluster.interface=eth0" in check.remedy


def test_ranks_that_do_not_join_are_named_with_the_first_cause() -> None:
    ranks = [rank(number, joined=number != 5) for number in range(8)]
    failure = {"role": "worker", "rank": 5, "cause": "Traceback\nRuntimeError: no route\n"}
    (check,) = bad(hosts.collective(findings(ranks=ranks, meeting={"outcome": {"failure": failure}})))
    assert (check.host, check.detail) == ("h3", "ranks 5 did not finish; worker 5: RuntimeError: no route")


def test_where_no_rank_joins_the_host_of_the_first_cause_is_named() -> None:
    ranks = [rank(number, joined=False) for number in range(8)]
    for failure, name in (
        ({"role": "worker", "rank": 6, "cause": "?"}, "h4"),
        ({"role": "node", "rank": 1, "cause": "gone"}, "h2"),
    ):
        (check,) = bad(hosts.collective(findings(ranks=ranks, meeting={"outcome": {"failure": failure}})))
        assert check.host == name
