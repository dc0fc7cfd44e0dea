"""Gloo and NCCL are bound to an interface, each in its own syntax."""

from __future__ import annotations

import socket

import pytest

from worldsize.devices import backend_for, backend_names
from worldsize.world import topology
from worldsize.world.topology import missing_interfaces, variables

MIXED = "cpu:gloo,cuda:nccl"


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lo", "docker0", "eth10", "eth1", "ib0", "down0")
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))
    monkeypatch.setattr(topology, "_read_address", lambda name: None if name == "down0" else "10.0.0.1")


def test_a_mixed_backend_is_read_by_device() -> None:
    assert [backend_for(MIXED, kind) for kind in ("cpu", "cuda", "xpu")] == ["gloo", "nccl", ""]
    assert [backend_for("NCCL", kind) for kind in ("cpu", "cuda")] == ["nccl", "nccl"]
    assert [backend_names(each) for each in (MIXED, "gloo")] == [["gloo", "nccl"], ["gloo"]]


def test_gloo_is_bound_in_every_run_and_nccl_where_it_sums() -> None:
    bound = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx5"}
    assert variables("nccl", "ib0", "mlx5") == variables(MIXED, "ib0", "mlx5") == bound
    assert variables("gloo", "ib0", "mlx5") == variables("xccl", "ib0") == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert variables(MIXED, None) == {}


@pytest.mark.parametrize(
    ("named", "of_gloo"),
    [("eth", "eth10"), ("=eth1", "eth1"), ("ib,eth1", "eth10"), ("^eth", "ib0"), ("^=eth10", "eth1"), ("wlan", None)],
)
def test_gloo_takes_the_first_interface_that_nccls_list_allows(named: str, of_gloo: str | None) -> None:
    bound = {"GLOO_SOCKET_IFNAME": of_gloo, "NCCL_SOCKET_IFNAME": named}
    assert variables("nccl", named) == {name: value for name, value in bound.items() if value}


def test_an_interface_that_this_host_lacks_is_found_in_either_syntax() -> None:
    assert missing_interfaces("eth1,eth2", "gloo") == ["eth2"]
    assert missing_interfaces("eth,wlan", MIXED) == missing_interfaces("eth,wlan", "nccl") == ["wlan"]
    assert missing_interfaces("=eth1,eth", "nccl") == ["eth"]
    assert missing_interfaces("^wlan", MIXED) == []
