"""A run stops early at the same step as with Lightning's EarlyStopping, interrupted or not."""

from __future__ import annotations

import json
import random
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping as Reference

from tests.loop.test_fit import ALONE, Idle
from tests.support.runs import Command, environment
from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings
from worldsize.core import ConfigError, Evaluated, Event, StepDone
from worldsize.loop.early_stopping import EarlyStopping
from worldsize.loop.fit import LoopCallbacks, LoopConfig, TrainingProgress, fit


def reference(values: list[float], *, direction: str, patience: int, min_delta: float) -> int | None:
    """Return the number of evaluations until Lightning ends the run."""
    callback = Reference("loss", min_delta=min_delta, patience=patience, mode=direction, check_finite=False)
    for number, value in enumerate(values, 1):
        if callback._evaluate_stopping_criteria(torch.tensor(value, dtype=torch.float64))[0]:
            return number
    return None


@pytest.mark.parametrize("direction", ["min", "max"])
@pytest.mark.parametrize("patience", [1, 2, 4])
@pytest.mark.parametrize("min_delta", [0.0, 0.3])
def test_it_ends_where_lightning_ends(direction: Literal["max", "min"], patience: int, min_delta: float) -> None:
    generator, ended = random.Random(patience), 0
    rule = EarlyStopping("loss", direction, patience, min_delta)
    for _ in range(50):
        values = [generator.choice([float("nan"), generator.gauss(0, 1), 0.5]) for _ in range(12)]
        evaluations = [(step, {"loss": value}) for step, value in enumerate(values, 1)]
        mine = next((step for step in range(1, 13) if rule.find_stop_reason(evaluations[:step])), None)
        assert mine == reference(values, direction=direction, patience=patience, min_delta=min_delta), values
        ended += mine is not None
    assert ended


def test_the_reason_names_the_best_value_and_its_step() -> None:
    losses = [(10, {"loss": 0.5}), (20, {"loss": 0.25}), (30, {"loss": 0.24}), (40, {"loss": 0.3})]
    assert EarlyStopping("loss", "min", 2, 0.1).find_stop_reason(losses) == (
        "loss has not improved on 0.25 (step 20) by more than 0.1 in 2 evaluations"
    )
    assert EarlyStopping("loss", "min", 2, 0.0).find_stop_reason(losses) is None


def test_a_metric_that_an_evaluation_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(
        ConfigError,
        match=r"metric 'los' not found in the evaluation; did you mean 'loss'\? Available: accuracy, loss\.",
    ):
        EarlyStopping("los").find_stop_reason([(1, {"loss": 1.0, "accuracy": 0.5})])


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("loss", "loss"),
        ("test/accuracy", "accuracy"),
        ("ema/test/loss", "ema/loss"),
        ("test/top/5", "test/top/5"),
    ],
)
def test_a_metric_may_be_given_with_its_split_as_loggers_show_it(given: str, known: str) -> None:
    words = ["recipe=digits", "evaluate_every=3", f"early_stopping.metric={given}"]
    rule = build_settings(compose_only(words)).early_stopping
    assert rule
    assert rule.find_stop_reason([(3, {known: 0.5})]) is None


def loop(config: LoopConfig, first: TrainingProgress, *, ends_after: int) -> tuple[list[str], TrainingProgress]:
    """Run the loop; return its logged steps, evaluations and saves in order, and its last step."""
    log: list[str] = []
    last = SimpleNamespace(evaluated=first.step)

    def emit(event: Event) -> None:
        match event:
            case Evaluated(step=step):
                last.evaluated = step
                log.append(f"evaluated {step}")
            case StepDone(step=step):
                log.append(f"logged {step}")

    callbacks = LoopCallbacks(
        cast("Any", lambda *step: {}),
        emit,
        save=lambda progress: log.append(f"saved {progress.step}"),
        ends_early=lambda: "enough" if last.evaluated >= ends_after else None,
    )
    return log, fit(Idle(), repeat([]), ALONE, config=config, callbacks=callbacks, first=first)


def test_a_run_that_ends_early_logs_and_saves_its_last_step() -> None:
    config = LoopConfig(9, batch_size=1, evaluate_every=2, save_at_end=True)
    log, last = loop(config, TrainingProgress(), ends_after=4)
    assert log == ["logged 1", "evaluated 2", "evaluated 4", "logged 4", "saved 4"]
    assert last == TrainingProgress(4, stopped_early="enough")


def test_a_run_that_had_ended_early_takes_no_step_when_it_is_resumed() -> None:
    config = LoopConfig(9, batch_size=1, evaluate_every=2, save_at_end=True)
    assert loop(config, TrainingProgress(4), ends_after=4) == ([], TrainingProgress(4, stopped_early="enough"))


def test_the_last_step_is_not_early() -> None:
    _, last = loop(LoopConfig(4, batch_size=1, evaluate_every=2), TrainingProgress(), ends_after=4)
    assert last == TrainingProgress(4)


STILL = ("recipe=digits", "steps=40", "lr=0", "reproducibility=elastic", "evaluate_every=3", "checkpoint.every=3")
RULE = ("early_stopping.metric=loss", "early_stopping.patience=2")


def test_an_interrupted_run_ends_at_the_step_of_an_undisturbed_one(train: Any, command: Command) -> None:
    """The first of three evaluations is the best, since the learning rate is 0."""
    keep = ("checkpoint.keep.best=loss", "checkpoint.keep.last=1", "checkpoint.keep.direction=min")
    straight = train(*STILL, *RULE, *keep, "cluster.processes=1")
    killed = ("faults=[{action: kill, step: 8, rank: 1}]", "launcher.max_restarts=1")
    resumed = train(*STILL, *RULE, *killed, "cluster.processes=2")
    for run in (straight, resumed):
        assert run.code == 0, run.error
        assert run.json("result.json")["steps"] == 9
        reason = run.json("run_manifest.json")["results"]["stopped_early"]
        assert reason.startswith("loss has not improved on ")
        assert reason.endswith(" in 2 evaluations")
        assert "ended early" in run.output
        saved = json.loads((run.folder / "checkpoints" / "step_0000009" / "manifest.json").read_text())
        assert saved["step"] == 9
    assert len(resumed.json("run_manifest.json")["attempts"]) == 2
    for name in ("state_digest", "metrics_digest"):
        assert straight.json("result.json")[name] == resumed.json("result.json")[name]
    done = command("status", str(straight.folder), cwd=straight.folder, environment=environment())
    assert "completed early" in done.stdout
    assert list(Path(straight.folder, "checkpoints").glob("step_*")) != []


@pytest.mark.parametrize("options", [("consistency=sync",), ("consistency=async",)], ids=str)
def test_servers_and_workers_end_early_together(train: Any, options: tuple[str, ...]) -> None:
    words = ("strategy=parameter_server", *(f"strategy.{each}" for each in options), "cluster.processes=3")
    run = train("recipe=digits", "steps=40", "lr=0", "evaluate_every=3", *words, *RULE)
    assert run.code == 0, run.error
    assert run.json("result.json")["steps"] == 9


def test_without_evaluations_in_between_it_is_refused_before_the_start(train: Any) -> None:
    run = train("recipe=digits", "early_stopping.metric=loss")
    assert (run.code, run.folder) == (2, None)
    assert "Set evaluate_every" in run.error
