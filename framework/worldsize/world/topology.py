"""The network between hosts: the interface that leads to another host, and the tree of switches.

The switches (racks, pods, rails) are read from Slurm's topology.conf or a YAML file.
"""

from __future__ import annotations

import fcntl
import math
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, product, takewhile, zip_longest
from pathlib import Path
from typing import Any, final

import yaml

from worldsize.devices import backend_names
from worldsize.errors import ConfigError
from worldsize.files import read_regular

TIERS = ("rack", "pod", "hall")  # names of what has no other: the switches next to the hosts, those above, ...
_LARGEST_FILE = 1 << 26  # bytes
_MOST_HOSTS = 1_000_000
_WORD = re.compile(r'(\w+)=("[^"]*"|\S+)')
_PART = re.compile(r"\[([^\[\]]*)\]")


@final
@dataclass(frozen=True)
class Topology:
    """The switches above each host.

    Attributes:
        paths: By host: the names of the switches between the outermost and the host, the outermost first.
        is_spread: Whether hosts are taken from the switches in turn, rather than those below one switch together.
    """

    paths: Mapping[str, tuple[str, ...]]
    is_spread: bool = False

    @staticmethod
    def read(path: Path, *, is_spread: bool = False) -> Topology:
        """Read a file: YAML if it ends in ``.yaml`` or ``.yml``, else Slurm's topology.conf.

        In YAML a switch is a key. Below it are other switches, or hosts: a list, or text such as "node[01-16]".

        Raises:
            ConfigError: it cannot be read, or describes no tree.
        """
        try:
            text = read_regular(path, at_most=_LARGEST_FILE).decode()
            if path.suffix in (".yaml", ".yml"):
                return Topology(dict(_of_tree(yaml.safe_load(text), ())), is_spread)
            return Topology(dict(_of_slurm(text)), is_spread)
        except OSError as error:
            raise ConfigError(f"cluster.topology={path} cannot be read: {error.strerror}.") from error
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"cluster.topology={path}: {error}") from error

    def ordered(self, hosts: Sequence[str]) -> list[str]:
        """Return ``hosts`` so that those below one switch are neighbours, or taken in turn; the first stays the first.

        Raises:
            ConfigError: a host is not in the tree.
        """
        if self.is_spread:
            return self._in_turn(hosts, 0)
        places: dict[tuple[str, ...], int] = {}
        for host in hosts:
            for depth in range(len(self._path(host)) + 1):
                places.setdefault(self._path(host)[:depth], len(places))
        return sorted(hosts, key=lambda host: [places[self._path(host)[:n]] for n in range(len(self._path(host)) + 1)])

    def _in_turn(self, hosts: Sequence[str], depth: int) -> list[str]:
        """Take a host below each switch of a level in turn, each time from another one of those below that."""
        below: dict[str | None, list[str]] = {}
        for host in hosts:
            path = self._path(host)
            below.setdefault(path[depth] if depth < len(path) else None, []).append(host)
        if below.keys() == {None}:
            return list(hosts)
        parts = [each if switch is None else self._in_turn(each, depth + 1) for switch, each in below.items()]
        return [host for turn in zip_longest(*parts) for host in turn if host is not None]

    def sizes(self, hosts: Sequence[str]) -> list[int]:
        """Return how many of ``hosts`` are below one switch, for each level that divides them, the innermost first.

        A level is left out if it has all hosts below one switch, one host below each, or not equally many.

        Raises:
            ConfigError: a host is not in the tree.
        """
        several = []
        for level in range(min(len(self._path(host)) for host in hosts)):
            counts = Counter(self._path(host)[: len(self._path(host)) - level] for host in hosts)
            are_equal = len({*counts.values()}) == 1
            if are_equal and 1 < len(counts) < len(hosts):
                several.append(len(hosts) // len(counts))
        return sorted({*several})

    def check(self, hosts: Sequence[str], tiers: Mapping[str, int]) -> None:
        """Raise ConfigError unless the switches above ``hosts``, which are in order, make these ``tiers``."""
        sizes, around = self.sizes(hosts), self._hosts_around(hosts)
        fitting = {name for name, count in tiers.items() if count in sizes or (around and around <= count)}
        if missing := [f"{name}={count}" for name, count in tiers.items() if name not in fitting]:
            raise ConfigError(
                f"cluster.tiers.{missing[0]}: by cluster.topology the switches above these {len(hosts)} hosts have "
                f"{' and '.join(map(str, sizes)) or 'no equal number'} of them each. Set that, or choose other hosts."
            )

    def _hosts_around(self, hosts: Sequence[str]) -> int | None:
        """Return how many hosts are below the innermost switch above all of ``hosts``; None if there is none."""
        paths = [self._path(host) for host in hosts]
        depth = sum(1 for _ in takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False)))
        return sum(path[:depth] == paths[0][:depth] for path in self.paths.values()) if depth else None

    def _path(self, host: str) -> tuple[str, ...]:
        name = host.rpartition("@")[2]
        if name not in self.paths:
            raise ConfigError(f"cluster.topology names no switch above the host {name}. Add it, or leave it out.")
        return self.paths[name]


def tier_names() -> Iterator[str]:
    """Yield the names of tiers that a file makes: rack, pod, hall, tier4, ..., the innermost first."""
    yield from TIERS
    yield from (f"tier{number}" for number in count(len(TIERS) + 1))


