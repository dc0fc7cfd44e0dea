"""Ranks started by torchrun keep the run's record, and report errors in one sentence where that suffices."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import weakref
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from worldsize.core import Event, RunStarted
from worldsize.healing.membership import Membership, MembershipChannel, receive_message, send_message
from worldsize.record.manifest import write_manifest
from worldsize.record.redaction import Scrubber
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunRecord, read_run
from worldsize.worker import process
from worldsize.worker.context import ProcessResources
from worldsize.world import processes
from worldsize.world.environments import Placement, placement
from worldsize.world.processes import Preemption


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with a single process, started by torchrun."""
    write_manifest(tmp_path / "run_manifest.json", {"attempts": [], "results": None})
    RunDirectory(tmp_path).config.write_text("cluster: {environment: alone}\n")
    monkeypatch.delenv("WORLDSIZE_ATTEMPT", raising=False)
    monkeypatch.setattr(process, "placement", lambda environ, _: placement({}, "alone"))
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path)])
    return tmp_path


def test_a_record_that_cannot_be_written_is_a_sentence(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(started / "run_manifest.json"))

    monkeypatch.setattr(RunRecord, "begin_attempt", full)
    with pytest.raises(SystemExit) as ended:
        process.main()
    assert "failed to write to the run folder" in str(ended.value.code)


@pytest.mark.parametrize(
    ("error", "is_sentence"),
    [
        ("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.1]:9. This is typically caused by", True),
        ("the recipe's own connection was closed by peer", False),
    ],
)
def test_a_rank_that_lost_its_peers_ends_in_a_sentence(
    error: str, is_sentence: bool, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(*_: object) -> int:
        raise RuntimeError(error)

    monkeypatch.setenv("WORLDSIZE_ATTEMPT", "1")
    monkeypatch.setattr(process, "run_role", play)
    with pytest.raises(SystemExit if is_sentence else RuntimeError) as ended:
        process.main()
    if is_sentence:
        assert str(ended.value).startswith("rank 0 lost its peers: RuntimeError: [/gloo/transport/tcp/pair.cc:561]")
        assert str(ended.value).endswith("[10.0.0.1]:9. Look for the rank that failed first.")


def test_the_first_process_that_failed_is_recorded(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(started)

    def error_of(rank: int, after: float, **facts: object) -> None:
        error = {"time_ns": time.time_ns() + int(1e9 * after), "traceback": f"error {rank}", "host": "b", **facts}
        run.get_error_file("worker", rank).write_text(json.dumps(error))

    def play(*_: object) -> int:
        error_of(0, 1.0, lost_peer="closed")
        error_of(2, 3.0)
        error_of(3, 2.0)
        raise RuntimeError

    run.get_error_file("worker", 0).parent.mkdir()
    error_of(1, -1.0)  # from an earlier attempt
    monkeypatch.setattr(process, "run_role", play)
    with pytest.raises(RuntimeError):
        process.main()
    failure = read_run(started).attempts[-1]["failure"]
    assert failure == {"role": "worker", "rank": 3, "host": "b", "step": None, "cause": "error 3"}


def test_an_error_that_quotes_a_secret_is_written_without_it(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(started)

    def refuse(_: RunDirectory) -> None:
        os.environ.pop("WORLDSIZE_SECRETS")  # like the settings of a run
        raise ConnectionError("401 for https://me:hunter2@host: canary-of-the-key and canary-of-the-variable")

    monkeypatch.setenv("WORLDSIZE_SECRETS", json.dumps([[["logger", "key"], "canary-of-the-key"]]))
    monkeypatch.setenv("HUB_TOKEN", "canary-of-the-variable")
    monkeypatch.setattr(process, "read_settings", refuse)
    with pytest.raises(ConnectionError):
        process.run_role(run, placement({}, "alone"))
    text = run.get_error_file("process", 0).read_text()
    assert json.loads(text)["cause"] == "ConnectionError: 401 for https://host: <redacted> and <redacted>"
    assert "canary" not in text
    assert "hunter2" not in text


def test_steps_of_a_worker_do_not_search_for_nvml(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = "PYTORCH_NVML_BASED_CUDA_CHECK"

    def refuse(_: RunDirectory) -> None:
        raise ConnectionError(os.environ.get(asks))

    monkeypatch.setenv(asks, "1")
    monkeypatch.setattr(process, "read_settings", refuse)
    with pytest.raises(ConnectionError, match="None"):
        process.run_role(RunDirectory(started), placement({}, "alone"))


def test_a_full_gpu_names_what_takes_less_memory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    except torch.OutOfMemoryError as error:
        process._write_error(run, run.get_error_file("worker", 0), error, Scrubber(()))
    text = json.loads(run.get_error_file("worker", 0).read_text())["traceback"]
    assert "Tried to allocate 2.00 GiB" in text
    for remedy in ("logical_ranks", "precision=bf16", "activation_checkpointing=full", "strategy=fsdp"):
        assert remedy in text


def test_the_log_of_nccl_is_found_where_host_names_have_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL replaces %h by the name of the host up to its first dot."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu1.cluster.example")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    for name in ("NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
    run, place = RunDirectory(tmp_path), Placement(0, 1, 0, 1, "env://")
    process._enable_nccl_log("cpu:gloo,cuda:nccl", run, place)
    written = os.environ["NCCL_DEBUG_FILE"].replace("%h", "gpu1").replace("%p", str(os.getpid()))
    assert process._nccl_log(run, place) == Path(written)


def test_a_process_that_began_again_leaves_hangups_and_hears_of_members(
    started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Pipe()
    found = list[Membership]()

    def play(_: object, __: object, channel: MembershipChannel) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        found.append(channel.wait_for_membership(-1))
        return 0

    RunDirectory(started).config.write_text("cluster: {environment: alone, timeout: 5.0}\n")
    monkeypatch.setenv("WORLDSIZE_ATTEMPT", "1")
    monkeypatch.setenv(processes.PIPE, str(os.dup(theirs.fileno())))
    monkeypatch.setattr(process, "run_role", play)
    send_message(ours, Membership(1, (0, 1), (-1, -1)).to_message())
    before = signal.signal(signal.SIGHUP, fail_on_hangup)
    try:
        with pytest.raises(SystemExit) as ended:
            process.main()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.value.code == 0
    assert found[0].members == (0, 1)
    assert receive_message(ours) == {"stopped": 0, "step": -1}


def fail_on_hangup(*_: object) -> None:
    raise AssertionError("it ends with its terminal")


class Told:
    """A listener for the whole run, or for one membership and its replica."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)


def test_listeners_of_a_membership_are_told_of_the_start_and_not_kept() -> None:
    lasting, passing, started = Told(), Told(), RunStarted("run", 10)
    resources = ProcessResources(cast(Any, None), cast(Any, None), None, [lasting], Preemption([]))
    resources.tell_started(started, passing=[passing])
    gone = weakref.ref(passing)
    assert passing.events == [started]
    del passing
    assert gone() is None
    resources.tell_started(started, passing=[another := Told()])
    assert (lasting.events, another.events) == ([started], [started])
