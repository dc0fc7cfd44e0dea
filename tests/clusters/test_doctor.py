"""Run worldsize doctor on four hosts reachable by ssh: healthy ones, and ones with planted faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from worldsize.testing import hosts as namespaces

pytestmark = pytest.mark.heavy

PORT = 23_456
ALONE = """[ $HID ] || HID=1 exec unshare -m sh -c '{}; exec "$@"' sh $0 "$@\""""  # with own mounts
BLOCKED = ("to", "10.77.0.1", "ipproto", "tcp", "dport", str(PORT), "unreachable")
OFF = """\
import time, torch
clock, clock_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: clock() + 10, lambda: clock_ns() + 10**10
torch.__version__ = "0.1"
"""


@dataclass(frozen=True)
class Examined:
    """The result of one run of doctor."""

    code: int
    shown: str
    report: dict[str, Any]

    @property
    def red(self) -> set[tuple[str, str]]:
        return {(check["check"], check["host"]) for check in self.report["checks"] if not check["ok"]}

    def line(self, check: str, host: str) -> str:
        (match,) = [entry for entry in self.report["checks"] if (entry["check"], entry["host"]) == (check, host)]
        return f"{match['detail']} -> {match['remedy']}"


@pytest.fixture
def examined(
    four: namespaces.Hosts, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> Any:
    """``examined(*options, h2="...")`` runs doctor on the first host; each host runs its shell line before Python."""
    project, data = tmp_path / "project", tmp_path / "data"
    for folder in (project / "runs", data):
        folder.mkdir(parents=True)
    (data / "train.txt").touch()

    def run(*options: str, **lines: str) -> Examined:
        python = tmp_path / "python"
        cases = "".join(f"{host}) {line};;\n" for host, line in lines.items())
        python.write_text(f'#!/bin/sh\ncase $(hostname) in\n{cases}esac\nexec {warm_python} "$@"\n')
        python.chmod(0o755)
        words = ("+cluster=ssh", "cluster.hosts=[h1,h2,h3,h4]", "cluster.processes_per_node=1", "cluster.threads=1")
        own = (f"cluster.ssh=[{','.join(four.ssh)}]", f"cluster.python={python}", f"cluster.folder={tmp_path}/%h")
        learns = ("recipe=click_through", "data=criteo", f"data.path={data}")
        network = "cluster.links.network={bandwidth: 10e6, latency: 1e-4}"  # not 125e6, since this machine is busy
        command = [str(warm_python), "-m", "worldsize", "doctor", "--json", str(tmp_path / "report.json")]
        done = subprocess.run(
            four.wrap_command(1, [*command, *words, *own, *learns, network, *options]),
            cwd=project,
            env=environment_without_wandb,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode in (0, 1), done.stderr
        return Examined(done.returncode, done.stdout + done.stderr, json.loads((tmp_path / "report.json").read_text()))

    return run


def test_four_hosts_are_green_and_their_links_measured(examined: Any, tmp_path: Path) -> None:
    result = examined("--pairs")
    assert (result.code, result.red) == (0, set()), result.shown
    (pairs, network) = result.report["pairs"], result.report["links"]["network"]
    assert {(pair["from"], pair["to"]) for pair in pairs} == {
        (source, target)
        for source in ("h1", "h2", "h3", "h4")
        for target in ("h1", "h2", "h3", "h4")
        if source != target
    }
    assert network["bandwidth"] < 1.3 * 125e6  # the bandwidth of the shaped link, not of loopback
    assert min(network["gap"], network["latency"]) > 0
    assert 0 < network["incast"] <= 1
    assert "✓" in result.shown
    assert not list((tmp_path / "project" / "runs" / "doctor").iterdir())


def test_versions_code_data_clock_and_a_slow_link_are_found_at_once(
    examined: Any, four: namespaces.Hosts, tmp_path: Path
) -> None:
    off = tmp_path / "off"
    off.mkdir()
    (off / "sitecustomize.py").write_text(OFF)
    hidden = f"mount -t tmpfs none {tmp_path}/data"
    four.shape_links("10mbit", host=4)
    try:
        result = examined(
            "--patience=110",  # h2 does not use the warm interpreter, and imports torch
            h2=f'export PYTHONPATH={off}:$PYTHONPATH; exec {sys.executable} "$@"',
            h3=f"mkdir -p recipes; touch recipes/other.py; {ALONE.format(hidden)}",
        )
    finally:
        four.shape_links("1gbit", host=4)
    assert result.code == 1
    other = {("torch", "h2"), ("clock", "h2")}
    lost = {("code", "h3"), ("data", "h3"), ("data files", "h3")}
    assert result.red == {*other, *lost, ("network link", "h4")}, result.shown
    assert "0.1; h1 has 2." in result.line("torch", "h2")
    assert re.match(r"\+(9\.[5-9]|10\.[0-5]) s from h1", result.line("clock", "h2"))
    assert f"train.txt: No such file or directory ({tmp_path}/data/train.txt)" in result.line("data files", "h3")
    assert "over eth0, cluster.links.network declares 10 MB/s -> Check the cable" in result.line("network link", "h4")
    assert "0.1; h1 has" in result.shown


def test_a_blocked_port_hides_neither_an_unwritable_run_folder_nor_a_missing_interface(
    examined: Any, four: namespaces.Hosts, tmp_path: Path
) -> None:
    four.run_ip(3, "rule", "add", *BLOCKED)
    for host in (1, 2, 3):
        four.run_ip(host, "link", "add", "ib0", "type", "veth", "peer", "name", "ib1")
        four.run_ip(host, "addr", "add", f"10.78.0.{host}/24", "dev", "ib0")
    runs = f"{tmp_path}/project/runs"
    only_read = f"mount --bind {runs} {runs}; mount -o remount,bind,ro {runs}"
    result = examined(
        "--patience=20",
        f"cluster.port={PORT}",
        "cluster.interface=ib0",
        h2=f'[ $HID ] || HID=1 exec unshare -m sh -c \'{only_read}; exec "$@"\' sh $0 "$@"',
    )
    four.run_ip(3, "rule", "del", *BLOCKED)
    for host in (1, 2, 3):
        four.run_ip(host, "link", "del", "ib0")
    assert result.code == 1
    assert {("rendezvous", "h3"), ("run folder", "h2"), ("interface", "h4")} <= result.red, result.shown
    assert f"Open TCP port {PORT} of h1 to h3" in result.line("rendezvous", "h3")
    assert re.match(r"failed to write .*: Read-only file system -> Mount the folder", result.line("run folder", "h2"))
    assert "Set cluster.interface=eth0" in result.line("interface", "h4")
