"""Logs of NCCL and torch become a few lines: the network, the number of connections, and warnings by rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.observe.run_folders import attempt, write_run
from worldsize.cli import logs
from worldsize.observe import nccl_log as debug_summary_module
from worldsize.observe.nccl_log import debug_summary, parse_nccl
from worldsize.observe.transport import listen_to_nccl, nccl_log
from worldsize.record.flight import collectives_file
from worldsize.record.run_directory import RunDirectory

# as NCCL 2.21 and 2.27 write them to NCCL_DEBUG_FILE, without lines unrelated to networks
FIRST = """\
gpu1:4021:4021 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
gpu1:4021:4021 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)
gpu1:4021:4021 [0] NCCL INFO cudaDriverVersion 12040
NCCL version 2.21.5+cuda12.4
gpu1:4021:4060 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
gpu1:4021:4060 [0] NCCL INFO Using non-device net plugin version 0
gpu1:4021:4060 [0] NCCL INFO Using network IB
gpu1:4021:4060 [0] NCCL INFO ncclCommInitRank comm 0x8d5 rank 0 nranks 4 cudaDev 0 commId 0x49b - Init START
gpu1:4021:4060 [0] NCCL INFO Channel 00/02 :    0   1   2   3
gpu1:4021:4060 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0(1)/GDRDMA
gpu1:4021:4060 [0] NCCL INFO Channel 01/0 : 3[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
gpu1:4021:4060 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu1:4021:4060 [0] NCCL INFO ncclCommInitRank comm 0x8d5 rank 0 nranks 4 cudaDev 0 commId 0x49b - Init COMPLETE
gpu1:4021:4090 [0] NCCL INFO ncclCommSplit comm 0x9a1 rank 1 nranks 2 cudaDev 0 commId 0x77c - Init COMPLETE
"""
SECOND = """\
[2026-05-05 06:16:47] gpu2:900:931 [1] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion with status=12
gpu2:900:900 [1] NCCL INFO NCCL version 2.27.5+cuda12.9
gpu2:900:931 [1] NCCL INFO NET/IB : No device found.
gpu2:900:931 [1] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0> [1]eth1:10.0.1.2<0>
gpu2:900:931 [1] NCCL INFO Using network Socket
gpu2:900:931 [1] NCCL INFO ncclCommInitRankConfig comm 0x1 rank 3 nranks 4 cudaDev 1 commId 0x49b - Init START
[2026-05-05 06:16:49] gpu2:900:931 [1] transport/net_ib.cc:1296 (x) NCCL WARN NET/IB : Got completion with status=5

gpu2:900:931 [1] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.1<36529> failed : Connection refused
"""


def test_the_log_of_a_process_has_its_rank_its_network_and_its_connections() -> None:
    log = parse_nccl(FIRST)
    assert (log.host, log.version, log.rank, log.size, log.is_connected) == ("gpu1", "2.21.5+cuda12.4", 0, 4, True)
    assert (log.network, log.devices, log.bootstrap) == ("IB", ("mlx5_0:1/IB", "mlx5_1:1/RoCE"), "eth0")
    assert dict(log.connections) == {"NET/IB/0/GDRDMA": 2, "P2P/CUMEM/read": 1}
    assert log.warnings == []


def test_the_summary_says_who_is_on_which_network_and_who_warned(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for host, pid, text in (("gpu1", 4021, FIRST), ("gpu2", 900, SECOND)):
        run.nccl_logs(host).mkdir(parents=True)
        (run.nccl_logs(host) / f"nccl_{host}_{pid}.log").write_text(text)
    for rank in (0, 1):
        log = run.get_log_file("worker", rank)
        log.write_text(f"step 1\n[rank{rank}]:[W505 06:16:50.1 ProcessGroupNCCL.cpp:1250] Warning: slow \x1b[31m\n")
        collectives_file(log).write_text(json.dumps({"0": [57 - rank, 56], "": "x", "1": [True, [1]]}))
    assert debug_summary(run).splitlines() == [
        "NCCL and torch logs (cluster.debug):",
        "  NCCL 2.21.5+cuda12.4, 2.27.5+cuda12.9: 1 of 4 ranks connected",
        "  started to connect but did not finish: rank 3",
        "  network IB: mlx5_0:1/IB, mlx5_1:1/RoCE, bootstrap on eth0 (rank 0)",
        "  network Socket: eth0, eth1 (rank 3)",
        "  2 connections via NET/IB/0/GDRDMA",
        "  1 connections via P2P/CUMEM/read",
        "  collectives of group 0: 57 started, 56 completed by worker_00000; 56 started, 56 completed by worker_00001",
        "  warning from rank 3 (2): transport/net_ib.cc:1296 NET/IB : Got completion with status=12",
        r"  warning from worker_00000 (1), worker_00001 (1): ProcessGroupNCCL.cpp:1250 Warning: slow \x1b[31m",
        "  warning from rank 3 (1): misc/socket.cc:484 socketStartConnect: Connect to 10.0.0.1<36529> failed : "
        "Connection refused",
    ]


def test_a_rank_that_an_earlier_attempt_had_connected_is_not_told_as_connected(tmp_path: Path) -> None:
    """The second of two attempts has connected only rank 0, and its processes have not counted a collective yet."""
    run = RunDirectory(tmp_path)
    run.nccl_logs("gpu").mkdir(parents=True)
    counts = collectives_file(run.get_log_file("worker", 0))
    run.get_log_file("worker", 0).write_text("step 1\n")
    counts.write_text(json.dumps({"0": [57, 57]}))
    done = "gpu1:{pid}:1 [0] NCCL INFO ncclCommInitRank comm 0x1 rank {rank} nranks 2 cudaDev 0 - Init {state}\n"
    for pid, rank, state in ((10, 0, "COMPLETE"), (11, 1, "COMPLETE"), (20, 0, "COMPLETE"), (21, 1, "START")):
        file = run.nccl_logs("gpu") / f"nccl_gpu_{pid}.log"
        file.write_text(done.format(pid=pid, rank=rank, state=state))
        os.utime(file, (1000 * (pid // 10),) * 2)
    os.utime(counts, (1000, 1000))
    told = debug_summary(run, {"start_at": 1500.0, "transport": {"backend": "nccl"}})
    assert "1 of 2 ranks connected" in told
    assert "started to connect but did not finish: rank 1" in told
    assert "collectives" not in told
    assert "2 of 2 ranks connected" in debug_summary(run, {"start_at": 500.0})


def test_the_logs_of_an_attempt_are_known_by_their_names_also_in_a_run_folder_that_was_copied(tmp_path: Path) -> None:
    """All files are as old as the copy, and the first attempt's process ids were reused."""
    folder = RunDirectory(tmp_path).nccl_logs("gpu")
    folder.mkdir(parents=True)
    done = "gpu:1:1 [0] NCCL INFO ncclCommInitRank comm 0x1 rank {rank} nranks 2 cudaDev 0 - Init {state}\n"
    for number, rank, state in ((1, 0, "COMPLETE"), (1, 1, "COMPLETE"), (2, 0, "COMPLETE"), (2, 1, "START")):
        log = nccl_log(folder, host="gpu", process=str(rank), attempt=number)
        log.write_text(done.format(rank=rank, state=state))
    assert "1 of 2 ranks connected" in debug_summary(RunDirectory(tmp_path), {"number": 2, "start_at": 0.0})
    assert "2 of 2 ranks connected" in debug_summary(RunDirectory(tmp_path), {"number": 1, "start_at": 0.0})
    assert listen_to_nccl(folder, attempt=2)["NCCL_DEBUG_FILE"] == f"{folder}/nccl_%h_%p.attempt_2.log"


def test_processes_whose_logs_are_not_read_are_not_told_as_unconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_summary_module, "_FILES", 2)
    run = RunDirectory(tmp_path)
    run.nccl_logs("gpu").mkdir(parents=True)
    for rank in range(3):
        run.get_log_file("worker", rank).write_text("step 1\n")
        line = f"gpu:{rank}:1 [0] NCCL INFO ncclCommInitRank comm 0x1 rank {rank} nranks 3 cudaDev 0 - Init COMPLETE\n"
        (run.nccl_logs("gpu") / f"nccl_gpu_{rank}.log").write_text(line)
    assert debug_summary(run).splitlines()[1:] == [
        "  NCCL of an unknown version: 2 of 2 processes connected (logs read from 2 of 3)",
        "  no warnings",
        "  the output of 1 more processes was not read",
    ]


