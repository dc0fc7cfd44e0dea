"""Hydra's sweepers and launchers that use each run's value, or start several at once."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, Literal

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tests.support.own_recipe import write_recipe
from tests.support.runs import folders
from tests.support.waiting import wait_until
from worldsize.cli.train import train as train_sweep
from worldsize.config.compose import is_side_by_side, wants_sweep
from worldsize.config.objective import ObjectiveCheck, SweepEnded, Trial, compute_objective
from worldsize.errors import ConfigError
from worldsize.launch.sweep import call_sweep
from worldsize.launch.torchrun import Torchrun
from worldsize.observe.report.read import find_runs
from worldsize.record.redaction import REDACTED

pytestmark = pytest.mark.heavy

RECIPE = '''
import os
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worldsize.core import Recipe

class Hill(Recipe):
    """One weight begins at 0, and its loss is 0 at 1, where one step of plain SGD leads with a learning rate of 1."""

    def __init__(self, make_optimizer, meets): self.make_optimizer, self.meets = make_optimizer, meets
    def model(self): return nn.Linear(1, 1, bias=False)
    def optimizer(self, model):
        nn.init.zeros_(model.weight)
        return self.make_optimizer(model.parameters())
    def data(self, split): return TensorDataset(torch.ones(4, 1))
    def loss(self, model, batch):
        Path(f"meets_{os.getpid()}").touch()
        deadline = time.monotonic() + 120
        while len([*Path().glob("meets_*")]) < self.meets:  # until as many runs train at the same time
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return 0.5 * (model(batch[0]) - 1).square().mean()
    def evaluate(self, model, batch):
        error = (model(batch[0]) - 1).double()
        count = torch.tensor(len(error))
        return {"loss": (0.5 * error.square().sum(), count), "weight": ((error + 1).sum(), count)}
'''
OPTIONS = """# @package _global_
steps: 1
batch_size: 4
lr: 1.0
recipe: {_target_: recipes.hill.recipe.Hill, make_optimizer: "${optimizer}", meets: 1}
"""
HILL = (
    "recipe=hill",
    "optimizer=sgd",
    "optimizer.momentum=0",
    "cluster.processes=1",
    "checkpoint=none",
)
SEARCH = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra/sweeper/sampler=tpe")


@pytest.fixture
def hill(tmp_path: Path) -> Path:
    write_recipe(tmp_path, "hill", RECIPE, hill=OPTIONS)
    return tmp_path


def searched(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("runs/sweeps/*/optimization_results.yaml")
    results: dict[str, Any] = yaml.safe_load(path.read_text())
    return results


def rates(folder: Path) -> list[float]:
    """Return the learning rates of all runs, oldest first."""
    manifests = [json.loads((run / "run_manifest.json").read_text()) for run in folders(folder / "runs")]
    return [each["config"]["lr"] for each in sorted(manifests, key=lambda each: each["attempts"][0]["start_at"])]


def test_optuna_finds_the_planted_best_as_it_does_in_plain_python(train: Any, hill: Path) -> None:
    words = ("hydra.sweeper.sampler.seed=3", "hydra.sweeper.n_trials=10", "lr=interval(0.0,4.0)")
    run = train(*HILL, *SEARCH, *words, "sweep.metric=test/loss")
    assert run.code == 0, run.error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna 2.10 is older than its SQLAlchemy
        import optuna
    sampler = optuna.samplers.TPESampler(seed=3)
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: 0.5 * (trial.suggest_uniform("lr", 0.0, 4.0) - 1) ** 2, n_trials=10)
    best = searched(hill)
    assert best["best_params"] == pytest.approx(study.best_params)
    assert best["best_value"] == pytest.approx(study.best_value, abs=1e-6)
    assert rates(hill) == pytest.approx([trial.params["lr"] for trial in study.trials])


def in_a_file(folder: Path, text: str) -> None:
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "search.yaml").write_text(f"# @package _global_\n{text}")


def test_a_search_that_a_file_asks_for_is_one(train: Any, hill: Path) -> None:
    in_a_file(
        hill,
        "defaults: [{override /hydra/sweeper: optuna}, {override /hydra/sweeper/sampler: tpe}]\n"
        "sweep: {metric: loss}\n"
        "hydra: {mode: MULTIRUN, sweeper: {n_trials: 2, n_jobs: 1, params: {lr: 'interval(0.5, 1.5)'}}}\n",
    )
    run = train(*HILL, "experiment=search")
    assert run.code == 0, run.error
    assert searched(hill)["best_value"] < 0.5


def test_joblib_that_a_file_chooses_is_told_of_signals(hill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_file(hill, "defaults: [{override /hydra/launcher: joblib}]\n")
    monkeypatch.chdir(hill)
    assert is_side_by_side(("-m", "lr=1,2", *HILL, "experiment=search"))
    assert not is_side_by_side(("-m", "lr=1,2", *HILL))
    assert not wants_sweep((*HILL, "experiment=search"))


def test_the_direction_of_the_sweep_is_that_of_the_sweeper(train: Any, hill: Path) -> None:
    words = ("hydra.sweeper.n_trials=3", "lr=interval(0.0,4.0)", "sweep.metric=weight", "sweep.direction=maximize")
    run = train(*HILL, *SEARCH, *words)
    assert run.code == 0, run.error
    assert searched(hill)["best_params"]["lr"] == max(rates(hill))


def test_an_unknown_metric_ends_the_sweep_after_its_first_run(train: Any, hill: Path) -> None:
    words = ("hydra.sweeper.n_jobs=2", "hydra.sweeper.max_failure_rate=1", "lr=interval(0.0,4.0)")
    run = train(*HILL, *SEARCH, *words, "sweep.metric=los")
    assert run.code == 2
    sentence = (
        "sweep.metric=los: metric 'los' not found in the evaluation; did you mean 'loss'? Available: loss, weight."
    )
    assert sentence in run.error
    assert "Traceback" not in run.error
    assert len(folders(hill / "runs")) == 1


def test_a_run_that_is_refused_ends_the_search(train: Any, hill: Path) -> None:
    run = train(*HILL, *SEARCH, "hydra.sweeper.n_trials=3", "sweep.metric=loss", "lr=choice(-1,-2)")
    assert run.code == 2
    assert run.error.count("must be 0 or more.") == 1
    assert "Traceback" not in run.error
    assert folders(hill / "runs") == []


def test_joblib_trains_two_runs_side_by_side_and_tells_how_they_ended(train: Any, hill: Path) -> None:
    side_by_side = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "recipe.meets=2", "steps=2")
    run = train(*HILL, *side_by_side, "faults=[],[{action: kill, step: 2}]")
    assert run.code == 1, run.error
    manifests = [json.loads((each / "run_manifest.json").read_text()) for each in folders(hill / "runs")]
    assert len({each["config"]["run"]["group"] for each in manifests}) == 1
    first, second = (each["attempts"][0] for each in manifests)
    assert {(each["exit_reason"], each["exit_code"]) for each in (first, second)} == {("completed", 0), ("failed", 1)}
    assert max(first["start_at"], second["start_at"]) < min(first["end_at"], second["end_at"])
    lines = run.output.splitlines()
    table = lines[lines.index("sweep    1 of 2 runs completed") + 1 :][:3]
    assert [row.split()[0] for row in table] == ["run", "1", "2"]
    assert [row.split()[-2] for row in table] == ["state", "completed", "failed"]


def test_a_sweep_ends_with_what_failed_and_why_and_the_best(train: Any, hill: Path) -> None:
    kill = "[{action: kill, rank: 0, step: 1}]"
    run = train(*HILL, "-m", "sweep.metric=loss", "lr=0.5,-1,1", f"faults=[],{kill}")
    assert run.code == 2, "the largest of 0, 1 and 2"
    lines = run.output.splitlines()
    summary = lines[lines.index("sweep    2 of 6 runs completed") :]
    table, failed, report = summary[1:8], summary[8:12], summary[12]
    assert table[0].split() == ["run", "lr", "faults", "loss", "state", "folder"]
    assert [re.split(r"  +", row)[:5] for row in table[1:2]] == [["1", "0.5", "[]", "0.125", "completed"]]
    assert [row.split()[0] for row in table[1:]] == list("123456")
    assert [row.split()[0] for row in table if "completed, best" in row] == ["5"]
    assert len({row.index("runs/") for row in table if "runs/" in row}) == 1
    reasons = [line.split(": ", 2)[2] for line in failed]
    assert [line.split()[:6] for line in failed] == [
        ["failed", "run", str(number), "of", "the", "sweep:"] for number in (2, 3, 4, 6)
    ]
    died = rf"worker 0 on {re.escape(gethostname())} failed at step 1: killed by SIGKILL; "
    assert all(re.match(died, reasons[place]) for place in (0, 3)), reasons
    assert all("lr=-1" in reasons[place] and "must be 0 or more" in reasons[place] for place in (1, 2))
    words = shlex.split(report)
    assert (words[0], words[-2]) == ("report", "report")
    assert {path.name for path in find_runs(hill / words[-1])} == {path.name for path in folders(hill / "runs")}
    assert [(hill / row.split()[-1]).is_dir() for row in table if "best" in row] == [True]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``called(task, *words)`` calls ``task`` with every configuration of ``--multirun`` and these words."""
    monkeypatch.chdir(tmp_path)

    def call(task: Callable[[DictConfig], Trial], *words: str) -> int:
        monkeypatch.setattr("sys.argv", ["train.py"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna 2.10 is older than its SQLAlchemy
            return call_sweep(task, ["recipe=digits", *words])

    return call


def test_a_sweep_that_an_error_ends_says_what_its_runs_came_to(
    called: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def task(cfg: DictConfig) -> Trial:
        if cfg.seed == 2:
            raise RuntimeError("no such thing")
        return Trial(0, folder=Path("runs/one"))

    with pytest.raises(RuntimeError):
        called(task, "--multirun", "seed=1,2,3")
    shown = capsys.readouterr().out
    assert "sweep    2 of 3 runs completed" in shown  # the others are tried, too
    assert "failed   run 2 of the sweep: seed=2: no such thing" in shown


@pytest.mark.parametrize("code", [75, 143])
@pytest.mark.parametrize("words", [("-m",), (*SEARCH, "sweep.metric=loss", "hydra.sweeper.max_failure_rate=1")])
def test_a_run_that_is_asked_to_end_ends_its_sweep(
    called: Callable[..., int], words: Sequence[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []

    def task(cfg: DictConfig) -> Trial:
        seen.append(cfg.lr)
        return Trial(0, 1.0) if len(seen) == 1 else Trial(code)

    assert called(task, *words, "lr=choice(1,2,3,4)") == code
    assert len(seen) == 2
    assert "Error executing job" not in capfd.readouterr().err


def test_each_run_of_a_sweep_is_told_by_what_the_sweep_varies(
    called: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worldsize")
    assert called(lambda cfg: Trial(0), "-m", "+strategy=ddp", "steps=3", "seed=1,2", "+logger.token=a,b") == 0
    assert [message for message in caplog.messages if message.startswith("run ")] == [
        f"run {number} of the sweep: seed={seed} +logger.token={REDACTED}"
        for number, seed in enumerate((1, 1, 2, 2), start=1)
    ]


def test_a_search_whose_runs_all_fail_ends_with_the_largest_code(
    called: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    def task(cfg: DictConfig) -> Trial:
        if cfg.seed == 1:
            raise ConfigError("seed 1 is refused.")
        if cfg.seed == 2:
            raise ArithmeticError("a mistake in the program")
        return Trial(3)

    words = ("sweep.metric=loss", "hydra.sweeper.max_failure_rate=1", "hydra/sweeper/sampler=grid")
    assert called(task, *SEARCH[:-1], *words, "seed=choice(1,2,4)") == 3
    shown = capfd.readouterr().err
    assert "seed 1 is refused." in shown
    assert "ArithmeticError: a mistake in the program" in shown
    assert "No trials are completed yet" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lr=0.1,0.2,-1",), "run 3 of the sweep is invalid: lr=-1.0 must be 0 or more."),
        (("seed=1,2", "run.name=same"), "runs 1 and 2 of the sweep would share"),
        (("steps=2,3", "batch_size=96,95"), "run 4 of the sweep is invalid: batch_size=95"),
    ],
)
def test_no_run_of_a_sweep_starts_if_a_later_one_is_refused(
    words: Sequence[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr("worldsize.launch.execute.execute_run", start)
    usual = ("-m", "recipe=digits", "logger=none", "strategy=ddp", "cluster.processes=2", "lr=0.1", "steps=2")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train_sweep([*usual, f"run.root={tmp_path}", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_checked_with_the_numbers_and_paths_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[tuple[str, str]]] = {"check": [], "task": []}

    def note(cfg: DictConfig, where: str) -> Trial:
        seen[where].append((cfg.run.name, cfg.init_from))
        return Trial(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    words = ["-m", "recipe=digits", "run.name=s${hydra:job.num}-${hydra:job.id}", "init_from=~/a,~/b"]
    assert call_sweep(partial(note, where="task"), words, check=partial(note, where="check")) == 0
    assert seen["check"] == seen["task"] == [("s0-0", "/home/me/a"), ("s1-1", "/home/me/b")]


def test_a_cluster_is_asked_once_for_all_runs_of_a_sweep_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Torchrun, "check", lambda self, cluster: asked.append(cluster.nodes), raising=False)
    monkeypatch.setattr("worldsize.launch.execute.write_record", lambda *_: None)
    monkeypatch.setattr("worldsize.cli.train._submit_runs", lambda sweep: 10 + len(sweep))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    caplog.set_level(logging.INFO, "worldsize")
    usual = ("-m", "recipe=digits", "logger=none", "strategy=ddp", f"run.root={tmp_path}", "cluster=torchrun")
    assert train_sweep([*usual, "cluster.nodes=1,2", "seed=1,2,3"]) == 16
    assert asked == [1, 2, 1, 2], "before the sweep, and when its runs are made"
    assert caplog.messages.count("checking 6 runs") == 1


def test_a_refusal_that_ends_a_sweep_hides_no_larger_code(called: Callable[..., int]) -> None:
    def task(cfg: DictConfig) -> Trial:
        if cfg.seed == 2:
            raise SweepEnded(ConfigError("there is no such metric."))
        return Trial(7)

    assert called(task, "-m", "seed=1,2,3") == 7


def test_a_mistake_in_a_sweep_that_is_no_search_is_raised(called: Callable[..., int]) -> None:
    def task(cfg: DictConfig) -> Trial:
        if cfg.seed == 2:
            raise ArithmeticError("a mistake in the program")
        return Trial(2)

    with pytest.raises(ArithmeticError):
        called(task, "-m", "seed=1,2,3")


def test_the_processes_of_joblib_show_messages_as_this_one_does_and_end_with_the_sweep(
    called: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    def task(cfg: DictConfig) -> Trial:
        logging.getLogger("worldsize.trial").warning("run %s\x1b", cfg.seed)
        return Trial(0)

    assert called(task, "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2") == 0
    assert {"warning: run 1\\x1b", "warning: run 2\\x1b"} <= set(capfd.readouterr().err.splitlines())
    # a joblib thread waits for them, too, so that a single look may miss one
    wait_until(lambda: not multiprocessing.active_children(), multiprocessing.active_children)


def test_a_search_side_by_side_ends_with_a_run_that_is_asked_to_end(called: Callable[..., int], tmp_path: Path) -> None:
    def task(cfg: DictConfig) -> Trial:
        (tmp_path / f"begun_{cfg.seed}").touch()
        return Trial(75)

    side_by_side = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=2")
    search = ("-m", "hydra/sweeper=optuna", "sweep.metric=loss", "hydra.sweeper.max_failure_rate=1")
    assert called(task, *search, *side_by_side, "hydra/sweeper/sampler=grid", "seed=choice(1,2,3,4,5,6)") == 75
    assert len(list(tmp_path.glob("begun_*"))) in (1, 2)


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_lets_the_runs_side_by_side_save_and_begins_no_other(
    hill: Path, environment_without_wandb: dict[str, str], number: signal.Signals, *, to_group: bool
) -> None:
    words = (*HILL[:-1], "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2,3,4")
    slow = (
        "launcher.interrupt_grace=60",
        "steps=100000",
        "log_every=1",
        "logger=none",
        "faults=[{action: slow, seconds: 0.05}]",
    )
    line = [sys.executable, "-m", "worldsize", "train", *words, *slow]
    with subprocess.Popen(line, cwd=hill, env=environment_without_wandb, start_new_session=True) as running:
        try:
            deadline = time.monotonic() + 120
            while len(list(hill.glob("runs/**/metrics.jsonl"))) < 2:
                assert time.monotonic() < deadline
                assert running.poll() is None
                time.sleep(0.05)
            (os.killpg if to_group else os.kill)(running.pid, number)
            assert running.wait(timeout=60) == 75
        finally:
            running.kill()
    manifests = [json.loads((each / "run_manifest.json").read_text()) for each in folders(hill / "runs")]
    assert [each["attempts"][-1]["exit_code"] for each in manifests] == [75, 75]
    assert all(list((each / "checkpoints").iterdir()) for each in folders(hill / "runs"))


REFUSALS = {
    "no metric": ((), "hydra/sweeper=optuna requires sweep.metric. Set sweep.metric to a name in metrics.jsonl"),
    "contradiction": (
        ("sweep.metric=loss", "sweep.direction=maximize", "hydra.sweeper.direction=minimize"),
        "sweep.direction=maximize contradicts hydra.sweeper.direction=minimize. Set only one of them.",
    ),
    "several": (
        ("sweep.metric=loss", "hydra.sweeper.direction=[minimize,maximize]"),
        "hydra.sweeper.direction is a list, but sweep.metric is a single metric.",
    ),
    "nothing is trained": (("sweep.metric=loss", "launch=show"), "launch=show does not train."),
    "no direction": (("sweep.metric=loss", "sweep.direction=up"), "sweep.direction='up'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_search_that_would_find_nothing_is_refused_before_anything_is_made(
    train: Any, tmp_path: Path, name: str
) -> None:
    words, message = REFUSALS[name]
    run = train(*SEARCH, "seed=range(1,3)", *words)
    assert run.code == 2
    assert message in run.error
    assert "Traceback" not in run.error
    assert list(tmp_path.iterdir()) == []


def test_a_metric_of_a_split_that_is_not_evaluated_is_refused(train: Any, tmp_path: Path) -> None:
    run = train("recipe=digits", "sweep.metric=validation/loss")
    assert run.code == 2
    assert "sweep.metric=validation/loss requires the split 'validation'" in run.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("direction", "worst"), [("minimize", math.inf), ("maximize", -math.inf), (None, math.inf)])
def test_a_metric_that_is_no_number_is_the_worst_value_of_a_search(
    monkeypatch: pytest.MonkeyPatch, direction: Literal["minimize", "maximize"] | None, worst: float
) -> None:
    hydra = OmegaConf.create({"mode": "MULTIRUN", "sweeper": {"direction": direction or "minimize"}})
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra)
    sweep = OmegaConf.create({"metric": "loss", "direction": direction})
    assert compute_objective(sweep, {"loss": math.nan}) == worst
    assert compute_objective(sweep, {"loss": 2.5}) == 2.5


def test_the_check_leaves_a_sweeper_without_a_direction_alone() -> None:
    config = OmegaConf.create({"hydra": {"sweeper": {"max_batch_size": None}}, "sweep": {"metric": None}})
    ObjectiveCheck().on_multirun_start(config)
    assert config == {"hydra": {"sweeper": {"max_batch_size": None}}, "sweep": {"metric": None}}
