"""Runs with several updates per step end with the results of one process, whatever happens to workers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugins.parameter_server import players
from worldsize.checkpoint.load import find_newest, read_tensors
from worldsize.core import World

WORDS = ("recipe=players", f"seed={players.SEED}", "cluster.threads=1", "log_every=1", "evaluate_every=5")
ELASTIC = (*WORDS, "reproducibility=elastic", "logical_ranks=4")
SERVER = "strategy=parameter_server"
TWO = (SERVER, "strategy.servers=2", "cluster.processes=4")  # ranks 0 and 1 are servers
CLIPPED = ("clip_norm=0.3", "nonfinite=skip")
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]  # a test starts several runs


@pytest.fixture(autouse=True)
def _project(tmp_path: Path) -> None:
    """Write the recipe into the project of ``train``."""
    players.write_project(tmp_path)


def digests(run: Any) -> tuple[str, str]:
    assert run.code == 0, run.error
    result = run.json("result.json")
    return result["state_digest"], result["metrics_digest"]


def log(run: Any) -> str:
    return str((run.folder / "logs" / "server_00000.log").read_text())


def wait_for(folder: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in (folder / "logs" / "server_00000.log").read_text():
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def test_with_one_worker_the_weights_are_those_of_plain_pytorch(train: Any) -> None:
    run = train(*WORDS, SERVER, "cluster.processes=2", "checkpoint.every=12")
    assert run.code == 0, run.error
    checkpoint = find_newest(run.folder / "checkpoints", World.create_single(torch.device("cpu")))
    assert checkpoint is not None
    weights, expected = read_tensors(checkpoint, "model"), players.original(12)
    assert weights.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)] == []


def test_losses_metrics_and_weights_are_those_of_ddp_on_as_many_workers(train: Any) -> None:
    served, ddp = train(*WORDS, *TWO), train(*WORDS, "strategy=ddp", "cluster.processes=2")
    assert digests(served) == digests(ddp)
    last = served.steps()[-1]
    metrics = {"drawn", "loss/critic", "loss/generator", "loss/observer", "lr/generator", "lr/observer"}
    assert set(last["metrics"]) == metrics
    for mine, theirs in zip(served.steps(), ddp.steps(), strict=True):
        assert [str(mine[key]) for key in ("loss", "lr", "metrics")] == [
            str(theirs[key]) for key in ("loss", "lr", "metrics")
        ]


@pytest.mark.parametrize("options", [(), CLIPPED], ids=["plain", "clipped"])
def test_ordered_sums_have_the_same_bits_at_any_number_of_workers_and_servers(
    train: Any, options: tuple[str, ...]
) -> None:
    expected = digests(train(*ELASTIC, *options, "strategy=ddp", "cluster.processes=2"))
    for servers, workers in ((1, 1), (1, 2), (2, 2), (2, 4)):
        size = (f"strategy.servers={servers}", f"cluster.processes={servers + workers}")
        assert digests(train(*ELASTIC, *options, SERVER, *size)) == expected, size


@pytest.mark.parametrize(
    ("fault", "options", "why"),
    [
        ("{action: kill, rank: 3, step: 6, point: update:continue}", ("strategy.lease=120",), "lost the connection"),
        ("{action: kill, rank: 3, step: 6, point: push:next-server}", ("strategy.lease=120",), "lost the connection"),
        (
            "{action: stop, rank: 3, step: 6, point: update:continue}",
            ("strategy.lease=3", "launcher.save_grace=2"),
            "no heartbeat within the lease of 3 s",
        ),
    ],
    ids=["killed between updates", "killed between servers", "stopped"],
)
def test_a_worker_that_is_lost_in_a_step_costs_that_step_alone(
    train: Any, fault: str, options: tuple[str, ...], why: str
) -> None:
    """Step 6 updates the critic twice; the generator, with momentum; and the observer, for the second time."""
    run = train(*ELASTIC, *TWO, *options, f"faults=[{fault}]")
    assert f"retired worker-1: {why}" in log(run)
    assert log(run).count(": a worker was lost") == 1
    result = run.json("result.json")
    assert result["state_digest"] == digests(train(*ELASTIC, "strategy=single", "cluster.processes=1"))[0]


def test_a_worker_that_is_started_again_takes_part_from_the_next_step_on(train: Any) -> None:
    faults = "faults=[{action: kill, rank: 3, step: 6, point: update:continue}, {action: sleep, rank: 2, seconds: 0.3}]"
    run = train(*ELASTIC, *TWO, "strategy.lease=120", "launcher.max_restarts=1", faults)
    assert digests(run)[0] == digests(train(*ELASTIC, "strategy=single", "cluster.processes=1"))[0]
    assert log(run).count("worker-1 joined") == 2
    assert len(run.json("run_manifest.json")["attempts"]) == 1


def test_workers_come_and_go_between_steps(
    train: Any,
    begun: Any,
    change_workers: Any,
    tmp_path: Path,
) -> None:
    slow = "faults=[{action: sleep, rank: 1, seconds: 0.1}]"  # in every step
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(lambda: train(*ELASTIC, "steps=100", SERVER, "cluster.processes=3", slow))
        folder = begun(tmp_path / "runs")
        change_workers(folder, "add", "1")
        wait_for(folder, "worker-2 joined")
        change_workers(folder, "remove")
        wait_for(folder, "retired worker-2: requested to leave")
        run = trained.result()
    assert "repeating step" not in log(run)
    assert digests(run) == digests(train(*ELASTIC, "steps=100", "strategy=single", "cluster.processes=1"))


def test_a_run_whose_server_is_killed_goes_on_from_its_checkpoint(train: Any) -> None:
    killed = ("checkpoint.every=4", "launcher.max_restarts=1", "faults=[{action: kill, rank: 1, step: 9}]")
    run = train(*ELASTIC, *TWO, *killed)
    assert digests(run) == digests(train(*ELASTIC, "strategy=single", "cluster.processes=1"))
    assert [each["exit_reason"] for each in run.json("run_manifest.json")["attempts"]] == ["failed", "completed"]


def test_checkpoints_go_over_between_ddp_and_servers_and_can_be_evaluated(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    """Step 3 ends before the observer has stepped."""

    def asked_to_end(step: int, attempt: int) -> str:
        return f"faults=[{{action: terminate, rank: 0, step: {step}, attempt: {attempt}}}]"

    undisturbed = train(*ELASTIC, "strategy=single", "cluster.processes=1")
    run = train(*ELASTIC, "strategy=ddp", "cluster.processes=2", asked_to_end(3, 1))
    changes = [(*TWO, asked_to_end(7, 2)), ("strategy=ddp", "cluster.processes=4", asked_to_end(9, 3)), (*TWO,)]
    folder, environment = run.folder.parents[2], environment_without_wandb
    codes = [
        command("resume", str(run.folder), *words, cwd=folder, environment=environment).returncode for words in changes
    ]
    assert [run.code, *codes] == [75, 75, 75, 0]
    assert digests(run.__class__(0, "", "", run.folder)) == digests(undisturbed)
    again = command("evaluate", str(run.folder), *TWO, cwd=folder, environment=environment)
    assert again.returncode == 0, again.stderr
    assert str(run.json("result.json")["metrics"]["score"]) in again.stdout


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("by data", "Players.updates: in step 2, one worker updates"),
        ("rates", "Players.updates changed optimizer options, such as the learning rate"),
        ("infinite", "contains NaN or infinity"),
        ("thaws", "Players unfreezes a parameter of 'generator', which was frozen at the start of the run"),
    ],
)
def test_a_step_that_cannot_be_taken_ends_the_run_with_its_cause(train: Any, kind: str, message: str) -> None:
    run = train(*WORDS, SERVER, "cluster.processes=3", f"recipe.kind={kind}")
    assert run.code == (2 if kind == "thaws" else 1)  # refused before the first step is complete
    assert message in run.error
