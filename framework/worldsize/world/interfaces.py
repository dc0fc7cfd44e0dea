"""Finds the network interface that leads to another host."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface, netdevice(7)


def address_towards(host: str) -> str:
    """This host's own IPv4 address on the way to ``host``. Nothing is sent.

    Raises:
        OSError: the name is unknown, or no interface leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the interface that has this IPv4 address."""
    return next((name for _, name in socket.if_nameindex() if _address(name) == address), None)


def missing_interfaces(named: str, backend: str) -> list[str]:
    """Return those of ``named``, which is as ``backend`` reads it, that this host does not have.

    Gloo takes names with commas between them. NCCL takes prefixes of names, with "=" in front whole names, and with "^"
    in front all others.
    """
    there = [name for _, name in socket.if_nameindex()]
    if backend != "nccl":
        return [name for name in named.split(",") if name not in there]
    if named.startswith("^"):
        return []
    prefixes = named.removeprefix("=").split(",")
    return [each for each in prefixes if not any(name.startswith(each) for name in there)]


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None  # it has none


def interfaces() -> dict[str, dict[str, Any]]:
    """This host's interfaces that have an IPv4 address: the address, and the speed in bits a second if it is told."""
    named = [name for _, name in socket.if_nameindex()]
    return {name: {"address": address, "speed": _speed(name)} for name in named if (address := _address(name))}


def _speed(interface: str) -> float | None:
    try:
        speed = int(Path("/sys/class/net", interface, "speed").read_text())
    except (OSError, ValueError):  # not up, or nothing that has a speed
        return None
    return speed * 1e6 if speed > 0 else None


def variables(backend: str, interface: str | None, hca: str | None = None) -> dict[str, str]:
    """Variables that make the collectives of ``backend`` use ``interface``, and NCCL these InfiniBand adapters."""
    names = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
    named = {names[backend]: interface} if interface and backend in names else {}
    return {**named, **({"NCCL_IB_HCA": hca} if hca and backend == "nccl" else {})}
