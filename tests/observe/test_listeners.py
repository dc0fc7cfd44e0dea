"""Listeners write events, and views follow their files."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from threading import Event as Flag
from threading import Timer
from typing import Any

import pytest
from rich.console import Console

from worldsize.core import CheckpointSaved, Evaluated, Event, Listener, RunEnded, RunFailed, StepDone
from worldsize.observe import subprocess_listeners
from worldsize.observe.progress import Progress, Tail
from worldsize.observe.subprocess_listeners import SubprocessListeners
from worldsize.observe.timing import Timing
from worldsize.record.metrics import MetricsFile, metrics_digest
from worldsize.record.run_directory import RunDirectory

ENDED = RunEnded(1, "completed")


def step(number: int, loss: float = 0.1, seconds: float = 0.5) -> StepDone:
    times: dict[str, Any] = {f"{part}_seconds": seconds / 4 for part in ("compute", "communication", "update")}
    splits = [[[0.0, *times.values()]]] * 2
    return StepDone(number, number * 8, loss, 0.01, None, 0, 0.0, (seconds, 2 * seconds), 100.0, **times, splits=splits)


def test_a_line_holds_every_digit(tmp_path: Path) -> None:
    listener = MetricsFile(tmp_path / "metrics.jsonl")
    listener(step(1, loss=0.1 + 0.2))
    listener(ENDED)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] == 0.1 + 0.2
    assert line["step_seconds"] == [0.5, 1.0]
    assert line["update_seconds"] == 0.125
    assert "splits" not in line


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_line_is_strict_json_whatever_the_loss(tmp_path: Path, loss: float) -> None:
    listener = MetricsFile(tmp_path / "metrics.jsonl")
    listener(step(1, loss=loss))
    listener(ENDED)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)["loss"] == str(loss)


def test_the_digest_depends_on_the_computation_and_not_on_time(tmp_path: Path) -> None:
    digests = []
    for name, loss, seconds in (("a", 1.0, 0.5), ("b", 1.0, 0.7), ("c", 1.0000001, 0.5)):
        listener = MetricsFile(tmp_path / name)
        listener(step(1, loss, seconds))
        listener(Evaluated(1, {"accuracy": 0.5}))
        listener(ENDED)
        digests.append(metrics_digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


def test_each_rank_writes_its_own_time(tmp_path: Path) -> None:
    listener = Timing(RunDirectory(tmp_path), rank=1)
    listener(step(1))
    listener(ENDED)
    assert json.loads((tmp_path / "timing" / "worker_00001.jsonl").read_text()) == {
        "step": 1,
        "step_seconds": 1.0,
        "data_seconds": 0.0,
        "compute_seconds": 0.125,
        "communication_seconds": 0.125,
        "update_seconds": 0.125,
    }


def test_a_tail_gives_complete_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_text("one\ntw")
    assert list(tail.read()) == [b"one\n"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert list(tail.read()) == [b"two\n", b"three\n"]
    assert list(tail.read()) == []


def test_progress_without_a_terminal_shows_the_last_step_and_every_evaluation(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=100)
    listener = MetricsFile(tmp_path / "metrics.jsonl")
    with Progress(tmp_path / "metrics.jsonl", 3, console):
        for event in (step(1), step(2), step(3), Evaluated(3, {"accuracy": 0.25}), ENDED):
            listener(event)
    shown = out.getvalue()
    assert "step 3/3  loss 0.1000  100 samples/s" in shown
    assert "step 3  test: accuracy 0.2500" in shown


class Recorder:
    """A listener that records each event and the process it is in."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def __call__(self, event: Event) -> None:
        self.file.write(f"{os.getpid()} {type(event).__name__}\n")


def events(path: Path) -> list[str]:
    """Return the recorded names of events."""
    return [line.split()[1] for line in path.read_text().splitlines()]


def test_a_subprocess_listener_is_told_everything_in_order_by_another_process(tmp_path: Path) -> None:
    listener = SubprocessListeners({"logger": lambda: Recorder(tmp_path / "events")})
    for event in (step(1), Evaluated(1, {}), RunEnded(1, "completed")):
        listener(event)
    assert events(tmp_path / "events") == ["StepDone", "Evaluated", "RunEnded"]
    assert str(os.getpid()) not in (tmp_path / "events").read_text()