def expanded(hosts: str) -> list[str]:
    """Expand Slurm's list of hosts, such as "gpu[03-05,7],cpu1", to their names.

    Raises:
        ValueError: a bracket is not closed, a range is none, or there are more than a million hosts.
    """
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\]]", hosts):
        if word in "[]":
            raise ValueError(f"{hosts!r} has a bracket that has no other")
        pieces = _PART.split(word)
        choices = [list(_range(piece)) if odd % 2 else [piece] for odd, piece in enumerate(pieces)]
        if len(names) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise ValueError(f"{hosts[:80]!r} has more than {_MOST_HOSTS:,} hosts")
        names.extend("".join(parts) for parts in product(*choices))
    return names


def _range(text: str) -> Iterator[str]:
    """Yield the numbers of "03-05,7", with as many digits as they are written with."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise ValueError(f"{part!r} is no range of numbers")
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _of_tree(node: Any, above: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, dict) and node:
        yield from _once(chain.from_iterable(_of_tree(below, (*above, str(name))) for name, below in node.items()))
    elif above and isinstance(node, str | list):
        listed = [node] if isinstance(node, str) else node
        yield from _once((host, above) for each in listed for host in expanded(str(each)))
    else:
        raise ValueError(
            f"{'/'.join(above) or 'the file'} has {type(node).__name__}, and should have switches or hosts."
        )


def _once(hosts: Iterator[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    known: set[str] = set()
    for host, path in hosts:
        if host in known:
            raise ValueError(f"the host {host} is below two switches, and a tree has one way to each.")
        known.add(host)
        yield host, path


def _of_slurm(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Read the lines of topology.conf: a switch (or a block) with its hosts, or with the switches below it."""
    above: dict[str, str] = {}
    hosts: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        values = {key.lower(): value.strip('"') for key, value in _WORD.findall(line.partition("#")[0])}
        name = values.get("switchname") or values.get("blockname")
        if name is None:
            continue
        hosts[name] = expanded(values.get("nodes", ""))
        for below in expanded(values.get("switches", "")):
            if below in above:
                raise ValueError(f"the switch {below} is below both {above[below]} and {name}, and a tree has one way.")
            above[below] = name
    if not any(hosts.values()):
        raise ValueError("no line names a switch and its hosts, as SwitchName=s1 Nodes=node[1-4].")
    if unknown := sorted(above.keys() - hosts.keys()):
        raise ValueError(f"the switch {unknown[0]} is below {above[unknown[0]]}, and no line describes it.")
    yield from _once((host, _ancestors(name, above)) for name, names in hosts.items() for host in names)


def _ancestors(name: str, above: Mapping[str, str]) -> tuple[str, ...]:
    path = [name]
    while path[0] in above:
        path.insert(0, above[path[0]])
        if path[0] in path[1:]:
            raise ValueError(f"the switch {path[0]} is below itself.")
    return tuple(path)


_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface, netdevice(7)


def address_towards(host: str) -> str:
    """Return the IPv4 address of this host's interface that routes to ``host``. Nothing is sent.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this IPv4 address; None: no interface has it."""
    return next((name for _, name in socket.if_nameindex() if _address(name) == address), None)


def missing_interfaces(named: str, backend: str) -> list[str]:
    """Return the interfaces in ``named`` that this host lacks; ``named`` is a list in the syntax of ``backend``.

    Gloo takes comma-separated names. NCCL, also beside gloo, takes comma-separated prefixes; a leading "=" makes them
    exact names, and a leading "^" excludes them.
    """
    there = [name for _, name in socket.if_nameindex()]
    if "nccl" not in backend_names(backend):
        return [name for name in named.split(",") if name not in there]
    if named.startswith("^"):
        return []
    sign = "=" if named.startswith("=") else ""
    return [
        each for each in named.removeprefix("=").split(",") if not any(_allows(sign + each, name) for name in there)
    ]


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None  # the interface has no IPv4 address


def interfaces() -> dict[str, dict[str, Any]]:
    """Return this host's interfaces that have an IPv4 address: the address, and the speed in bits/s if known."""
    named = [name for _, name in socket.if_nameindex()]
    return {name: {"address": address, "speed": _speed(name)} for name in named if (address := _address(name))}


def _speed(interface: str) -> float | None:
    try:
        speed = int(Path("/sys/class/net", interface, "speed").read_text())
    except (OSError, ValueError):  # the interface is down, or virtual
        return None
    return speed * 1e6 if speed > 0 else None


def variables(backend: str, interface: str | None, hca: str | None = None) -> dict[str, str]:
    """Return the environment variables that bind collectives to ``interface``, and NCCL to the adapters ``hca``.

    Gloo is bound with every backend: processes agree on checkpoints through it. In a run with NCCL, whose lists gloo
    does not read, it uses the first interface of this host that NCCL may use.
    """
    uses_nccl = "nccl" in backend_names(backend)
    of_gloo = _first_of_nccl(interface) if interface and uses_nccl else interface
    bound = {"GLOO_SOCKET_IFNAME": of_gloo, "NCCL_SOCKET_IFNAME": interface if uses_nccl else None}
    bound["NCCL_IB_HCA"] = hca if uses_nccl else None
    return {name: value for name, value in bound.items() if value}


def _first_of_nccl(named: str) -> str | None:
    """Return the first interface with an IPv4 address in a list in NCCL's syntax; None: this host has none."""
    allowed = [name for name in interfaces() if _allows(named, name)]
    return named if named in allowed else next(iter(allowed), None)


def _allows(named: str, name: str) -> bool:
    """Return whether the list ``named``, in NCCL's syntax, includes the interface ``name``."""
    listed = named.lstrip("^=").split(",")
    is_listed = name in listed if "=" in named[:2] else name.startswith(tuple(listed))
    if named.startswith("^"):
        return not is_listed and not name.startswith(("lo", "docker"))  # which NCCL does not take unless they are named
    return is_listed
