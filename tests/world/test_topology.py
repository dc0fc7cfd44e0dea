"""Switches above hosts, from Slurm's topology.conf and from YAML: the order of hosts, and the resulting tiers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from worldsize.config.cluster import apply_topology, build_cluster, normalize_tiers
from worldsize.errors import ConfigError
from worldsize.world.environments import read_node
from worldsize.world.topology import Topology, expand_hosts

# the example of Slurm's manual, with a comment, different case, and a continued line
SLURM = """
# two racks below one switch
SwitchName=s0 Nodes=dev[0-5]
switchname=s1 nodes=dev-[6-11],login LinkSpeed=100   # links are not read
SwitchName=s2 \\
  Switches=s[0-1]
"""
YAML = """
west:
  r1: "h[01-02]"
  r2: [h03, h04]
east:
  r3: [h05, h06]
  r4: [h07, h08]
"""


def topology(folder: Path, text: str, name: str = "topology.yaml") -> Topology:
    (folder / name).write_text(text)
    return Topology.read(folder / name)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("gpu[03-05,7],cpu1", ["gpu03", "gpu04", "gpu05", "gpu7", "cpu1"]),
        ("r[1-2]n[08-10]x", [f"r{r}n{n}x" for r in (1, 2) for n in ("08", "09", "10")]),
        ("", []),
    ],
)
def test_a_list_of_hosts_is_expanded_as_slurm_does(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize("text", ["a[1-", "a]1", "a[3-1]", "a[x]", "a[]", "a[0-9999999]", "a[0-9999]b[0-9999]"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"bracket|range|hosts"):
        expand_hosts(text)


def test_slurms_file_is_read(tmp_path: Path) -> None:
    tree = topology(tmp_path, SLURM, "topology.conf")
    assert tree.paths["dev3"] == ("s2", "s0")
    assert tree.paths["dev-11"] == ("s2", "s1")
    assert tree.paths["login"] == ("s2", "s1")
    assert len(tree.paths) == 13
    blocks = topology(tmp_path, "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\nBlockSizes=4\n", "topology.conf")
    assert blocks.paths["n5"] == ("b2",)


def test_hosts_below_one_switch_become_neighbours_and_the_first_stays_the_first(tmp_path: Path) -> None:
    tree = topology(tmp_path, YAML)
    hosts = ["h06", "h01", "h03", "h05", "h08", "h02", "h04", "h07"]
    assert tree.order_hosts(hosts) == ["h06", "h05", "h08", "h07", "h01", "h02", "h03", "h04"]
    assert tree.count_hosts_per_switch(tree.order_hosts(hosts)) == [2, 4]
    assert tree.count_hosts_per_switch(["h01", "h02", "h05", "h06"]) == [2]  # rack and region coincide there
    assert tree.count_hosts_per_switch(["h01", "h02"]) == tree.count_hosts_per_switch(["h01", "h03"]) == []
    assert tree.count_hosts_per_switch(["h01", "h03", "h04"]) == []  # racks of one and two hosts do not form a tier
    with pytest.raises(ConfigError, match=r"rack=2 does not match .*: these 3 hosts .* unequal numbers of hosts each"):
        tree.check_tiers(["h01", "h03", "h04"], {"rack": 2})
    with pytest.raises(ConfigError, match="host h99 not found in cluster.topology"):
        tree.order_hosts(["h99"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.yaml", "a: [h1]\nb: [h1]\n", "h1 is below two switches"),
        ("t.yaml", "[h1, h2]", "the file: expected switches or hosts, got list"),
        ("t.yaml", "a: {b: 3}", "a/b: expected switches or hosts, got int"),
        ("t.yaml", "a: [", "t.yaml"),
        ("t.yaml", "", "the file: expected switches or hosts, got NoneType"),
        ("t.conf", "SwitchName=a Nodes=h[1-2]\nSwitchName=b Nodes=h2\n", "h2 is below two switches"),
        ("t.conf", "SwitchName=a Nodes=h1 Switches=b\nSwitchName=b Switches=a\n", "below itself"),
        ("t.conf", "SwitchName=a Nodes=h1\nSwitchName=b Switches=a,c\n", "the switch c is below b but not defined"),
        ("t.conf", "SwitchName=a Nodes=h1\nSwitchName=b Switches=a\nSwitchName=c Switches=a\n", "below both b and c"),
        ("t.conf", "# nothing\n", "no switch with hosts found"),
        ("t.conf", "SwitchName=a Nodes=h[1-\n", "bracket"),
    ],
)
def test_a_file_that_is_no_tree_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        topology(tmp_path, text, name)
    with pytest.raises(ConfigError, match="cannot be read"):
        Topology.read(tmp_path / "nowhere.conf")


def test_hosts_of_a_cluster_are_ordered_and_make_its_tiers(tmp_path: Path) -> None:
    topology(tmp_path, YAML)
    given = {"topology": str(tmp_path / "topology.yaml"), "hosts": ["h01", "me@h05", "h02", "h06"], "tiers": {}}
    cluster = apply_topology(given)
    assert (cluster["hosts"], cluster["tiers"]) == (["h01", "h02", "me@h05", "h06"], {"rack": 2})
    assert apply_topology({**given, "tiers": {"island": 2}})["tiers"] == {"island": 2}
    waits = apply_topology({**given, "hosts": [*given["hosts"], "spare"], "spare_nodes": 1})
    assert (waits["hosts"], waits["tiers"]) == ([*cluster["hosts"], "spare"], cluster["tiers"])
    with pytest.raises(ConfigError, match=r"cluster\.tiers\.rack=4 .* these 4 hosts .* with 2 hosts each"):
        apply_topology({**given, "tiers": {"rack": 4}})


def test_tiers_that_have_room_for_all_hosts_are_those_of_the_file_where_one_switch_is_above_them(
    tmp_path: Path,
) -> None:
    text = "".join(
        f'p{pod}: {{r1: "h[{pod}1-{pod}4]", r2: "h[{pod}5-{pod}8]"}}\n' for pod in (1, 2)
    )  # names come again
    tree, tiers = topology(tmp_path, text), {"rack": 4, "pod": 8}
    tree.check_tiers(["h11", "h12"], tiers)
    tree.check_tiers(["h11", "h12", "h15", "h16"], {"rack": 2, "pod": 8})
    for hosts in (["h11", "h15"], ["h11", "h21"]):  # in two racks, and in two pods whose racks share a name
        with pytest.raises(ConfigError, match=r"cluster\.tiers\.rack=4"):
            tree.check_tiers(hosts, tiers)
    with pytest.raises(ConfigError, match=r"cluster\.tiers\.pod=8"):
        tree.check_tiers(["h11", "h12", "h21", "h22"], {"rack": 2, "pod": 8})


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ({"rack": 3}, "a divisor of the 8 nodes"),
        ({"rack": 2, "pod": 9}, r"a multiple of 2 \(a rack\)"),
        ({"rack": 1}, r"a multiple of 1 \(a node\)"),
        ({"rack": 4, "pod": 4}, r"a multiple of 4 \(a rack\)"),
        ({"node": 2}, "the name is reserved for a built-in tier"),
    ],
)
def test_tiers_that_do_not_divide_the_nodes_are_refused(tiers: dict[str, int], message: str) -> None:
    config: dict[str, Any] = {"name": "test", "nodes": 8, "processes": 8, "device": "cpu"}
    with pytest.raises(ConfigError, match=message):
        build_cluster({**config, "tiers": tiers}, None)
    assert list(build_cluster({**config, "tiers": {"pod": 4, "rack": 2}}, None).tiers.items()) == [
        ("rack", 2),
        ("pod", 4),
    ]


def test_nodes_that_one_rack_has_room_for_are_joined_by_its_link() -> None:
    links = {"rack": {"bandwidth": 50e9, "latency": 3e-6}, "network": {"bandwidth": 1e9, "latency": 5e-6}}
    config: dict[str, Any] = {"name": "test", "device": "cpu", "tiers": {"pod": 16, "rack": 8}, "links": links}
    found = {nodes: build_cluster({**config, "nodes": nodes, "processes": nodes}, None) for nodes in (1, 8, 16, 32)}
    assert {nodes: dict(each.tiers) for nodes, each in found.items()} == {
        1: {},
        8: {},
        16: {"rack": 8},
        32: {"rack": 8, "pod": 16},
    }
    assert {nodes: each.links["network"].bandwidth for nodes, each in found.items()} == {
        1: 50e9,
        8: 50e9,
        16: 1e9,  # without a link for the pod
        32: 1e9,
    }


def test_hosts_are_taken_from_the_switches_in_turn_so_that_servers_are_below_all(tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text(YAML)
    tree = Topology.read(tmp_path / "topology.yaml", is_spread=True)
    hosts = [f"h0{number}" for number in (6, 1, 2, 3, 4, 5, 7, 8)]
    assert tree.order_hosts(hosts) == ["h06", "h01", "h07", "h03", "h05", "h02", "h08", "h04"]
    assert tree.order_hosts(["h05", "h06", "h01"]) == ["h05", "h01", "h06"]
    given = {"topology": str(tmp_path / "topology.yaml"), "hosts": ["h01", "h02", "h05", "h06"], "placement": "spread"}
    assert apply_topology(given)["hosts"] == ["h01", "h05", "h02", "h06"]
    with pytest.raises(ConfigError, match="is not supported with cluster.tiers"):
        apply_topology({**given, "tiers": {"rack": 2}})


def test_a_tier_brings_its_link_along() -> None:
    fast = {"bandwidth": 50e9, "latency": 3e-6}
    cluster = normalize_tiers({"tiers": {"rack": {"nodes": 8, **fast}, "pod": 32}, "links": {"network": fast}})
    assert cluster["tiers"] == {"rack": 8, "pod": 32}
    assert cluster["links"] == {"network": fast, "rack": {**fast, "gap": 0.0, "incast": 1.0}}


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ("many", "cluster.tiers.rack='many' is not a number of nodes"),
        (True, "is not a number of nodes"),
        (0, "cluster.tiers.rack.nodes=0 must be between 1"),
        ({"nodes": 8}, "bandwidth"),
        ({"bandwidth": 1e9, "latency": 1e-6}, "nodes"),
        ({"nodes": 8, "bandwith": 1e9}, "unknown key 'cluster.tiers.rack.bandwith'; did you mean 'bandwidth'"),
        ({"nodes": 8, "bandwidth": -1e9, "latency": 1e-6}, "cluster.tiers.rack.bandwidth=-1"),
    ],
    ids=str,
)
def test_a_tier_that_is_none_is_refused(tier: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        normalize_tiers({"tiers": {"rack": tier}, "links": {}})


def test_nodes_of_a_job_of_slurm_are_numbered_by_the_switches(tmp_path: Path) -> None:
    tree = topology(tmp_path, YAML)
    job = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4"}
    names = ["h01", "h05", "h02", "h06"]
    job |= {"SLURM_STEP_NODELIST": "h[01,05,02,06]"}

    def place(number: int, tiers: dict[str, int]) -> tuple[int, str | None]:
        there = read_node({**job, "SLURM_NODEID": str(number), "SLURMD_NODENAME": names[number]}, tree, tiers)
        return there.rank, there.first

    assert [place(number, {"rack": 2}) for number in range(4)] == [(0, "h01"), (2, "h01"), (1, "h01"), (3, "h01")]
    with pytest.raises(ConfigError, match=r"cluster\.tiers\.rack=3"):
        place(0, {"rack": 3})


def test_agents_are_started_in_the_order_of_the_switches(train: Any, tmp_path: Path) -> None:
    topology(tmp_path, YAML)
    hosts = ("+cluster=ssh", "cluster.hosts=[h01,h05,h02,h06]", "cluster.ssh=[true]", "cluster.folder=null")
    run = train("recipe=digits", *hosts, f"cluster.topology={tmp_path}/topology.yaml", "launch=show")
    assert run.code == 0, run.error
    lines = [line for line in run.output.splitlines() if "WORLDSIZE_NODE_RANK" in line]
    places = [re.search(r" (h0\d) .*WORLDSIZE_NODE_RANK=(\d)", line) for line in lines]
    refused = train("recipe=digits", f"cluster.topology={tmp_path}/topology.yaml")
    assert (refused.code, "is not supported with Local" in refused.error) == (2, True)
    assert [place and place.groups() for place in places] == [("h01", "0"), ("h02", "1"), ("h05", "2"), ("h06", "3")]
