"""Each host is checked separately, and all hosts are compared with the first."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.plan.doctor.facts import cluster, findings, host, rank
from worldsize.plan.doctor import hosts
from worldsize.plan.doctor.evaluate import evaluate
from worldsize.plan.doctor.report import Check


def bad(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if not check.ok]


def test_equal_hosts_pass_every_check_whatever_the_device() -> None:
    for device in ("cpu", "cuda"):
        report = evaluate(findings(), cluster(device, network=125e6), needed_bytes=1e9)
        assert report.ok, bad(report.checks)
        assert len({(check.check, check.host) for check in report.checks}) == len(report.checks)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("must_match", "torch", "2.12.0"),
        ("must_match", "code", "0dd"),
        ("must_match", "Python", "3.12.1"),
        ("should_match", "driver", "570"),
    ],
)
def test_a_host_with_another_version_is_named_with_both(group: str, name: str, value: str) -> None:
    first = host(0)[group]
    (check,) = bad(hosts.compare_hosts(findings(host(2, **{group: {**first, name: value}}))))
    assert (check.check, check.host) == (name, "h3")
    assert check.detail == f"{value}; h1 has {first[name]}"
    assert check.remedy


def test_packages_that_differ_are_named() -> None:
    facts = {**host(0)["must_match"], "packages": "aaa"}
    others = [host(node, must_match=facts) for node in (0, 2, 3)]
    other = host(1, must_match={**facts, "packages": "bbb"}, versions={"torch": "2.12.0", "scipy": "1.0"})
    (check,) = bad(hosts.compare_hosts(findings(*others, other)))
    assert check.detail == "bbb; h1 has aaa: numpy missing (2.2), scipy 1.0 (missing), torch 2.12.0 (2.13.0)"


def test_missing_data_are_named_with_their_path() -> None:
    lost = [f"part_{n}: No such file or directory (/data/part_{n})" for n in range(5)]
    (check,) = bad(hosts.check_data_files(findings(host(3, data=lost))))
    assert check.host == "h4"
    assert check.detail == f"{lost[0]}; {lost[1]}; {lost[2]} and 2 more"


def test_a_run_folder_that_cannot_be_written_or_is_not_shared_is_named() -> None:
    folder = {**host(1)["folder"], "error": "Read-only file system"}
    (check,) = bad(hosts.check_run_folder(findings(host(1, folder=folder))))
    assert (check.host, check.detail) == ("h2", "failed to write /shared/run: Read-only file system")
    assert "run.root" in check.remedy
    (check,) = bad(hosts.check_run_folder(findings(meeting={"unseen": {"2": "the file written by h3 is not visible"}})))
    assert (check.host, check.detail) == ("h3", "/shared/run is not shared: the file written by h3 is not visible")


def test_disk_must_hold_two_checkpoints() -> None:
    assert not bad(hosts.check_disk(findings(), needed_bytes=10e9))
    checks = bad(hosts.check_disk(findings(), needed_bytes=10.1e9))
    assert [check.host for check in checks] == ["h1", "h2", "h3", "h4"]
    assert checks[0].detail == "10 GB free at /shared/run, two checkpoints require 10.1 GB"


@pytest.mark.parametrize("ahead", [10.0, -10.0])
def test_a_clock_that_is_off_is_named_whether_measured_over_the_network_or_by_the_hosts_file(ahead: float) -> None:
    over_network = findings(meeting={"clocks": {"1": 0.2, "2": ahead, "3": -0.2}})
    by_file = findings(host(0, ahead=100.0), host(1, ahead=100.2), host(2, ahead=100 + ahead), host(3, ahead=99.8))
    for clocks in (over_network, by_file):
        (check,) = bad(hosts.check_clocks(clocks))
        assert (check.host, check.detail) == ("h3", f"{ahead:+.1f} s from h1")
        assert "NTP" in check.remedy


def test_a_host_with_too_few_devices_is_named() -> None:
    (check,) = bad(hosts.check_devices(findings(host(1, devices=1)), per_node=2))
    assert (check.host, check.detail) == ("h2", "1 for 2 processes")


def test_two_ranks_that_share_a_device_are_named_even_if_one_host_has_two_names() -> None:
    on_one = [rank(0), rank(1, device="GPU-0"), *(rank(number) for number in range(2, 8))]
    (check,) = bad(hosts.check_devices(findings(ranks=on_one), per_node=2))
    assert (check.host, check.detail) == ("h1", "ranks 0 and 1 share GPU-0")
    on_two = [rank(number, device=f"GPU-{number % 6}") for number in range(8)]
    checks = bad(hosts.check_devices(findings(ranks=on_two), per_node=2))
    assert [(check.host, check.detail) for check in checks] == [
        ("h1, h4", "ranks 0 and 6 share GPU-0"),
        ("h1, h4", "ranks 1 and 7 share GPU-1"),
    ]
    assert "list each host once" in checks[0].remedy


def test_a_host_with_fewer_cpus_than_its_processes_need_is_a_warning() -> None:
    report = evaluate(findings(host(1, cpus=1)), cluster(network=125e6), needed_bytes=1e9)
    assert report.ok
    (warning,) = (check for check in report.checks if check.remedy)
    assert (warning.check, warning.host, warning.detail) == (
        "CPUs",
        "h2",
        "2 processes require 2 CPUs, but can use only 1",
    )
    assert warning.remedy.startswith("Request more CPUs (with Slurm: cluster.cpus_per_task)")
