"""The transport is read from NCCL's own log, on machines with and without a fast fabric."""

from __future__ import annotations

from typing import Any

import pytest

from worldsize.core import Cluster, Link
from worldsize.observe.nccl_log import parse_nccl
from worldsize.observe.transport import Transport, connections_of, transport_warning

ETHERNET = """\
gpu1:4021:4021 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
gpu1:4021:4060 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/Socket/0
gpu1:4021:4060 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct
"""
FABRIC = """\
gpu1:4021:4021 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
gpu1:4021:4060 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA
gpu1:4021:4060 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""


@pytest.mark.parametrize(
    ("text", "transports", "interface"),
    [(ETHERNET, ["shm", "socket"], "eth0"), (FABRIC, ["ib", "nvlink"], "mlx5_0"), ("", [], None)],
)
def test_transports_and_interface_are_read(text: str, transports: list[str], interface: str | None) -> None:
    assert connections_of(parse_nccl(text)) == {"transports": transports, "interface": interface}


def test_sockets_where_the_cluster_declares_a_fabric_give_a_warning() -> None:
    fast = Cluster("slurm", 2, 16, "cuda", "nccl", links={"network": Link(bandwidth=12.5e9, latency=5e-6)})
    slow = Cluster("slurm", 2, 16, "cuda", "nccl", links={"network": Link(bandwidth=1.25e9, latency=5e-5)})
    ethernet: Transport = {"backend": "nccl", **connections_of(parse_nccl(ETHERNET))}
    warning = transport_warning(ethernet, fast)
    assert warning is not None
    assert "plain sockets on eth0, but the cluster declares 12.5 GB/s" in warning
    assert transport_warning(ethernet, slow) is None
    assert transport_warning({"backend": "nccl", **connections_of(parse_nccl(FABRIC))}, fast) is None


def test_the_manifest_records_the_transport(train: Any) -> None:
    run = train("recipe=digits", "steps=3", "cluster.processes=2")
    assert run.code == 0, run.error
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert attempt["transport"] == {"backend": "gloo", "transports": ["socket"], "interface": "lo"}
