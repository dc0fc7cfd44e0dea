"""Simulate hosts with network namespaces; each has an address, a name, sshd, and a link to throttle or cut.

    python -m worldsize.testing.hosts --rate 200mbit uv run train.py +cluster=ssh cluster.hosts=[h1,h2] ...

runs a command on the first of two such hosts (as root), where ``ssh h2`` connects to the other.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize.world.scratch import temporary_folder

_SSH = """\
Host h*
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def find_missing_requirements() -> str | None:
    """Return why this machine cannot simulate hosts, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces require root"
    absent = [name for name in ("ip", "tc", "sshd", "ssh", "rsync") if _executable(name) is None]
    return f"{', '.join(absent)} not installed (apt-get install iproute2 openssh-server rsync)" if absent else None


def _executable(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _limit_rate(space: str, device: str, rate: str) -> None:
    limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    _run_command("tc", "-n", space, "qdisc", "replace", "dev", device, *limit)


def _run_command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Hosts:
    """Hosts h1, h2, ... with addresses 10.77.0.1, 10.77.0.2, ...; methods number hosts from 1.

    Attributes:
        folder: Folder with the hosts' keys and ``ssh_config``.
        name: Prefix of their namespaces.
        count: Number of hosts.
        racks: Number of racks of consecutive hosts; each rack has a switch and an uplink.
    """

    folder: Path
    name: str
    count: int
    racks: int = 1

    @property
    def ssh(self) -> list[str]:
        """The ssh command that reaches the hosts by name, as a list of arguments."""
        return ["ssh", "-F", str(self.folder / "ssh_config")]

    def wrap_command(self, host: int, words: Sequence[str]) -> list[str]:
        """Return the command that runs ``words`` on a host."""
        named = ("unshare", "--uts", "sh", "-c", f'hostname h{host}; exec "$@"', "sh")
        return ["ip", "netns", "exec", f"{self.name}h{host}", *named, *words]

    @property
    def switches(self) -> list[str]:
        """The namespaces of the rack switches, then of the core switch if there are several."""
        racks = [f"{self.name}sw{rack or ''}" for rack in range(self.racks)]
        return [*racks, f"{self.name}core"] if self.racks > 1 else racks

    def find_switch(self, host: int) -> str:
        """Return the namespace of the switch that a host is connected to."""
        return self.switches[(host - 1) * self.racks // self.count]

    def set_link(self, host: int, state: str) -> None:
        """Disconnect ("down") or connect ("up") a host's link."""
        _run_command("ip", "-n", self.find_switch(host), "link", "set", f"p{host}", state)

    def shape_links(self, rate: str, host: int | None = None) -> None:
        """Limit one or all host links in both directions; ``rate`` as for tc, e.g. "200mbit"."""
        for each in [host] if host else range(1, self.count + 1):
            _limit_rate(f"{self.name}h{each}", "eth0", rate)
            _limit_rate(self.find_switch(each), f"p{each}", rate)

    def shape_uplinks(self, rate: str) -> None:
        """Limit the rate of each rack's uplink, in both directions."""
        for rack in range(self.racks):
            _limit_rate(self.switches[rack], "uplink", rate)
            _limit_rate(self.switches[-1], f"r{rack}", rate)

    def count_uplink_bytes(self, rack: int) -> int:
        """Return the bytes sent so far on the uplink of a rack, counted from 0, including headers."""
        counter = ["ip", "netns", "exec", self.switches[rack], "cat", "/sys/class/net/uplink/statistics/tx_bytes"]
        return int(subprocess.run(counter, capture_output=True, text=True, check=True).stdout)

    def run_ip(self, host: int, *words: str) -> None:
        """Run ``ip`` with ``words`` on a host, e.g. to drop packets to a port."""
        _run_command("ip", "-n", f"{self.name}h{host}", *words)

    def count_sent_bytes(self, host: int) -> int:
        """Return the bytes sent so far by a host, including headers, from its interface's counter."""
        counter = self.wrap_command(host, ["cat", "/sys/class/net/eth0/statistics/tx_bytes"])
        return int(subprocess.run(counter, capture_output=True, text=True, check=True).stdout)

    def processes(self, text: str, host: int | None = None) -> list[int]:
        """Return the ids of processes on one or all hosts with ``text`` in their command line."""
        pids = []
        for each in [host] if host else range(1, self.count + 1):
            listed = subprocess.run(["ip", "netns", "pids", f"{self.name}h{each}"], capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                with suppress(OSError):
                    if text in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                        pids.append(pid)
        return pids

    def kill_host(self, host: int) -> None:
        """Kill all processes of a host."""
        listed = subprocess.run(["ip", "netns", "pids", f"{self.name}h{host}"], capture_output=True, text=True)
        for pid in map(int, listed.stdout.split()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def run_hosts(folder: Path, *, name: str, count: int, racks: int = 1) -> Iterator[Hosts]:
    """Run ``count`` hosts in ``racks`` racks within the context. Requires root.

    ``name``: prefix of their network namespaces.
    """
    hosts = Hosts(folder, name, count, racks)
    try:
        _connect_hosts(hosts)
        _serve_ssh(hosts)
        yield hosts
    finally:
        for host in range(1, count + 1):
            hosts.kill_host(host)
            _delete_namespace(f"{name}h{host}")
        for switch in hosts.switches:
            _delete_namespace(switch)


def _connect_hosts(hosts: Hosts) -> None:
    for switch in hosts.switches:
        _run_command("ip", "netns", "add", switch)
        _run_command("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run_command("ip", "-n", switch, "link", "set", "bridge", "up")
    for number, rack in enumerate(hosts.switches[:-1]):
        core = hosts.switches[-1]
        _run_command(
            "ip", "-n", rack, "link", "add", "uplink", "type", "veth", "peer", "name", f"r{number}", "netns", core
        )
        _run_command("ip", "-n", rack, "link", "set", "uplink", "master", "bridge", "up")
        _run_command("ip", "-n", core, "link", "set", f"r{number}", "master", "bridge", "up")
    known = "".join(f"10.77.0.{host} h{host}\n" for host in range(1, hosts.count + 1))
    for host in range(1, hosts.count + 1):
        space, switch = f"{hosts.name}h{host}", hosts.find_switch(host)
        _run_command("ip", "netns", "add", space)
        _run_command("ip", "-n", space, "link", "set", "lo", "up")
        _run_command(
            "ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{host}", "netns", switch
        )
        _run_command("ip", "-n", switch, "link", "set", f"p{host}", "master", "bridge", "up")
        _run_command("ip", "-n", space, "addr", "add", f"10.77.0.{host}/24", "dev", "eth0")
        _run_command("ip", "-n", space, "link", "set", "eth0", "up")
        own = Path("/etc/netns", space)  # mounted over /etc by `ip netns exec`
        own.mkdir(parents=True)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        (own / "ssh").mkdir()
        (own / "ssh" / "ssh_config").write_text(_SSH.format(folder=hosts.folder))


def _serve_ssh(hosts: Hosts) -> None:
    folder = hosts.folder
    for name in ("key", "host_key"):
        _run_command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "key.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PidFile": "none",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    sshd = str(_executable("sshd"))
    for host in range(1, hosts.count + 1):
        _run_command(
            *hosts.wrap_command(host, [sshd, "-f", "/dev/null", "-o", f"ListenAddress=10.77.0.{host}", *words])
        )


def _delete_namespace(space: str) -> None:
    deadline = time.monotonic() + 5
    while subprocess.run(["ip", "netns", "del", space], capture_output=True).returncode and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)


def _run_from_options(options: argparse.Namespace, folder: Path) -> AbstractContextManager[Hosts]:
    return run_hosts(folder, name=f"ws{os.getpid()}", count=options.count, racks=options.racks)


def main() -> None:
    """Run a command on the first of several hosts, and exit with its exit code."""
    parser = argparse.ArgumentParser(prog="python -m worldsize.testing.hosts", description=__doc__)
    parser.add_argument("--count", type=int, default=2, help="number of hosts (default: 2)")
    parser.add_argument("--racks", type=int, default=1, help="number of racks (default: 1)")
    parser.add_argument("--uplink", help="rate limit of each rack's uplink, e.g. 50mbit (default: unlimited)")
    parser.add_argument("--rate", help="rate limit of every link in both directions, e.g. 200mbit (default: unlimited)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run on host 1")
    options = parser.parse_args()
    if why := find_missing_requirements():
        sys.exit(why)
    with temporary_folder() as folder, _run_from_options(options, folder) as hosts:
        if options.uplink:
            hosts.shape_uplinks(options.uplink)
        if options.rate:
            hosts.shape_links(options.rate)
        done = subprocess.run(hosts.wrap_command(1, options.command), check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
