"""A killed server's standby has all acknowledged updates, and a checkpoint has all recorded ones."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plugins.parameter_server.protocol import Operation, Sessions, shard_service
from plugins.parameter_server.replication import RegisteredMastership, Succession
from plugins.parameter_server.server_group import PendingServer
from plugins.parameter_server.shard import PushReceiver, Rule, Shard
from plugins.parameter_server.shard_link import ShardLink
from plugins.parameter_server.shard_parameters import ShardParameters
from plugins.parameter_server.sharding import plan_shards
from worldsize.core import ONE_UPDATE
from worldsize.messages import show_messages
from worldsize.net.endpoints import get_listener_address, open_listener
from worldsize.net.frames import view_bytes
from worldsize.net.registry import Dialer, Registry
from worldsize.strategies.train_state import OptimizerPart, TrainState
from worldsize.world.processes import ready_to_fork

pytestmark = pytest.mark.heavy

CELLS = 8
LEASE = 3600.0  # seconds; a killed server is detected by its closed connection, whatever the lease
PATIENCE = 120.0


def made(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0)


class Counters:
    """A table of counters on a server and its standby, in separate processes; a push of -1 adds one."""

    def __init__(self, folder: Path, lease: float) -> None:
        self.registry = Registry(folder / "directory", PATIENCE)
        self.folder, self.lease = folder, lease
        self.processes: dict[str, BaseProcess] = {}

    def start(self, name: str, *, is_first: bool = False) -> None:
        self.processes[name] = get_context("fork").Process(target=self._body, args=(name, is_first))
        with ready_to_fork():
            self.processes[name].start()

    def _body(self, name: str, is_first: bool) -> None:
        torch.set_num_threads(1)
        sys.stderr = (self.folder / "log").open("a")
        show_messages()
        model = nn.Linear(CELLS, 1, bias=False)
        nn.init.zeros_(model.weight)
        learning = TrainState(model, {ONE_UPDATE: (part := OptimizerPart(model, made(model)))})
        (owned,) = plan_shards(dict(model.named_parameters()), 1, bucket_bytes=1 << 20, cut=True)
        listener = open_listener(f"unix:{self.folder}/{name}_{os.getpid()}", None)
        shard = Shard(ShardParameters(part, owned, make=made), Rule(1, synchronous=False))
        dialer = Dialer(name, self.registry, None, PATIENCE, Operation)
        mastership = RegisteredMastership(
            self.registry, shard_service(0), address=get_listener_address(listener), name=name
        )
        receiver, options = PushReceiver(shard, None), {"is_first": is_first, "has_standbys": True}
        succession = Succession(dialer, mastership, receiver, Sessions(), lease=self.lease, **options)
        succession.run()
        PendingServer(learning, succession, dialer, listener, self.lease, has_standby=True).serve()
        time.sleep(3600)

    def master(self) -> str:
        return self.registry.wait_for_server(shard_service(0)).name

    def kill(self, number: int = signal.SIGKILL) -> str:
        """Kill the master, and return its name."""
        name = self.master()
        process = self.processes[name]
        assert process.pid is not None
        os.kill(process.pid, number)
        return name

    def again(self, name: str) -> None:
        """Restart an ended server, as the standby of the other one."""
        self.processes[name].join(PATIENCE)
        self.start(name)

    def wait_for_standbys(self, count: int) -> None:
        """Wait until ``count`` standbys have taken their place, one after the other."""
        deadline = time.monotonic() + PATIENCE
        while (self.folder / "log").read_text().count("is the standby\n") < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@pytest.fixture
def counters(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Counters]:
    """Running counters; the parameter overrides the lease in seconds."""
    running = Counters(tmp_path, getattr(request, "param", LEASE))
    (tmp_path / "directory").mkdir()
    running.start("server-0", is_first=True)
    running.master()
    running.start("server-1")
    yield running
    running.close()


def increments(link: ShardLink, steps: range, between: Callable[[int], None]) -> list[float]:
    """Push one increment of a random cell per step, and return the number acknowledged for each cell."""
    acknowledged = [0.0] * CELLS
    for step in steps:
        cell = random.Random(step).randrange(CELLS)
        gradient = torch.zeros(CELLS)
        gradient[cell] = -1.0
        between(step)
        link.push_bucket(0, torch.float32, [view_bytes(gradient)], step=step, width=0, node=0)
        link.wait_for_pushes()
        acknowledged[cell] += 1
    return acknowledged


def total(link: ShardLink) -> list[float]:
    values = torch.empty(CELLS)
    link.request_weights(0)
    link.receive_weights([(torch.float32, [view_bytes(values)])])
    return values.tolist()


def linked(counters: Counters, epoch: int = 1) -> ShardLink:
    return ShardLink(Dialer("worker-0", counters.registry, None, PATIENCE, Operation), 0, epoch=epoch)


def test_every_acknowledged_push_survives_the_loss_of_many_masters(counters: Counters) -> None:
    link = linked(counters)
    counters.wait_for_standbys(1)
    kills = 0

    def kill(step: int) -> None:
        nonlocal kills
        if step % 150 == 75:
            counters.again(counters.kill())
            total(link)
            kills += 1
            counters.wait_for_standbys(kills + 1)

    expected = increments(link, range(1, 901), kill)
    assert kills == 6
    assert total(link) == expected
    assert sum(expected) == 900
    link.close()


def test_a_push_that_was_sent_but_not_acknowledged_counts_once(counters: Counters) -> None:
    link = linked(counters)
    counters.wait_for_standbys(1)
    gradients = [torch.full((CELLS,), -1.0) for _ in range(300)]
    for step, gradient in enumerate(gradients, 1):
        if step == 150:
            counters.again(counters.kill())
        link.push_bucket(0, torch.float32, [view_bytes(gradient)], step=step, width=0, node=0)
    link.wait_for_pushes()
    assert total(link) == [300.0] * CELLS
    link.close()


@pytest.mark.parametrize("counters", [3.0], indirect=True, ids=str)
def test_a_master_that_stops_is_replaced_and_does_not_acknowledge_anything_when_it_wakes(counters: Counters) -> None:
    link = linked(counters)
    counters.wait_for_standbys(1)
    increments(link, range(1, 4), lambda step: None)
    before = counters.registry.wait_for_server(shard_service(0))
    assert counters.kill(signal.SIGSTOP) == before.name
    assert counters.registry.wait_for_server(shard_service(0), after=before.epoch).name != before.name
    stopped = counters.processes[before.name]
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGCONT)
    counters.again(before.name)
    assert stopped.exitcode == 70
    fresh = linked(counters, epoch=2)
    assert sum(total(fresh)) == 3
    fresh.close()
    link.close()


# ---------------------------------------------------------------- whole runs

DIGITS = ("recipe=digits", "cluster.threads=1", "strategy=parameter_server", "log_every=1")
ELASTIC = ("reproducibility=elastic", "logical_ranks=4")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_synchronous_run_whose_server_is_killed_ends_with_the_same_bits_in_one_attempt(
    train: Any, reference_run: Any, rank: int
) -> None:
    size = ("strategy.servers=2", "strategy.replicas=1", "cluster.processes=8", "strategy.lease=3", "steps=24")
    expected = reference_run(*DIGITS, *ELASTIC, "strategy.servers=1", "cluster.processes=3", "steps=24")
    kill = f"faults=[{{action: kill, rank: {rank}, step: 9}}, {{action: sleep, rank: 4, seconds: 0.02}}]"
    run = train(*DIGITS, *ELASTIC, *size, kill)
    assert run.code == 0, run.error
    assert f"server {rank} failed: killed by SIGKILL; continuing without it" in run.error
    result, reference = run.json("result.json"), expected.json("result.json")
    assert result["state_digest"] == reference["state_digest"]
    losses, logged = ({line["step"]: line["loss"] for line in one.steps()} for one in (expected, run))
    assert logged.items() <= losses.items()
    assert len(logged) >= 23  # the new leader lacks lines that the old one had not written yet
    assert len(run.json("run_manifest.json")["attempts"]) == 1


def test_without_a_standby_a_server_restarts_from_the_checkpoint_and_reports_lost_updates(train: Any) -> None:
    size = ("strategy.servers=2", "cluster.processes=5", "strategy.consistency=async", "strategy.lease=10")
    kill = "faults=[{action: kill, rank: 1, step: 30}, {action: sleep, rank: 2, seconds: 0.01, attempt: null}]"
    run = train(*DIGITS, *size, "launcher.max_restarts=1", "steps=60", "checkpoint.every=10", kill)
    assert run.code == 0, run.error
    assert "server 1 failed: killed by SIGKILL; restarting (1 of 1)" in run.error
    assert len(run.json("run_manifest.json")["attempts"]) == 1, run.error
    lost = [line["facts"]["servers"][1]["lost_updates"] for line in run.steps()]
    assert lost[0] == 0
    assert 0 < lost[-1] < 3 * 40
    assert "are lost; continuing at step" in (run.folder / "logs" / "server_00001.log").read_text()
