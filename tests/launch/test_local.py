"""The local launcher starts real processes, and handles real failures and real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_recipe import write_recipe
from tests.support.runs import Command, Done, environment
from worldsize.launch.members import Terminal, read_log_size

REPOSITORY = Path(__file__).parents[2]

# a recipe whose loss on rank 1 executes code planted by a test
RECIPE = """
import os, signal, time
import torch
from torch.utils.data import TensorDataset
from worldsize.core import Recipe

class Planted(Recipe):
    def __init__(self, action: str) -> None:
        self.action = action
    def model(self):
        return torch.nn.Linear(2, 1)
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
    def data(self, split):
        return TensorDataset(torch.ones(12, 2))
    def loss(self, model, batch):
        if os.environ["RANK"] == "1":
            exec(self.action)
        return model(*batch).square().mean()
    def evaluate(self, model, batch):
        return {"loss": (model(*batch).double().sum(), torch.tensor(len(batch[0])))}
"""
CONF = """# @package _global_
steps: 5
batch_size: 12
lr: 0.1
recipe:
  _target_: recipes.planted.recipe.Planted
  action: pass
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    write_recipe(tmp_path, "planted", RECIPE, planted=CONF)
    return tmp_path


def processes_of(folder: Path) -> set[int]:
    """Return the live processes with the working directory ``folder``."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _works_in(entry, folder)}


def _works_in(process: Path, folder: Path) -> bool:
    try:
        alive = " Z " not in (process / "stat").read_text()
        return alive and (process / "cwd").resolve() == folder.resolve()
    except OSError:
        return False


def until(condition: Callable[[], Any], seconds: float) -> Any:
    """Wait for a condition by polling, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
    return value


