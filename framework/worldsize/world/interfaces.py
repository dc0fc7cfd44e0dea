"""Finds the network interface that leads to another host."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path
from typing import Any

from worldsize.devices import backend_names

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
