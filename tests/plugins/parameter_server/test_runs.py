"""Runs with a parameter server end with the results of one process, whatever happens to workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plugins.parameter_server.strategy import _warn_of_momentum
from tests.support.own_recipe import write_held

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[3]
DIGITS = ("recipe=digits", "steps=24", "evaluate_every=10", "cluster.threads=1")
SERVER = "strategy=parameter_server"
ELASTIC = ("reproducibility=elastic", "logical_ranks=4")
OPTIMIZERS = {"adamw": ("optimizer=adamw",), "momentum": ("optimizer=sgd", "lr=0.05")}


def digests(run: Any) -> tuple[str, str]:
    assert run.code == 0, run.error
    result = run.json("result.json")
    return result["state_digest"], result["metrics_digest"]


@pytest.fixture
def single(reference_run: Any) -> Callable[..., tuple[str, str]]:
    """``single(*options)`` returns the digests of one process without a server."""
    alone = ("strategy=single", "cluster.processes=1")
    return lambda *options: digests(reference_run(*DIGITS, *ELASTIC, *options, *alone))


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_synchronous_training_ends_with_the_bits_of_one_process(train: Any, single: Any, servers: int) -> None:
    """Each number of workers meets each number of servers, with alternating optimizers."""
    for place, workers in enumerate((1, 2, 4)):
        optimizer = list(OPTIMIZERS.values())[(servers + place) % 2]
        size = (f"strategy.servers={servers}", f"cluster.processes={workers + servers}")
        actual = digests(train(*DIGITS, *ELASTIC, *optimizer, SERVER, *size))
        assert actual == single(*optimizer), (workers, optimizer)


@pytest.mark.parametrize("workers", [2, 8])  # 4 logical ranks per worker, or one whose pushes overlap its backward pass
def test_gradients_that_are_pushed_during_the_backward_pass_change_no_bit(
    train: Any, reference_run: Any, workers: int
) -> None:
    gpt = ("recipe=stdlib_lm", "recipe.context=32", "recipe.test_bytes=2000", "steps=4", "cluster.threads=1")
    wide = (*gpt, "reproducibility=elastic", "batch_size=8", "strategy.bucket_mb=0.25")
    expected = digests(reference_run(*gpt, *wide[-3:-1], "strategy=single", "cluster.processes=1"))
    servers = ("strategy.servers=2", f"cluster.processes={workers + 2}")
    assert digests(train(*wide, SERVER, *servers)) == expected


def test_clipping_changes_no_bit_and_workers_among_which_logical_ranks_do_not_divide_are_refused(
    train: Any, single: Any
) -> None:
    clipped = ("clip_norm=0.5", "nonfinite=skip")
    size = ("strategy.servers=2", "cluster.processes=4")
    refused = train(*DIGITS, *ELASTIC, *clipped, SERVER, "strategy.servers=1", "cluster.processes=4")
    assert refused.code == 2
    assert "4 logical ranks are not divisible by 3 data-parallel workers" in refused.error
    assert refused.folder is None
    assert digests(train(*DIGITS, *ELASTIC, *clipped, SERVER, *size)) == single(*clipped)


def test_a_staleness_bound_of_zero_is_synchronous(train: Any, single: Any) -> None:
    bounded = ("strategy.consistency=bounded", "strategy.staleness=0")
    assert digests(train(*DIGITS, *ELASTIC, SERVER, *bounded, "cluster.processes=3")) == single()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        pytest.param("momentum", ("consistency=async",), marks=pytest.mark.slow),
        ("adamw", ("consistency=bounded", "strategy.staleness=2")),
    ],
)
def test_overlapping_steps_reach_the_accuracy_of_synchronous_ones(
    train: Any, optimizer: str, options: tuple[str, ...]
) -> None:
    size = ("strategy.servers=2", "cluster.processes=6")
    wanted = ("recipe=digits", "steps=100", "cluster.threads=1", *OPTIMIZERS[optimizer])
    overlapping = train(*wanted, SERVER, *size, f"strategy.{options[0]}", *options[1:])
    assert overlapping.code == 0, overlapping.error
    synchronous = train(*wanted, SERVER, *size).json("result.json")["metrics"]["accuracy"]
    assert overlapping.json("result.json")["metrics"]["accuracy"] > synchronous - 0.08


def test_momentum_with_much_staleness_gives_a_warning_in_the_log_of_the_server(
    train: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bounded = ("strategy.consistency=bounded", "strategy.staleness=4", "optimizer=sgd", "lr=0.01")
    run = train(*DIGITS, SERVER, *bounded, "cluster.processes=3", "steps=2")
    assert run.code == 0, run.error
    log = (run.folder / "logs" / "server_00000.log").read_text()
    assert "momentum 0.9 with strategy.staleness=4 may diverge" in log
    model = nn.Linear(1, 1)
    _warn_of_momentum(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), staleness=2)
    assert caplog.messages == []


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_worker_that_is_killed_costs_nothing_but_time(
    train: Any, single: Any, begun: Any, tmp_path: Path, restarts: int
) -> None:
    stop = ", {action: stop, rank: 1, step: 20}" if restarts else ""  # until it gets SIGCONT; rank 0 is the server
    kill = f"faults=[{{action: kill, rank: 2, step: 9}}, {{action: kill, rank: 3, step: 15}}{stop}]"
    size = ("cluster.processes=5", "strategy.lease=120", f"launcher.max_restarts={restarts}")
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(lambda: train(*DIGITS, *ELASTIC, SERVER, *size, kill, "log_every=1"))
        if restarts:
            _log(begun(tmp_path / "runs"), "worker-1 joined", times=2)
            os.kill(_stopped(tmp_path), signal.SIGCONT)
        run = trained.result()
    assert digests(run)[0] == single("log_every=1")[0]
    assert "worker 1 failed: killed by SIGKILL" in run.error
    assert ("restarting (1 of 2)" if restarts else "continuing without it") in run.error
    log = (run.folder / "logs" / "server_00000.log").read_text()
    assert "retired worker-1" in log
    assert log.count("worker-1 joined") == (2 if restarts else 1)


def test_gradients_that_servers_have_of_dead_workers_count_once(train: Any, single: Any) -> None:
    """One worker dies when one server has its gradient, one when all have, before it has reported its unit."""
    kills = (
        "{action: kill, rank: 3, step: 9, point: push:next-server}",
        "{action: kill, rank: 4, step: 14, point: push:end}",
    )
    size = ("strategy.servers=2", "cluster.processes=6")
    run = train(*DIGITS, *ELASTIC, SERVER, *size, f"faults=[{', '.join(kills)}]")
    for worker in (1, 2):
        assert f"worker {worker} failed: killed by SIGKILL" in run.error
    assert digests(run)[0] == single()[0]


def test_a_worker_that_stops_loses_its_lease_and_its_part_is_done_by_others(train: Any, single: Any) -> None:
    stop = "faults=[{action: stop, rank: 1, step: 9, point: push:begin}]"
    run = train(*DIGITS, *ELASTIC, SERVER, "cluster.processes=3", "strategy.lease=5", stop, "launcher.save_grace=2")
    log = (run.folder / "logs" / "server_00000.log").read_text()
    assert "retired worker-0: no heartbeat within the lease of 5 s" in log
    assert run.json("run_manifest.json")["attempts"][0]["steps"][1] == 24
    assert run.json("result.json")["state_digest"] == single()[0]


def test_the_last_worker_that_fails_fails_the_run_with_its_cause(train: Any) -> None:
    run = train(*DIGITS, SERVER, "cluster.processes=3", "faults=[{action: raise, rank: null, step: 5}]")
    assert run.code == 1
    assert "fault injected by the configuration" in run.error


def test_a_run_whose_server_is_killed_restarts_from_the_checkpoint(train: Any, single: Any) -> None:
    kill = "faults=[{action: kill, rank: 1, step: 9}]"
    size = ("strategy.servers=2", "cluster.processes=4", "checkpoint.every=4", "launcher.max_restarts=1")
    run = train(*DIGITS, *ELASTIC, SERVER, *size, kill)
    assert digests(run) == single()
    first, _ = run.json("run_manifest.json")["attempts"]
    assert (first["failure"]["role"], first["failure"]["rank"]) == ("server", 1)
    assert first["failure"]["cause"] == "killed by SIGKILL"


def test_a_run_that_is_asked_to_end_saves_and_resumes_with_another_strategy(
    train: Any, single: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    slow = "faults=[{action: terminate, rank: 0, step: 8}, {action: sleep, rank: 0, seconds: 0.05}]"
    run = train(*DIGITS, *ELASTIC, SERVER, "strategy.servers=2", "cluster.processes=4", slow)
    assert run.code == 75, run.error
    changes = ("strategy=ddp", "cluster.processes=2", "faults=[]")
    done = command("resume", str(run.folder), *changes, cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert run.json("result.json")["state_digest"] == single()[0]


def test_a_checkpoint_of_ddp_resumes_with_servers(
    train: Any, single: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    slow = "faults=[{action: terminate, rank: 0, step: 8}, {action: sleep, rank: 0, seconds: 0.05}]"
    run = train(*DIGITS, *ELASTIC, "cluster.processes=2", slow)
    assert run.code == 75, run.error
    changes = (SERVER, "strategy.servers=3", "cluster.processes=5", "faults=[]")
    done = command("resume", str(run.folder), *changes, cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert run.json("result.json")["state_digest"] == single()[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("cluster.processes=1",), "at least one server and one worker"),
        (("cluster.processes=2", "strategy.servers=2"), "Set cluster.processes=3 or more"),
        (("cluster.processes=2", "strategy.consistency=eventual"), "one of sync, bounded, async"),
        (("cluster.processes=2", "strategy.staleness=2"), "requires strategy.consistency=bounded"),
        (
            ("cluster.processes=2", "precision=fp16"),
            "not supported with ParameterServer: its processes do not share a loss scale",
        ),
    ],
)
def test_options_that_cannot_run_are_refused_before_anything_starts(
    train: Any, options: tuple[str, ...], message: str
) -> None:
    run = train(*DIGITS, SERVER, *options)
    assert run.code == 2
    assert message in run.error
    assert run.folder is None


def test_workers_come_and_go_while_it_trains(
    tmp_path: Path,
    single: Any,
    command: Any,
    change_workers: Callable[..., str],
    environment_without_wandb: dict[str, str],
    begun: Any,
    warm_python: Path,
) -> None:
    options, held = (*DIGITS, *ELASTIC, "steps=120", "log_every=1"), write_held(tmp_path)
    expected = single("steps=120", "log_every=1")
    words = (*options, SERVER, "recipe=held", "cluster.processes=3", "logger=none", "run.root=other")
    process = subprocess.Popen(
        [warm_python, str(REPOSITORY / "train.py"), *words],
        cwd=tmp_path,
        env=environment_without_wandb,
        stdout=subprocess.DEVNULL,
    )
    folder = begun(tmp_path / "other", after=4)
    workers = partial(change_workers, folder)

    assert "worker 2, worker 3" in workers("add", "2")
    _log(folder, "worker-3 joined")
    assert workers("list").count("worker") == 4
    assert "worker 3" in workers("remove")
    _log(folder, "retired worker-3: requested to leave")
    too_many = ("workers", "remove", "9", "--run", str(folder))
    refused = command(*too_many, cwd=tmp_path, environment=environment_without_wandb)
    assert "workers must remain" in refused.stderr
    held.unlink()
    assert process.wait(240) == 0
    result = json.loads((folder / "result.json").read_text())
    assert (result["state_digest"], result["metrics_digest"]) == expected
    late = command("workers", "list", "--run", str(folder), cwd=tmp_path, environment=environment_without_wandb)
    assert "is not running on this machine" in late.stderr


def test_a_launcher_that_is_killed_leaves_no_process(
    tmp_path: Path, environment_without_wandb: dict[str, str], begun: Any
) -> None:
    options = (*DIGITS, "steps=100000", "log_every=1", SERVER, "strategy.servers=2", "cluster.processes=4")
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *options, "logger=none"],
        cwd=tmp_path,
        env=environment_without_wandb,
        stdout=subprocess.DEVNULL,
    )
    try:
        folder = begun(tmp_path, after=1)
        children = _children(process.pid)
    finally:
        process.kill()
        process.wait()
    assert len(children) == 5  # a process watches the health of this host
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert folder.exists()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _stopped(folder: Path) -> int:
    """Wait for a stopped process that works in ``folder``, and return its id."""
    deadline = time.monotonic() + 120
    while True:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process may have ended
                if " T " in (process / "stat").read_text() and (process / "cwd").samefile(folder):
                    return int(process.name)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _log(folder: Path, text: str, *, times: int = 1) -> None:
    deadline = time.monotonic() + 120
    while (folder / "logs" / "server_00000.log").read_text().count(text) < times:
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
