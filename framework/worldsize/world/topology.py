"""The network between hosts: local interfaces and routes, and the tree of switches.

The tree of switches (racks, pods, rails) is read from Slurm's topology.conf or a YAML file.
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

TIERS = ("rack", "pod", "hall")  # default names for the levels of switches, starting next to the hosts
_LARGEST_FILE = 1 << 26  # maximum bytes
_MOST_HOSTS = 1_000_000
_WORD = re.compile(r'(\w+)=("[^"]*"|\S+)')
_PART = re.compile(r"\[([^\[\]]*)\]")


@final
@dataclass(frozen=True)
class Topology:
    """The tree of switches above the hosts.

    Attributes:
        paths: Maps each host to the names of the switches above it, outermost first.
        is_spread: Whether to pick hosts from the switches round-robin, instead of grouping hosts by switch.
    """

    paths: Mapping[str, tuple[str, ...]]
    is_spread: bool = False

    @staticmethod
    def read(path: Path, *, is_spread: bool = False) -> Topology:
        """Read a topology from YAML (``.yaml``, ``.yml``) or otherwise a topology.conf.

        In YAML, each key is a switch. Its value has further switches, or hosts as a list or text ("node[01-16]").

        Raises:
            ConfigError: the file cannot be read, or does not describe a tree.
        """
        try:
            text = read_regular(path, at_most=_LARGEST_FILE).decode()
            if path.suffix in (".yaml", ".yml"):
                return Topology(dict(_parse_tree(yaml.safe_load(text), ())), is_spread)
            return Topology(dict(_parse_slurm(text)), is_spread)
        except OSError as error:
            raise ConfigError(f"cluster.topology={path} cannot be read: {error.strerror}.") from error
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"cluster.topology={path}: {error}") from error

    def order_hosts(self, hosts: Sequence[str]) -> list[str]:
        """Group ``hosts`` by switch, or interleave them if ``is_spread``; the first host stays first.

        Raises:
            ConfigError: a host is not in the tree.
        """
        if self.is_spread:
            return self._interleave_hosts(hosts, 0)
        places: dict[tuple[str, ...], int] = {}
        for host in hosts:
            for depth in range(len(self._find_path(host)) + 1):
                places.setdefault(self._find_path(host)[:depth], len(places))
        return sorted(
            hosts, key=lambda host: [places[self._find_path(host)[:n]] for n in range(len(self._find_path(host)) + 1)]
        )

    def _interleave_hosts(self, hosts: Sequence[str], depth: int) -> list[str]:
        """Order hosts round-robin over the switches at ``depth``, recursively."""
        below: dict[str | None, list[str]] = {}
        for host in hosts:
            path = self._find_path(host)
            below.setdefault(path[depth] if depth < len(path) else None, []).append(host)
        if below.keys() == {None}:
            return list(hosts)
        parts = [each if switch is None else self._interleave_hosts(each, depth + 1) for switch, each in below.items()]
        return [host for turn in zip_longest(*parts) for host in turn if host is not None]

    def count_hosts_per_switch(self, hosts: Sequence[str]) -> list[int]:
        """Return the number of ``hosts`` per switch, for each level that divides them evenly.

        A level is omitted if one switch has all hosts, if each switch has one host, or if the counts differ.

        Raises:
            ConfigError: a host is not in the tree.
        """
        several = []
        for level in range(min(len(self._find_path(host)) for host in hosts)):
            counts = Counter(self._find_path(host)[: len(self._find_path(host)) - level] for host in hosts)
            are_equal = len({*counts.values()}) == 1
            if are_equal and 1 < len(counts) < len(hosts):
                several.append(len(hosts) // len(counts))
        return sorted({*several})

    def check_tiers(self, hosts: Sequence[str], tiers: Mapping[str, int]) -> None:
        """Raise ConfigError unless the switches group ``hosts`` into units of these sizes (hosts per unit, by tier)."""
        sizes, around = self.count_hosts_per_switch(hosts), self._hosts_around(hosts)
        fitting = {name for name, count in tiers.items() if count in sizes or (around and around <= count)}
        if missing := [f"{name}={count}" for name, count in tiers.items() if name not in fitting]:
            raise ConfigError(
                f"cluster.tiers.{missing[0]} does not match cluster.topology: these {len(hosts)} hosts are connected "
                f"to switches with {' and '.join(map(str, sizes)) or 'unequal numbers of'} hosts each. Set a matching "
                "number, or choose different hosts."
            )

    def _hosts_around(self, hosts: Sequence[str]) -> int | None:
        """Count the hosts below the innermost switch of all ``hosts``; None without one."""
        paths = [self._find_path(host) for host in hosts]
        depth = sum(1 for _ in takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False)))
        return sum(path[:depth] == paths[0][:depth] for path in self.paths.values()) if depth else None

    def _find_path(self, host: str) -> tuple[str, ...]:
        name = host.rpartition("@")[2]
        if name not in self.paths:
            raise ConfigError(
                f"host {name} not found in cluster.topology. Add the host to the file, or remove it from the run."
            )
        return self.paths[name]


def tier_names() -> Iterator[str]:
    """Yield default names for the tiers of a topology file, innermost first: rack, pod, hall, tier4, ..."""
    yield from TIERS
    yield from (f"tier{number}" for number in count(len(TIERS) + 1))


def expand_hosts(hosts: str) -> list[str]:
    """Expand a Slurm host list, such as "gpu[03-05,7],cpu1", to host names.

    Raises:
        ValueError: a bracket is unmatched, a range is invalid, or there are more than a million hosts.
    """
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\]]", hosts):
        if word in "[]":
            raise ValueError(f"{hosts!r} has an unmatched bracket")
        pieces = _PART.split(word)
        choices = [list(_expand_range(piece)) if odd % 2 else [piece] for odd, piece in enumerate(pieces)]
        if len(names) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise ValueError(f"{hosts[:80]!r} has more than {_MOST_HOSTS:,} hosts")
        names.extend("".join(parts) for parts in product(*choices))
    return names


def _expand_range(text: str) -> Iterator[str]:
    """Yield the numbers in a list such as "03-05,7", zero-padded as written."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise ValueError(f"{part!r} is not a number, or an ascending range of at most {_MOST_HOSTS:,} numbers")
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _parse_tree(node: Any, above: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, dict) and node:
        yield from _iterate_unique_hosts(
            chain.from_iterable(_parse_tree(below, (*above, str(name))) for name, below in node.items())
        )
    elif above and isinstance(node, str | list):
        listed = [node] if isinstance(node, str) else node
        yield from _iterate_unique_hosts((host, above) for each in listed for host in expand_hosts(str(each)))
    else:
        raise ValueError(f"{'/'.join(above) or 'the file'}: expected switches or hosts, got {type(node).__name__}.")


