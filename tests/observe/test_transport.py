"""The transport is read from NCCL's own log, on machines with and without a fast fabric."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worldsize.core import (
    BitMismatch,
    CheckpointFailed,
    Cluster,
    DataWorkersChanged,
    Event,
    Link,
    MembershipChanged,
    NodeAlert,
    SaveIntervalChanged,
    Spike,
    Straggling,
    TransportFellBack,
    World,
)
from worldsize.observe.events import EventLog, alert_for, describe_event, is_event
from worldsize.observe.nccl_log import parse_nccl
from worldsize.observe.transport import Transport, detect_transport, extract_connections, transport_warning
from worldsize.testing.worlds import run_in_worlds

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
    assert extract_connections(parse_nccl(text)) == {"transports": transports, "interface": interface}


def test_sockets_where_the_cluster_declares_a_fabric_give_a_warning() -> None:
    fast = Cluster("slurm", 2, 16, "cuda", "nccl", links={"network": Link(bandwidth=12.5e9, latency=5e-6)})
    slow = Cluster("slurm", 2, 16, "cuda", "nccl", links={"network": Link(bandwidth=1.25e9, latency=5e-5)})
    ethernet: Transport = {"backend": "nccl", **extract_connections(parse_nccl(ETHERNET)), "ranks": {}}
    warning = transport_warning(ethernet, fast)
    assert warning is not None
    assert "plain sockets on eth0, but the cluster declares 12.5 GB/s" in warning
    assert transport_warning(ethernet, slow) is None
    racks = replace(slow, nodes=4, tiers={"rack": 2}, links={**slow.links, "rack": Link(50e9, 3e-6)})
    assert "the cluster declares 50 GB/s" in (transport_warning(ethernet, racks) or "")
    assert (
        transport_warning({"backend": "nccl", **extract_connections(parse_nccl(FABRIC)), "ranks": {"ib": 16}}, fast)
        is None
    )
    adapters = replace(slow, hca="mlx5")
    warning = transport_warning(ethernet, adapters)
    assert warning is not None
    assert "plain sockets on eth0, but the cluster declares InfiniBand (cluster.hca=mlx5) between nodes" in warning


def test_sockets_of_one_host_are_noticed_where_the_first_process_has_a_fabric(tmp_path: Path) -> None:
    cluster = Cluster("slurm", 2, 3, "cpu", "nccl", hca="mlx5")

    def body(world: World) -> Transport:
        log = tmp_path / f"{world.rank}.log"
        log.write_text(ETHERNET if world.rank == 2 else FABRIC)
        return detect_transport(world, cluster, {}, log)

    first, _, last = run_in_worlds(body, 3)
    assert first["transports"] == ["ib", "nvlink"]
    assert first["ranks"] == last["ranks"] == {"nvlink": 2, "shm": 1, "ib": 2, "socket": 1}
    warning = transport_warning(first, cluster)
    assert warning is not None
    assert "NCCL uses plain sockets in 1 processes, and InfiniBand in 2, but" in warning


def test_a_fallback_is_an_event_of_the_run(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl")(TransportFellBack("NCCL uses plain sockets", {"socket": 2}, "eth0"))
    row = json.loads((tmp_path / "events.jsonl").read_text())
    assert is_event(row)
    assert row == {
        "event": "transport",
        "time": row["time"],
        "reason": "NCCL uses plain sockets",
        "ranks": {"socket": 2},
        "interface": "eth0",
    }


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Straggling(7, 3, "gpu1", "cuda:1", "compute", 1.4, 5), "step 7: straggling, rank 3, 1.4 × as slow"),
        (
            BitMismatch(7, "loss", (3,), ("gpu1",), ("cuda:1",), logical_rank=5),
            "step 7: wrong bits on rank 3 on gpu1 (cuda:1): loss, logical rank 5.",
        ),
        (
            BitMismatch(7, "model/head", (), ("gpu1", "gpu2"), ("cpu", "cpu"), suspects=(0, 1)),
            "step 7: different bits on rank 0 on gpu1 (cpu), rank 1 on gpu2 (cpu), without a majority: model/head.",
        ),
        (
            Spike(70, "loss", 12.0, 2.0, 50, 60, "warn"),
            "step 70: the loss is 12, 6 times the median of the 50 values before it.",
        ),
        (Spike(70, "loss", float("nan"), 2.0, 50, 60, "rewind"), "step 70: the loss is nan."),
        (NodeAlert(1, "gpu1", "disk", 0.97, 0.95), "gpu1"),
        (CheckpointFailed(7, "no space left", 5, 2), "step 7: failed to write the checkpoint: no space left."),
        (DataWorkersChanged(7, 3, 4, 2, 0.3), "step 7: rank 3: data workers changed from 2 to 4"),
        (SaveIntervalChanged(7, 50, 60.0, 1.0, 3600.0), "step 7: checkpoint interval set to 50 steps"),
        (MembershipChanged(7, 1, (0, 1), {2: "killed"}, (), 3.0), "after step 7: worker 2 lost (killed)"),
        (TransportFellBack("NCCL uses plain sockets.", {"socket": 2}, "eth0"), "NCCL uses plain sockets."),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_event_that_is_written_is_described_in_words(tmp_path: Path, event: Event, words: str) -> None:
    EventLog(tmp_path / "events.jsonl")(event)
    text = describe_event(json.loads((tmp_path / "events.jsonl").read_text()))
    assert words in text
    assert not any(mark in text for mark in ("None", "{", "["))
    alert = alert_for(event)
    assert (alert is None) == isinstance(event, DataWorkersChanged | SaveIntervalChanged)
    assert alert is None or not any(mark in f"{alert.title}: {alert.text}" for mark in ("None", "{", "["))


def test_the_manifest_records_the_transport(train: Any) -> None:
    run = train("recipe=digits", "steps=3", "cluster.processes=2")
    assert run.code == 0, run.error
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert attempt["transport"] == {
        "backend": "gloo",
        "transports": ["socket"],
        "interface": "lo",
        "ranks": {"socket": 2},
    }