def test_a_subprocess_listener_yields_the_processor_to_those_who_train(tmp_path: Path) -> None:
    def niceness(event: Event) -> None:
        (tmp_path / "niceness").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    SubprocessListeners({"logger": lambda: niceness})(RunEnded(1, "completed"))
    assert int((tmp_path / "niceness").read_text()) == min(mine + 10, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_steps_that_follow_each_other_fast_are_told_of_together_and_before_what_happens_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_listeners, "_INTERVAL", 1e9)  # the test may be slow, the steps are fast
    listener = SubprocessListeners({"logger": lambda: Recorder(tmp_path / "events")})
    for number in (1, 2, 3):
        listener(step(number))
    while not (tmp_path / "events").exists() or not events(tmp_path / "events"):
        pass
    assert events(tmp_path / "events") == ["StepDone"]
    listener(CheckpointSaved(3, tmp_path))
    listener(RunEnded(3, "completed"))
    assert events(tmp_path / "events") == ["StepDone"] * 3 + ["CheckpointSaved", "RunEnded"]


def test_a_subprocess_listener_learns_that_its_run_died(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        listener = SubprocessListeners({"logger": lambda: Recorder(tmp_path / "events")})
        listener(step(1))
        os._exit(9)  # exits at once, like SIGKILL
    os.waitpid(child, 0)
    while not (tmp_path / "events").exists() or len(events(tmp_path / "events")) < 2:
        pass
    assert events(tmp_path / "events") == ["StepDone", "RunFailed"]


def test_a_listener_that_cannot_be_made_costs_a_warning(shown: pytest.CaptureFixture[str]) -> None:
    def fail() -> Listener:
        raise OSError("no network")

    listener = SubprocessListeners({"logger": fail})
    for event in (step(1), step(2), RunFailed("x")):
        listener(event)
    said = "warning: the logger failed and is disabled for the rest of the run: OSError: no network\n"
    assert said in shown.readouterr().err


def test_a_listener_that_hangs_does_not_hold_up_the_end(shown: pytest.CaptureFixture[str]) -> None:
    def hang() -> Listener:
        Flag().wait()
        raise AssertionError

    SubprocessListeners({"logger": hang}, timeout=0.1)(RunEnded(1, "completed"))
    assert "did not finish within 0.1 s" in shown.readouterr().err


def test_a_preempted_run_waits_for_a_listener_no_longer_than_its_scheduler_waits_for_it(
    shown: pytest.CaptureFixture[str],
) -> None:
    def hang() -> Listener:
        Flag().wait()
        raise AssertionError

    SubprocessListeners({"logger": hang}, grace=lambda: 0.125)(RunEnded(1, "preempted"))
    assert "the logger did not finish within 0.125 s: its unsent events are lost" in shown.readouterr().err


def blocked(door: Path, path: Path) -> Listener:
    """Return a listener whose creation blocks until the named pipe ``door`` is opened for writing."""
    door.open().close()
    return Recorder(path)


def test_a_listener_that_is_slow_to_start_does_not_hold_up_the_training(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "door")
    listener = SubprocessListeners({"logger": lambda: blocked(tmp_path / "door", tmp_path / "events")})
    for number in range(1, 2001):  # several times a pipe's capacity
        listener(step(number))
    (tmp_path / "door").open("w").close()
    listener(RunEnded(2000, "completed"))
    assert events(tmp_path / "events") == ["StepDone"] * 2000 + ["RunEnded"]


def test_the_listener_of_an_attempt_that_was_killed_tells_the_rest_before_the_next_one_is_made(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "door")

    def slow() -> Listener:
        (tmp_path / "door").open().readline()  # waits for the first line there
        return Recorder(tmp_path / "events")

    child = os.fork()
    if child == 0:
        SubprocessListeners({"logger": slow}, lock=tmp_path.joinpath)(step(1))
        os._exit(9)
    os.waitpid(child, 0)
    writer = (tmp_path / "door").open("w")  # by then it waits for the reader
    second = SubprocessListeners({"logger": lambda: Recorder(tmp_path / "events")}, lock=tmp_path.joinpath)
    second(step(2))
    Timer(0.3, lambda: print("go", file=writer, flush=True)).start()
    second(RunEnded(2, "completed"))
    writer.close()
    assert events(tmp_path / "events") == ["StepDone", "RunFailed", "StepDone", "RunEnded"]


def test_the_end_is_bounded_even_when_the_listener_took_nothing(
    tmp_path: Path, shown: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "door")
    listener = SubprocessListeners({"logger": lambda: blocked(tmp_path / "door", tmp_path / "events")}, timeout=0.1)
    for number in range(1, 2001):
        listener(step(number))
    listener(RunEnded(2000, "completed"))
    assert "did not finish within 0.1 s" in shown.readouterr().err


def test_a_failure_after_the_end_is_not_hidden_by_the_listener(tmp_path: Path) -> None:
    listener = SubprocessListeners({"logger": lambda: Recorder(tmp_path / "events")})
    listener(RunEnded(1, "completed"))
    listener(RunFailed("closing the replica failed"))
    assert events(tmp_path / "events") == ["RunEnded"]