def _iterate_unique_hosts(hosts: Iterator[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    known: set[str] = set()
    for host, path in hosts:
        if host in known:
            raise ValueError(f"the host {host} is below two switches; a host must have one parent.")
        known.add(host)
        yield host, path


def _parse_slurm(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield hosts and their switches from topology.conf, a switch or block per line."""
    above: dict[str, str] = {}
    hosts: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        values = {key.lower(): value.strip('"') for key, value in _WORD.findall(line.partition("#")[0])}
        name = values.get("switchname") or values.get("blockname")
        if name is None:
            continue
        hosts[name] = expand_hosts(values.get("nodes", ""))
        for below in expand_hosts(values.get("switches", "")):
            if below in above:
                raise ValueError(
                    f"the switch {below} is below both {above[below]} and {name}; a switch must have one parent."
                )
            above[below] = name
    if not any(hosts.values()):
        raise ValueError("no switch with hosts found. Add a line such as SwitchName=s1 Nodes=node[1-4].")
    if unknown := sorted(above.keys() - hosts.keys()):
        raise ValueError(f"the switch {unknown[0]} is below {above[unknown[0]]} but not defined.")
    yield from _iterate_unique_hosts((host, _ancestors(name, above)) for name, names in hosts.items() for host in names)


def _ancestors(name: str, above: Mapping[str, str]) -> tuple[str, ...]:
    path = [name]
    while path[0] in above:
        path.insert(0, above[path[0]])
        if path[0] in path[1:]:
            raise ValueError(f"the switch {path[0]} is below itself.")
    return tuple(path)


_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface, netdevice(7)


def address_towards(host: str) -> str:
    """Return this host's IPv4 address on the route to ``host``, without sending anything.

    Raises:
        OSError: ``host`` cannot be resolved, or has no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def find_interface(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address; None if there is none."""
    return next((name for _, name in socket.if_nameindex() if _read_address(name) == address), None)


def missing_interfaces(named: str, backend: str) -> list[str]:
    """Return the interfaces listed in ``named``, in ``backend``'s syntax, that this host lacks.

    Gloo accepts comma-separated names. NCCL, even combined with gloo, accepts comma-separated prefixes; a leading "="
    makes them exact names, and a leading "^" excludes them.
    """
    there = [name for _, name in socket.if_nameindex()]
    if "nccl" not in backend_names(backend):
        return [name for name in named.split(",") if name not in there]
    if named.startswith("^"):
        return []
    sign = "=" if named.startswith("=") else ""
    return [
        each for each in named.removeprefix("=").split(",") if not any(_is_allowed(sign + each, name) for name in there)
    ]


def _read_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None  # the interface lacks an IPv4 address


def interfaces() -> dict[str, dict[str, Any]]:
    """Return address and speed (bit/s, None if unknown) of each interface with IPv4."""
    named = [name for _, name in socket.if_nameindex()]
    return {
        name: {"address": address, "speed": _read_speed(name)} for name in named if (address := _read_address(name))
    }


def _read_speed(interface: str) -> float | None:
    try:
        speed = int(Path("/sys/class/net", interface, "speed").read_text())
    except (OSError, ValueError):  # the interface is down, or virtual
        return None
    return speed * 1e6 if speed > 0 else None


def variables(backend: str, interface: str | None, hca: str | None = None) -> dict[str, str]:
    """Return environment variables that bind collectives to ``interface``, and NCCL to adapters ``hca``.

    Gloo is bound for every backend, since processes coordinate checkpoints through it. Gloo does not support NCCL's
    list syntax, so in a run with NCCL it uses the first of this host's interfaces that NCCL may use.
    """
    uses_nccl = "nccl" in backend_names(backend)
    of_gloo = _first_of_nccl(interface) if interface and uses_nccl else interface
    bound = {"GLOO_SOCKET_IFNAME": of_gloo, "NCCL_SOCKET_IFNAME": interface if uses_nccl else None}
    bound["NCCL_IB_HCA"] = hca if uses_nccl else None
    return {name: value for name, value in bound.items() if value}


def _first_of_nccl(named: str) -> str | None:
    """Return the first interface with IPv4 that an NCCL list allows; None without one."""
    allowed = [name for name in interfaces() if _is_allowed(named, name)]
    return named if named in allowed else next(iter(allowed), None)


def _is_allowed(named: str, name: str) -> bool:
    """Return whether the list ``named``, in NCCL's syntax, allows the interface ``name``."""
    listed = named.lstrip("^=").split(",")
    is_listed = name in listed if "=" in named[:2] else name.startswith(tuple(listed))
    if named.startswith("^"):
        return not is_listed and not name.startswith(("lo", "docker"))  # NCCL uses these only if named
    return is_listed
