"""Runs recover from real kills, stops, requests to end, and exhausted resources."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from tests.support.outcome import outcome
from tests.support.small_disk import mounted

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[2]
histories = runpy.run_path(str(REPOSITORY / "tests" / "observe" / "wandb_file.py"))["histories"]
OPTIONS = ("recipe=digits", "recipe.width=4", "steps=14", "log_every=3", "checkpoint.every=4", "cluster.threads=1")
RESTART = "launcher.max_restarts=1"
KEPT = "checkpoint.keep.last=2"

# fault points during a save of step 8, and a rank that passes each
POINTS = {
    "checkpoint:begin": 1,
    "checkpoint:in-shard": 1,
    "checkpoint:after-shard": 1,
    "checkpoint:after-shards": 0,
    "checkpoint:after-manifest": 0,
    "checkpoint:after-complete": 0,
    "checkpoint:after-rename": 0,
    "retention:begin": 0,
    "retention:in-delete": 0,
    "retention:end": 0,
    "evaluate:begin": 1,
}


def fault(action: str, *, slow: float = 0.0, **facts: Any) -> str:
    """Return the override that plants a fault; every step of rank 0 takes ``slow`` seconds longer."""
    words = ", ".join(f"{key}: {json.dumps(value)}" for key, value in facts.items())
    every_step = f", {{action: sleep, seconds: {slow}, attempt: null}}" if slow else ""
    return f"faults=[{{action: {action}, {words}}}{every_step}]"


def restarts(folder: Path) -> list[str]:
    return [attempt["exit_reason"] for attempt in json.loads((folder / "run_manifest.json").read_text())["attempts"]]


@pytest.fixture
def uninterrupted(reference_run: Any) -> Callable[..., dict[str, Any]]:
    return lambda *options: outcome(reference_run(*OPTIONS, *options).folder)


EVERY_POINT = list(POINTS.items())


@pytest.mark.parametrize(
    ("size", "options", "points"),
    [
        (2, (), EVERY_POINT[::2]),
        (3, ("reproducibility=elastic", "logical_ranks=6"), EVERY_POINT[1::2]),
    ],
    ids=["2-ddp", "3-elastic"],
)
def test_a_run_whose_rank_is_killed_at_any_point_recovers_to_the_last_bit(
    train: Any,
    uninterrupted: Callable[..., dict[str, Any]],
    size: int,
    options: tuple[str, ...],
    points: list[tuple[str, int]],
) -> None:
    options = (*options, f"cluster.processes={size}", "evaluate_every=5")
    expected = uninterrupted(*options)
    for point, rank in points:
        run = train(*OPTIONS, *options, RESTART, fault("kill", rank=rank, step=8, point=point))
        assert run.code == 0, (point, run.error)
        assert restarts(run.folder) == ["failed", "completed"], point
        assert outcome(run.folder) == expected, point
        assert not list((run.folder / "checkpoints").glob(".*")), point


def test_an_evaluation_that_fails_costs_no_training(
    train: Any,
    uninterrupted: Callable[..., dict[str, Any]],
    command: Any,
    environment_without_wandb: dict[str, str],
) -> None:
    """The run saves only at its end, and evaluates only after that."""
    options = ("cluster.processes=2", "checkpoint.every=0")
    failed = train(*OPTIONS, *options, fault("raise", rank=1, step=14, point="evaluate:begin"))
    assert failed.code == 1
    assert [path.name for path in (failed.folder / "checkpoints").glob("step_*")] == ["step_0000014"]
    done = command("resume", str(failed.folder), "faults=[]", cwd=failed.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert outcome(failed.folder) == uninterrupted(*options)


def test_a_model_of_several_buckets_killed_at_the_second_save_resumes_bitwise_from_the_first(train: Any) -> None:
    options: tuple[str, ...] = (
        "recipe=stdlib_lm",
        "recipe.test_bytes=2000",
        "recipe.depth=2",
        "steps=8",
        "checkpoint.every=3",
        "log_every=1",
    )
    options = (*options, "cluster.threads=1", "cluster.processes=3")
    expected = outcome(train(*options).folder)
    # a save begins only after the previous one, so that step 3 is saved
    run = train(*options, RESTART, fault("kill", rank=2, step=6, point="checkpoint:begin"))
    assert restarts(run.folder) == ["failed", "completed"]
    assert outcome(run.folder) == expected
    manifest = run.json("run_manifest.json")
    assert manifest["results"]["goodput"]["lost_steps"] == [2]  # steps 4 and 5; step 6 was not complete
    assert 0 < manifest["results"]["goodput"]["fraction"] < 1
    assert manifest["results"]["goodput"]["recover_seconds"][0] > 0


def test_the_cause_of_each_failure_is_printed_with_rank_and_step(train: Any) -> None:
    """Each attempt fails in a different way at a different step; the last failure is final."""
    ways = (("kill", 6, "SIGKILL"), ("segfault", 7, "SIGSEGV"), ("out_of_memory", 9, "code 137"), ("raise", 10, ""))
    faults = [{"action": way, "rank": 2, "step": step, "attempt": n} for n, (way, step, _) in enumerate(ways, 1)]
    plan = f"faults={json.dumps(faults)}".replace('"', "")
    run = train(*OPTIONS, "cluster.processes=3", "launcher.max_restarts=3", plan)
    assert run.code == 1
    lines = run.error.splitlines()
    assert len(lines) > len(ways)
    for number, (line, (_, step, cause)) in enumerate(zip(lines, ways, strict=False), 1):
        host = f" on {gethostname()}" if number < len(ways) else ""  # the last error is printed in full
        assert line.startswith(f"worker 2{host} failed at step {step}:")
        assert cause in line
    assert "fault injected by the" in run.error


def test_a_rank_that_hangs_is_named_with_its_step_when_the_others_have_waited_long_enough(train: Any) -> None:
    patience = ("cluster.timeout=10", "launcher.grace=5")  # the other ranks time out, and report it
    run = train(*OPTIONS, "cluster.processes=3", *patience, fault("stop", rank=1, step=6))
    assert run.code == 1
    assert run.error.startswith("worker 1 failed at step 6:\ndid not respond at step 6")
    assert "cluster.timeout" in run.error


def test_a_step_that_crashes_twice_is_not_tried_a_third_time(train: Any) -> None:
    run = train(*OPTIONS, "launcher.max_restarts=9", fault("raise", rank=1, step=6, attempt=None))
    assert run.code == 1
    assert restarts(run.folder) == ["failed", "failed"]
    assert "failed at step 6 twice in a row" in run.error


@pytest.mark.parametrize(
    "facts",
    [
        {"rank": 2, "step": 1},
        {"rank": None, "step": 7},
        {"rank": 1, "step": 5, "point": "evaluate:begin", "action": "user_signal"},
        {"rank": 0, "step": 4, "point": "checkpoint:after-shards", "action": "interrupt"},
    ],
    ids=str,
)
def test_a_rank_asked_to_end_saves_with_all_others_and_no_step_is_lost(
    train: Any,
    uninterrupted: Callable[..., dict[str, Any]],
    command: Any,
    environment_without_wandb: dict[str, str],
    facts: dict[str, Any],
) -> None:
    options = ("cluster.processes=3", "evaluate_every=5")
    run = train(*OPTIONS, *options, fault(**{"action": "terminate", "slow": 0.1, **facts}))
    assert run.code == 75, run.error
    assert run.json("result.json")["exit_reason"] == "preempted"
    attempt = run.json("run_manifest.json")["attempts"][0]
    last = max((run.folder / "checkpoints").glob("step_*"))
    assert last.name == f"step_{attempt['steps'][1]:07d}"
    done = command("resume", str(run.folder), cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert outcome(run.folder) == uninterrupted(*options)
    assert run.json("result.json")["goodput"]["lost_steps"] == [0]


def test_data_workers_ignore_the_signal_that_asks_for_a_save(train: Any) -> None:
    options = ("cluster.processes=2", "data_workers=1")
    run = train(*OPTIONS, *options, fault("terminate", slow=0.1, rank=None, step=6))
    assert run.code == 75, run.error
    assert list((run.folder / "checkpoints").glob("step_000000[678]"))


def test_a_resumed_elastic_run_ends_with_the_same_bits_on_another_number_of_processes_and_strategy(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    options = ("reproducibility=elastic", "clip_norm=1.0")
    expected = outcome(train(*OPTIONS, *options, "cluster.processes=8").folder)
    run = train(*OPTIONS, *options, "cluster.processes=4", fault("terminate", slow=0.1, rank=3, step=5))
    changes = (
        ("cluster.processes=2", fault("terminate", slow=0.1, rank=1, step=10, attempt=2)),
        ("cluster.processes=1", "strategy=single"),
    )
    codes = [
        command("resume", str(run.folder), *words, cwd=run.folder, environment=environment_without_wandb)
        for words in changes
    ]
    assert [done.returncode for done in codes] == [75, 0], codes
    resumed = outcome(run.folder)
    assert {key: resumed[key] for key in ("state_digest", "metrics_digest")} == {
        key: expected[key] for key in ("state_digest", "metrics_digest")
    }


def test_the_wandb_run_continues_at_the_right_step(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    wanted = (*OPTIONS, "cluster.processes=2", "log_every=1", fault("terminate", slow=0.1, rank=1, step=5))
    run = train(*wanted, "launcher.save_grace=120", logger="wandb")  # for wandb's start when all cores are busy
    assert run.code == 75, run.error
    done = command("resume", str(run.folder), cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    files = sorted(run.folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert {file.stem for file in files} == {f"run-{run.folder.name}"}
    steps = [sorted({int(row["_step"]) for row in histories(file)}) for file in files]
    assert [step for part in steps for step in part] == list(range(1, 15))


def test_a_second_signal_ends_a_run_that_cannot_save_and_its_last_checkpoint_is_good(
    tmp_path: Path, environment_without_wandb: dict[str, str], command: Any, begun: Any, warm_python: Path
) -> None:
    options = (*OPTIONS, "cluster.processes=2", "logger=none", "log_every=1", fault("stop", rank=1, step=9))
    process = subprocess.Popen(
        [warm_python, str(REPOSITORY / "train.py"), *options], cwd=tmp_path, env=environment_without_wandb
    )
    folder = begun(tmp_path, after=6)
    while not (folder / "checkpoints" / "step_0000004").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)  # a different signal, since the kernel merges equal pending ones
    assert process.wait(120) in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
    done = command("resume", str(folder), "faults=[]", cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def preempted_once(train_in: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = train_in(tmp_path_factory.mktemp("preempted"))
    folder = train(*OPTIONS, "cluster.processes=2", fault("terminate", slow=0.1, rank=0, step=6)).folder
    assert isinstance(folder, Path)
    return folder


@pytest.fixture
def preempted(preempted_once: Path, tmp_path: Path) -> Path:
    """A run of 2 processes that was preempted after saving step 4 and step 6 or 7."""
    folder = tmp_path / "runs" / "digits" / preempted_once.name
    shutil.copytree(preempted_once, folder)
    return folder


def test_a_damaged_checkpoint_is_refused_and_an_older_one_is_used_on_request(
    preempted: Path,
    uninterrupted: Callable[..., dict[str, Any]],
    command: Any,
    environment_without_wandb: dict[str, str],
) -> None:
    shard = max((preempted / "checkpoints").glob("step_*")) / "rank_00000.safetensors"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    refused = command("resume", str(preempted), cwd=preempted, environment=environment_without_wandb)
    assert refused.returncode == 1
    assert re.search(r"rank_00000.safetensors has SHA-256 \w+, expected SHA-256 \w+", refused.stderr)
    done = command("resume", str(preempted), "--allow-older", cwd=preempted, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert outcome(preempted) == uninterrupted("cluster.processes=2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recipe.width=8",), "recipe.width: 4 -> 8"),
        (("lr=0.5",), "lr: 0.005 -> 0.5"),
        (("batch_size=48",), "batch_size: 96 -> 48"),
        (("recipe.width=8", "--ignore", "recipe"), "does not match the model or optimizer"),
        (("strategy=mesh", "strategy.pipeline=2"), "Digits does not define the layers of its model."),
        (("+recipe.path=other",), "unknown key 'recipe.path'"),
        (("checkpoint.signals=[SIGTREM]",), "unknown signal 'SIGTREM'; did you mean 'SIGTERM'?"),
    ],
)
def test_a_run_is_not_resumed_as_a_different_one(
    preempted: Path, command: Any, environment_without_wandb: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    before = (preempted / "config.yaml").read_text()
    refused = command("resume", str(preempted), *words, cwd=preempted, environment=environment_without_wandb)
    assert refused.returncode in (1, 2)
    assert message in refused.stderr
    assert "--ignore" in words or (preempted / "config.yaml").read_text() == before


def rates(folder: Path, after: int) -> list[float]:
    """Return the logged learning rates of the steps after ``after``."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if line["event"] == "step" and line["step"] > after]