def test_the_summary_of_a_run_is_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transport = {"backend": "gloo", "transports": ["socket"], "interface": "lo"}
    run = write_run(tmp_path / "run", attempts=[attempt(1, steps=[0, 3], transport=transport)], steps=3)
    monkeypatch.setattr(sys, "argv", ["logs", str(run), "--debug"])
    logs.main()
    said = capsys.readouterr()
    assert said.out.splitlines()[1:] == ["  gloo on lo", "  no warnings"]
    assert "the run had cluster.debug=false, so little was logged" in said.err


@pytest.mark.parametrize("text", ["", "no line of NCCL", "x" * 3_000_000, "gpu1:1:1 [0] NCCL WARN \n" * 40])
def test_a_log_that_says_little_or_much_makes_a_short_summary(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    run.nccl_logs("gpu1").mkdir(parents=True)
    (run.nccl_logs("gpu1") / "nccl_gpu1_1.log").write_text(text)
    said = debug_summary(run)
    assert len(said) < 1000
    assert ("warning from a process on gpu1 (40)" in said) == ("WARN" in text)


def test_output_of_a_rank_that_the_run_does_not_have_is_no_empty_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(write_run(tmp_path / "run", attempts=[attempt(1, steps=[0, 3])], steps=3))
    for rank in (0, 1):
        run.get_log_file("worker", rank).parent.mkdir(exist_ok=True)
        run.get_log_file("worker", rank).write_text(f"hello from {rank}\n")
    monkeypatch.setattr(sys, "argv", ["logs", str(run.path), "--rank", "1", "--rank", "9"])
    with pytest.raises(SystemExit) as ended:
        logs.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == "[worker 1] hello from 1\n"
    assert said.err == f"no output from rank 9 in {run.path}. Output found for ranks 0-1.\n"
