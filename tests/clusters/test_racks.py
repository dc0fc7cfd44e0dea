"""Hosts in two racks are ordered by switch, and doctor measures links within and between racks separately."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from worldsize.plan.predictor import read_links
from worldsize.testing.hosts import Hosts, find_missing_requirements, run_hosts

REPOSITORY = Path(__file__).parents[2]
DIGITS = ("recipe=digits", "cluster.threads=1", "logger=none", "steps=5", "logical_ranks=4", "batch_size=96")
TOPOLOGY = "SwitchName=a Nodes=h[1-2]\nSwitchName=b Nodes=h[3-4]\nSwitchName=core Switches=a,b\n"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def racks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Four hosts in two racks."""
    if why := find_missing_requirements():
        pytest.skip(why)
    with run_hosts(tmp_path_factory.mktemp("racks"), name="wsr", count=4, racks=2) as hosts:
        yield hosts


def trained(
    hosts: Hosts, folder: Path, environment: dict[str, str], python: Path, *options: str
) -> tuple[str, list[str]]:
    """Return the digest of the weights, and the hosts in the order of ranks."""
    own = (f"cluster.ssh=[{','.join(hosts.ssh)}]", f"cluster.python={python}", "cluster.folder=null")
    words = (*DIGITS, "+cluster=ssh", "cluster.hosts=[h1,h3,h2,h4]", *own, f"run.root={folder}", *options)
    command = hosts.wrap_command(1, [str(python), str(REPOSITORY / "train.py"), *words])
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = folder.rglob("result.json")
    manifest = json.loads(result.with_name("run_manifest.json").read_text())
    return json.loads(result.read_text())["state_digest"], manifest["attempts"][0]["hosts"]


def test_an_elastic_run_on_two_racks_has_the_digest_of_one_process_whatever_the_order(
    racks: Hosts, tmp_path: Path, train: Any, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    elastic, switches = "reproducibility=elastic", f"cluster.topology={tmp_path}/topology.conf"
    alone = train(*DIGITS, elastic, "cluster.processes=1")
    expected = alone.json("result.json")["state_digest"]
    where = (environment_without_wandb, warm_python)
    mixed, hosts = trained(racks, tmp_path / "mixed", *where, elastic)
    assert (mixed, hosts) == (expected, ["h1", "h3", "h2", "h4"])
    ordered, hosts = trained(racks, tmp_path / "ordered", *where, elastic, switches)
    assert (ordered, hosts) == (expected, ["h1", "h2", "h3", "h4"])
    by_tier, hosts = trained(racks, tmp_path / "tiers", *where, switches, "strategy.reduce=hierarchical")
    assert hosts == ["h1", "h2", "h3", "h4"]
    assert by_tier != expected  # without elastic the summation order differs


def test_doctor_tells_the_links_of_a_rack_from_the_uplink_that_its_hosts_share(
    racks: Hosts, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    """A host has 320 Mbit/s (40 MB/s), a rack's uplink 40 Mbit/s (5 MB/s); short bursts may exceed a limit."""
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    (tmp_path / "runs").mkdir()
    racks.shape_links("320mbit")
    racks.shape_uplinks("40mbit")
    own = (f"cluster.ssh=[{','.join(racks.ssh)}]", f"cluster.python={warm_python}", "cluster.folder=null")
    where = ("+cluster=ssh", "cluster.hosts=[h1,h3,h2,h4]", f"cluster.topology={tmp_path}/topology.conf")
    declared = "cluster.links.network={bandwidth: 20e6, latency: 1e-4}"  # a false declaration
    words = ("recipe=digits", "cluster.threads=1", "cluster.processes_per_node=1", f"run.root={tmp_path}/runs")
    command = [str(warm_python), "-m", "worldsize", "doctor", "--json", str(tmp_path / "report.json")]
    done = subprocess.run(
        racks.wrap_command(1, [*command, *words, *where, *own, declared]),
        cwd=REPOSITORY,
        env=environment_without_wandb,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    links = read_links(tmp_path / "report.json")
    assert 0.3 * 40e6 < links["rack"].bandwidth < 1.3 * 40e6
    assert 0.4 * 5e6 < links["network"].bandwidth < 1.3 * 5e6
    pairs = {(pair["from"], pair["to"]): pair["bandwidth"] for pair in report["pairs"]}
    inside, between = [("h1", "h2"), ("h2", "h1"), ("h3", "h4"), ("h4", "h3")], [("h1", "h3"), ("h3", "h1")]
    assert sorted(pairs) == sorted([*inside, *between])
    assert all(0.3 * 40e6 < pairs[ends] < 2 * 40e6 for ends in inside)
    assert all(0.4 * 5e6 < pairs[ends] < 2 * 5e6 for ends in between)
    (red,) = [check for check in report["checks"] if not check["ok"]]
    assert (red["check"], red["host"]) == ("network link", "h1, h2, h3, h4"), done.stdout
    assert "between all groups of 2 hosts, cluster.links.network declares 20 MB/s" in red["detail"]