def rate(peak: float, step: int, steps: int) -> float:
    """Return the learning rate of conf/schedule/cosine.yaml after its warm-up of one step: down to a tenth."""
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / (steps - 1))))


def test_a_run_resumes_with_changes_accepted_by_name_and_a_finished_run_can_be_trained_further(
    preempted: Path, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    def resume(*words: str) -> Any:
        return command("resume", str(preempted), *words, cwd=preempted, environment=environment_without_wandb)

    shutil.copytree(preempted / "checkpoints", preempted.parent / "before")
    saved = int(max((preempted / "checkpoints").glob("step_*")).name.removeprefix("step_"))
    changed = resume("lr=0.001", "cluster.processes=1", "--ignore", "lr", "log_every=1", "--ignore", "log_every")
    assert changed.returncode == 0, changed.stderr
    assert rates(preempted, saved) == pytest.approx([rate(0.001, step, 14) for step in range(saved + 1, 15)])
    assert resume().returncode == 2
    fewer = resume("steps=13")
    assert fewer.returncode == 2
    assert "completed 14 steps, more than steps=13" in fewer.stderr
    shutil.rmtree(preempted / "checkpoints")  # as if it had died before its first save with the new rate
    (preempted.parent / "before").rename(preempted / "checkpoints")
    assert resume("steps=18").returncode == 0
    assert json.loads((preempted / "result.json").read_text())["steps"] == 18
    assert rates(preempted, saved) == pytest.approx([rate(0.001, step, 18) for step in range(saved + 1, 19)])
    manifest = json.loads((preempted / "run_manifest.json").read_text())
    assert (manifest["config"]["lr"], manifest["config"]["steps"], manifest["cluster"]["processes"]) == (0.001, 18, 1)
    assert [entry["attempt"] for entry in manifest["resumed"]] == [2, 3]
    assert ["lr", 0.005, 0.001] in manifest["resumed"][0]["changes"]
    assert manifest["reproducibility"]["level"] == "none"
    assert "lr: 0.005 -> 0.001 in attempt 2" in manifest["reproducibility"]["why"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB."""
    with mounted(tmp_path / "small", "2m") as folder:
        yield folder


def test_a_full_disk_fails_the_save_on_all_ranks_and_the_older_checkpoint_is_good(
    small_disk: Path, train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    options = (
        "recipe=digits",
        "recipe.width=16",
        "steps=30",
        "cluster.processes=3",
        "cluster.threads=1",
        "log_every=100",
    )
    saves = ("checkpoint.every=2", "checkpoint.keep.last=99")
    full = train(*options, *saves, f"run.root={small_disk}")
    assert full.code == 1
    assert re.search(r"No space left on device|the disk with \S+ is full", full.error)  # or not even its error fits
    (folder,) = small_disk.glob("digits/*")
    assert not [path for path in (folder / "checkpoints").glob("step_*") if not (path / "COMPLETE").exists()]
    for old in sorted((folder / "checkpoints").glob("step_*"))[:-1]:
        shutil.rmtree(old)
    words = ("resume", str(folder), "checkpoint.keep.last=1")
    done = command(*words, cwd=small_disk, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    expected = train(*options, *saves)
    assert (
        json.loads((folder / "result.json").read_text())["state_digest"] == expected.json("result.json")["state_digest"]
    )


def test_a_launcher_that_is_asked_to_end_saves_and_one_that_is_killed_leaves_a_run_that_can_be_resumed(
    tmp_path: Path, command: Any, environment_without_wandb: dict[str, str], begun: Any, warm_python: Path
) -> None:
    slow = "faults=[{action: sleep, seconds: 0.1, attempt: null}]"
    options = (*OPTIONS, "steps=400", "checkpoint.every=40", "cluster.processes=2", "logger=none", "log_every=1", slow)
    process = subprocess.Popen(
        [warm_python, str(REPOSITORY / "train.py"), *options],
        cwd=tmp_path,
        env=environment_without_wandb,
        stdout=subprocess.DEVNULL,
    )
    folder = begun(tmp_path)
    second = command("resume", str(folder), cwd=tmp_path, environment=environment_without_wandb)
    assert second.returncode == 2
    assert "being trained by another process" in second.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75
    last = int(max((folder / "checkpoints").glob("step_*")).name[5:])
    assert json.loads((folder / "run_manifest.json").read_text())["attempts"][0]["steps"][1] <= last
    again = subprocess.Popen(
        [warm_python, "-m", "worldsize", "resume", str(folder)],
        cwd=tmp_path,
        env=environment_without_wandb,
        stdout=subprocess.DEVNULL,
    )
    begun(tmp_path, after=last + 10)
    os.kill(again.pid, signal.SIGKILL)
    again.wait()
    more = command("resume", str(folder), "faults=[]", cwd=tmp_path, environment=environment_without_wandb)
    assert more.returncode == 0, more.stderr
    assert restarts(folder) == ["preempted", "killed", "completed"]
    shutil.rmtree(folder)