@pytest.fixture
def running(
    planted: Path, environment_without_wandb: dict[str, str], warm_python: Path, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    """A run of 3 processes whose rank 1 hangs in its first step.

    With the parameter "group" all processes share one process group: they are not children of the zygote then.
    """
    python = sys.executable if getattr(request, "param", None) == "group" else warm_python
    action = "open('hanging', 'w').close(); time.sleep(3600)"
    words = ["recipe=planted", "logger=none", "cluster.processes=3", "launcher.save_grace=1"]
    process = subprocess.Popen(
        [python, str(REPOSITORY / "train.py"), *words, f'recipe.action="{action}"'],
        cwd=planted,
        env=environment_without_wandb,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until((planted / "hanging").exists, 120)
    yield process
    process.kill()
    process.communicate()


def test_the_rank_that_failed_comes_first_and_each_survivor_has_one_line(planted: Path, train: Any) -> None:
    patient = "launcher.grace=60"  # no survivor is killed before it has left its error
    run = train("recipe=planted", "cluster.processes=3", 'recipe.action="raise ValueError(42)"', patient)
    assert run.code == 1
    assert run.error.startswith("worker 1 failed at step 1:\nTraceback")
    assert "ValueError: 42" in run.error
    assert "gloo" not in run.error.lower()
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert attempt["exit_reason"] == "failed"
    where = {"role": "worker", "rank": 1, "host": socket.gethostname(), "step": 1}
    assert attempt["failure"] == {**where, "cause": "ValueError: 42"}
    assert json.loads((run.folder / "events.jsonl").read_text())["cause"] == "ValueError: 42"
    assert run.json("result.json")["exit_reason"] == "failed"
    logs = run.folder / "logs"
    assert (logs / "worker_00001.log").read_text().startswith("Traceback")
    assert "ValueError: 42" in (logs / "worker_00001.log").read_text()
    for name in ("worker_00000", "worker_00002"):
        (line,) = (logs / f"{name}.log").read_text().splitlines()
        assert line.startswith("lost its peers after worker 1 failed: RuntimeError: ")
        assert line.endswith(f"(see {name}.error.json)")
        assert "GLHF" not in line
        assert json.loads((logs / f"{name}.error.json").read_text())["traceback"].startswith("Traceback")
    assert processes_of(planted) == set()


@pytest.mark.parametrize(
    ("action", "cause"), [("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"), ("os._exit(7)", "code 7")]
)
def test_a_process_that_dies_without_a_message_is_named_with_its_signal_or_code(
    planted: Path, train: Any, action: str, cause: str
) -> None:
    run = train("recipe=planted", "cluster.processes=3", f'recipe.action="{action}"')
    assert run.code == 1
    assert run.error.startswith("worker 1 failed at step 1:")
    assert cause in run.error.splitlines()[1]


def test_the_terminal_shows_what_this_attempt_writes_and_nothing_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, terminal = tmp_path / "worker_00000.log", Terminal()
    log.write_bytes(b"1 of 2\r2 of 2\n\xff\nTraceback of an earlier attempt\n")
    terminal.follow_log("worker 0", log, start=read_log_size(log))
    with log.open("a") as file:
        file.write("new\nlast")
    terminal.close()
    assert capsys.readouterr().out == "[worker 0] new\n[worker 0] last"


def test_a_refusal_in_the_first_step_leaves_no_folder_but_never_deletes_what_was_saved(
    planted: Path, command: Command
) -> None:
    def call(action: str, *words: str) -> Done:
        words = ("recipe=planted", "logger=none", "cluster.processes=3", f"recipe.action={json.dumps(action)}", *words)
        return command("train", *words, cwd=planted, environment=environment())

    refuse = "from worldsize.core import ConfigError; raise ConfigError('the action is unknown.')"
    done = call(refuse, "launcher.max_restarts=2", "launcher.grace=60")
    assert (done.returncode, done.stderr) == (2, "the action is unknown.\n")
    assert not (planted / "runs").exists()

    done = call(f"self.count = getattr(self, 'count', 0) + 1; assert self.count < 3, exec({refuse!r})")
    assert done.returncode == 1
    assert done.stderr.startswith("worker 1 failed at step 3:\nthe action is unknown.\nrun folder: ")
    shutil.rmtree(planted / "runs")

    # the first attempt saves and dies; the second one is refused
    later = "from pathlib import Path; self.count = getattr(self, 'count', 0) + 1; died = Path('died'); "
    later += f"died.exists() and exec({refuse!r}); self.count == 3 and died.touch(); self.count == 3 and os._exit(7)"
    done = call(later, "launcher.max_restarts=2", "checkpoint.every=1")
    assert done.returncode == 2
    assert ":\nthe action is unknown.\nrun folder: " in done.stderr
    assert list((planted / "runs" / "planted").glob("*/checkpoints/step_*"))


def test_every_process_has_a_log_and_the_terminal_names_the_worker(planted: Path, train: Any) -> None:
    run = train("recipe=planted", "cluster.processes=2", "recipe.action=\"print('hello from', os.environ['RANK'])\"")
    assert run.code == 0, run.error
    assert "[worker 1] hello from 1" in run.output
    assert "hello from 1" in (run.folder / "logs" / "worker_00001.log").read_text()
    assert (run.folder / "logs" / "worker_00000.log").read_text() == ""


@pytest.mark.parametrize(
    ("running", "number", "code"),
    [("group", signal.SIGINT, 130), ("alone", signal.SIGTERM, 143)],
    indirect=["running"],
)
def test_an_interrupt_stops_all_processes_and_leaves_no_orphan(
    running: subprocess.Popen[str], planted: Path, number: signal.Signals, code: int
) -> None:
    os.killpg(running.pid, number) if number == signal.SIGINT else running.send_signal(number)
    assert running.wait(timeout=120) == code  # rank 1 would hang for an hour
    assert processes_of(planted) == set()
    (manifest,) = planted.rglob("run_manifest.json")
    assert '"exit_reason": "interrupted"' in manifest.read_text()


def test_a_killed_launcher_leaves_no_orphan_and_status_reports_the_run_as_killed(
    running: subprocess.Popen[str], planted: Path
) -> None:
    (manifest,) = planted.rglob("run_manifest.json")
    assert "running" in status(planted)
    running.kill()
    running.wait()
    until(lambda: processes_of(planted) == set(), 60)
    assert "killed" in status(planted)
    assert '"exit_reason": "killed"' in manifest.read_text()


def status(folder: Path) -> str:
    command = [sys.executable, "-c", "from worldsize.cli import main; main()", "status", "runs"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return re.sub(r"\s+", " ", done.stdout)


def test_a_run_that_succeeds_prints_nothing_on_standard_error(planted: Path, train: Any) -> None:
    run = train("recipe=planted", "cluster.processes=2")
    assert (run.code, run.error) == (0, "")
