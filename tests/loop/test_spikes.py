"""Spikes are found by a rule on logged values, and refused where a run cannot go back."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy
import pytest

from recipes.digits.recipe import Digits
from tests.loop.test_fit import ALONE, Idle
from worldsize.checkpoint.format import folder_name, parse_step
from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings
from worldsize.core import CheckpointSaved, Event, NonfiniteLossError, RunEnded, RunStarted, Spike, StepDone
from worldsize.errors import ConfigError
from worldsize.healing.loop_state import LogState
from worldsize.healing.rewind import RewindRequest, describe_refusal
from worldsize.launch.execute import build_checked_settings
from worldsize.loop.fit import LoopCallbacks, LoopConfig, fit
from worldsize.loop.spikes import SpikeDetection, SpikeFoundError
from worldsize.observe.events import EventLog, describe_event, is_event
from worldsize.record.chain import ChainFile
from worldsize.record.metrics import MetricsFile, logged_values
from worldsize.record.run_directory import RunDirectory
from worldsize.worker.checkpointing import History

if TYPE_CHECKING:
    from worldsize.record.run_record import RunRecord


def find(rule: SpikeDetection, losses: Sequence[float], norms: Sequence[float | None]) -> Spike | None:
    rows = [(10 * index, loss, norm) for index, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)]
    return rule.find_spike(rows)


def test_a_spike_exceeds_the_median_of_the_window() -> None:
    generator, found = random.Random(3), 0
    for _ in range(400):
        window, factor = generator.choice([10, 13, 20]), generator.choice([1.5, 2.0, 3.0])
        losses = [generator.lognormvariate(0, 0.6) for _ in range(generator.randrange(2, 30))]
        norms = [generator.lognormvariate(2, 0.6) for _ in losses]
        spike = find(SpikeDetection(factor, window), losses, norms)
        limits = [factor * numpy.median(values[:-1][-window:]) for values in (losses, norms)]
        names = [
            name
            for name, values, limit in zip(("loss", "grad_norm"), (losses, norms), limits, strict=True)
            if len(losses) > 10 and values[-1] > limit
        ]
        assert (spike.name if spike else None) == (names[0] if names else None)
        if spike:
            assert (spike.step, spike.since) == (10 * len(losses), 10 * len(losses) - 10)
            assert spike.count == min(window, len(losses) - 1)
        found += spike is not None
    assert 50 < found < 350


@pytest.mark.parametrize("typical", [0.0, -3.0])
def test_losses_without_a_positive_median_are_not_compared(typical: float) -> None:
    assert find(SpikeDetection(2), [typical] * 12 + [1e6], [None] * 13) is None
    spike = find(SpikeDetection(2), [typical] * 12 + [1e6], [1.0] * 12 + [2.5])
    assert spike is not None
    assert spike.name == "grad_norm"


def test_nonfinite_values_are_spikes_where_asked_and_never_history() -> None:
    rule, nan = SpikeDetection(2, 10), math.nan
    rows = [(step, 1.0, 1.0) for step in range(1, 10)]
    for loss, norm, name in [(nan, 1.0, "loss"), (math.inf, 1.0, "loss"), (1.0, math.inf, "grad_norm")]:
        last = [*rows, (10, loss, norm)]
        assert rule.find_spike(last) is None
        spike = rule.find_spike(last, nonfinite=("loss", "grad_norm"))
        assert spike is not None
        assert (spike.name, spike.median) == (name, None)
        assert rule.find_spike(last, nonfinite=("loss",)) == (spike if name == "loss" else None)
    assert rule.find_spike([*rows, (10, nan, nan), (11, 9.0, 1.0)]) is None  # 9 finite values
    assert rule.find_spike([(0, 1.0, 1.0), *rows, (10, nan, nan), (11, 9.0, 1.0)]) is None
    assert SpikeDetection(2, 11).find_spike([(0, 1.0, 1.0), *rows, (10, nan, nan), (11, 9.0, 1.0)]) is not None
    assert rule.find_spike([]) is None


def done(step: int, loss: float, norm: float | None) -> StepDone:
    return StepDone(step, step, loss, 0.1, norm, 0, 0.0, (1.0,), 1.0)


def test_a_resumed_run_reads_the_history_of_one_that_was_not(tmp_path: Path) -> None:
    file, history = MetricsFile(tmp_path / "metrics.jsonl"), History(tmp_path / "metrics.jsonl")
    history.logged = deque(maxlen=5)
    values = [(1, 0.1, 1 / 3), (10, math.nan, math.inf), (20, 1e-300, None), (30, 0.7, 2.0), (40, 1.0, 0.1)]
    for row in values:
        file(done(*row))
        history(done(*row))
    file(RunEnded(40, "completed"))
    assert str(logged_values(tmp_path / "metrics.jsonl", until=40, last=5)) == str([*history.logged])
    assert logged_values(tmp_path / "metrics.jsonl", until=35, last=2) == values[2:4]
    assert logged_values(tmp_path / "metrics.jsonl", until=0, last=5) == []


def test_the_loop_ends_before_it_saves_or_refuses_a_nonfinite_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()

    def check(event: StepDone) -> None:
        order.append(f"checked {event.step}")
        if event.step == 4:
            raise SpikeFoundError(Spike(4, "loss", 9.0, 1.0, 10, 2, "rewind"))

    def save(progress: object) -> None:
        order.append("saved")

    config = LoopConfig(8, batch_size=1, log_every=2, save_every=2)
    callbacks = LoopCallbacks(lambda step: {}, lambda event: None, save, check=check)
    with pytest.raises(SpikeFoundError, match="step 4: the loss is 9, 9 times the median of the 10 values before it"):
        fit(Idle(), repeat([]), ALONE, config=config, callbacks=callbacks)
    assert order == ["checked 1", "checked 2", "saved", "checked 4"]
    monkeypatch.setattr("worldsize.loop.fit.math.isfinite", lambda loss: False)
    order.clear()
    with pytest.raises(NonfiniteLossError):
        fit(Idle(), repeat([]), ALONE, config=config, callbacks=callbacks)
    assert order == ["checked 1"]


@pytest.mark.parametrize("value", [3.0, math.inf, math.nan])
def test_the_event_is_strict_json_and_reads_as_it_was_logged(tmp_path: Path, value: float) -> None:
    event: Event = Spike(70, "grad_norm", value, 1.0, 50, 60, "warn")
    EventLog(tmp_path / "events.jsonl")(event)
    row = json.loads((tmp_path / "events.jsonl").read_text(), parse_constant=pytest.fail)
    assert is_event(row)
    assert isinstance(event, Spike)
    assert describe_event(row) == event.describe()


ON = ("spike.factor=3", "spike.on_spike=rewind")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("spike.factor=1",), "spike.factor=1.* must be above 1"),
        (("spike.factor=3", "spike.window=9"), "spike.window=9 must be 10 or more"),
        (
            (*ON, "strategy=parameter_server", "cluster.processes=2"),
            "not supported with ParameterServer.*on_spike=warn",
        ),
        ((*ON, "checkpoint.every=5"), "only 2 checkpoints are kept, one every 5 steps. Set checkpoint.keep.last=3"),
        (("skip_samples=[5:5]",), "is empty"),
        (("skip_samples=[5]",), "FIRST:END"),
    ],
)
def test_runs_that_cannot_go_back_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_settings(compose_only(["recipe=digits", *words]))


@pytest.mark.parametrize(
    "words",
    [
        ("checkpoint.every=5", "checkpoint.keep.last=3"),
        ("checkpoint.every=9",),
        ("checkpoint.every=0",),
        ("checkpoint.every=5", "checkpoint.keep.every=50"),
        ("strategy=local_sgd", "cluster.processes=2"),
    ],
)
def test_other_runs_can_go_back(words: tuple[str, ...]) -> None:
    settings = build_settings(compose_only(["recipe=digits", *ON, *words]))
    assert settings.spikes_if_nonfinite == ("loss", "grad_norm")
    assert settings.skips_samples


@pytest.mark.parametrize("every", range(1, 12))
@pytest.mark.parametrize("log_every", range(1, 12))
def test_the_kept_checkpoints_reach_back_to_the_logged_step_before(every: int, log_every: int) -> None:
    """The bound on checkpoint.keep.last is compared with all saves and logged steps of a run."""
    words = ["recipe=digits", *ON, f"checkpoint.every={every}", f"log_every={log_every}"]

    def reaches_back(last: int) -> bool:
        for spike in range(log_every, 20 * log_every + 200, log_every):
            saved = [*range(every, spike, every)]  # the save after the spike is not reached
            kept = saved[-last:]
            if len(saved) > last and not any(step <= spike - log_every for step in kept):
                return False
        return True

    for last in range(1, 14):
        with suppress(ConfigError):
            build_settings(compose_only([*words, f"checkpoint.keep.last={last}"]))
            assert reaches_back(last)
            return
    pytest.fail("refused for all")


def test_samples_of_streams_are_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "data", lambda self, split: iter(()))
    for words in (ON, ("skip_samples=[0:8]",)):
        with pytest.raises(ConfigError, match="the data are a stream, whose samples have no positions"):
            build_checked_settings(compose_only(["recipe=digits", *words]))


def test_an_evaluation_needs_no_history() -> None:
    settings = build_settings(compose_only(["recipe=digits", "spike.factor=2", "spike.on_spike=warn"]))
    assert settings.spikes_if_nonfinite == ()
    assert not settings.skips_samples
    assert build_settings(compose_only(["recipe=digits"])).spike is None


def test_a_run_whose_checkpoints_before_the_spike_were_deleted_does_not_go_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    chain = ChainFile(run)
    saved = [run.checkpoints / folder_name(step) for step in (10, 30)]
    for folder in saved:
        folder.mkdir(parents=True)
        (folder / "COMPLETE").write_text("0" * 64)
    chain(RunStarted(run.id, 50))
    for path in saved:
        chain(CheckpointSaved(parse_step(path), path))
    chain(RunEnded(31, "preempted"))
    record = cast("RunRecord", SimpleNamespace(directory=run, manifest={"config": {"spike": {"rewinds": 3}}}))
    request = RewindRequest(25, 20, "step 25: the loss is inf.", stops=False)
    assert describe_refusal(request, record) is None
    shutil.rmtree(saved[0])
    refusal = describe_refusal(request, record) or ""
    assert "All checkpoints up to step 20, before the spike, have been deleted" in refusal
    assert "--from 0" in refusal
    assert describe_refusal(RewindRequest(8, 5, "step 8", stops=False), record) is None, "none was saved before"
    assert describe_refusal(RewindRequest(35, 30, "step 35", stops=False), record) is None


def test_a_spike_is_reported_once_after_the_membership_changes() -> None:
    state = LogState(step=20)
    spike = Spike(20, "loss", 9.0, 1.0, 12, 19, "warn")
    assert [state.is_new(replace(spike, step=step)) for step in (20, 21)] == [False, True]
