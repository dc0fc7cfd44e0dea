"""``worldsize watch`` follows a run that trains, fails, restarts and ends."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.observe.run_folders import attempt, write_run
from worldsize.cli.watch import watch
from worldsize.core import Outcome
from worldsize.launch.scheduled import Scheduler, is_alive
from worldsize.observe.progress import Tail, remaining
from worldsize.observe.watch import RankTimes, Watched, render_screen
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunRecord, open_record, refresh_run


@pytest.fixture
def record(tmp_path: Path) -> Iterator[RunRecord]:
    """A run at step 30 of 200, in its first attempt; this process holds its lock."""
    folder = write_run(tmp_path / "digits" / "run", steps=30, ranks=20, attempts=[])
    with open_record(RunDirectory(folder)) as record:
        begin(record)
        yield record


@pytest.fixture
def run(record: RunRecord) -> RunDirectory:
    return record.directory


def append(run: RunDirectory, **facts: object) -> None:
    """Append a line to the run's metrics."""
    with run.metrics.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def begin(record: RunRecord) -> None:
    """Begin an attempt that has already logged the folder's metrics."""
    logged = record.directory.metrics.read_text()
    record.begin_attempt([], world_size=20)
    record.directory.metrics.write_text(logged)


def end(record: RunRecord, reason: str, code: int) -> None:
    record.end_attempt(Outcome(reason, code))


def acts(*actions: Callable[[], object]) -> Callable[[float], None]:
    """Return a function that runs the next of these actions instead of waiting."""
    remaining = iter(actions)
    return lambda _: (next(remaining)(), None)[1]


def test_the_slowest_rank_is_the_one_that_computes_longest(run: RunDirectory) -> None:
    watched, out = Watched(run.path), io.StringIO()
    watched.update_rows()
    Console(file=out, width=160).print(render_screen(watched, refresh_run(run).manifest, "running"))
    (line,) = [line for line in out.getvalue().splitlines() if line.endswith("slowest")]
    assert line.split()[0] == "19"  # write_run makes this rank compute longer
    assert "the slowest 16 of 20" in out.getvalue()
    assert "step 30/200" in out.getvalue()


def test_the_times_of_many_ranks_are_not_read_at_each_refresh(run: RunDirectory) -> None:
    now = 0.0
    times = RankTimes(run.path, clock=lambda: now)
    assert [row["step"] for row in times.read_times(20).values()] == [30] * 20
    with run.get_timing_file(19).open("a") as file:
        file.write('{"step": 31, "compute_seconds": 1.0}\n')
    now = 0.19  # 20 ranks: every 0.2 s
    assert times.read_times(20)[19]["step"] == 30
    now = 0.21
    assert times.read_times(20)[19]["step"] == 31


def test_without_a_terminal_each_change_is_a_line_and_the_exit_code_is_that_of_the_run(
    record: RunRecord, run: RunDirectory
) -> None:
    out = io.StringIO()
    event = {"event": "straggling", "step": 31, "rank": 19, "host": "gpu-b\x1b[31m", "cause": "data", "slower": 1.3}

    def straggles() -> None:
        (run.path / "events.jsonl").write_text(json.dumps({**event, "time": 1.0}) + "\n")
        append(run, event="evaluation", step=31, metrics={"accuracy": 0.25})

    def again() -> None:
        begin(record)

    steps = acts(straggles, lambda: end(record, "failed", 1), again, lambda: end(record, "completed", 0))
    code = watch(run, Console(file=out, width=200), wait=steps)
    lines = out.getvalue().splitlines()
    assert code == 0
    assert [line for line in lines if line.startswith("attempt")] == [
        "attempt 1: running",
        "attempt 1: failed",
        "attempt 2: running",
        "attempt 2: completed",
    ]
    assert "step 30/200" in lines[1]
    assert "step 31  test: accuracy 0.2500" in lines
    (line,) = [line for line in lines if "straggling" in line]
    assert line == "step 31: straggling, rank 19, 1.3 × as slow as the others, host gpu-b�[31m, cause data"


def test_on_a_terminal_the_last_view_stays(record: RunRecord, run: RunDirectory) -> None:
    out = io.StringIO()
    end(record, "preempted", 75)
    begin(record)
    console = Console(file=out, width=160, force_terminal=True)
    assert watch(run, console, wait=acts(lambda: end(record, "completed", 0))) == 0
    assert "attempt 2" in out.getvalue()
    assert "completed" in out.getvalue()


@pytest.mark.parametrize(("reason", "code", "expected"), [("failed", 1, 1), ("preempted", 75, 75), ("killed", None, 1)])
def test_a_run_that_has_ended_is_shown_once(tmp_path: Path, reason: str, code: int, expected: int) -> None:
    ended = {"exit_reason": reason, "exit_code": code, "hosts": ["a"]}
    folder = write_run(tmp_path / "run", steps=3, attempts=[{**attempt(1, steps=None), **ended}])
    assert watch(RunDirectory(folder), Console(file=io.StringIO()), wait=acts()) == expected


def test_a_failed_run_is_alive_while_its_launcher_may_restart_it(record: RunRecord) -> None:
    scheduler = Scheduler(record.directory)
    end(record, "failed", 1)
    assert is_alive(scheduler)
    end(record, "completed", 0)
    assert not is_alive(scheduler)


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one\ntwo\n")
    tail = Tail(tmp_path / "file", from_start=True)
    assert list(tail.read()) == [b"one\n", b"two\n"]
    (tmp_path / "new").write_text("three\nfour\nfive\n")
    (tmp_path / "new").replace(tmp_path / "file")
    assert list(tail.read()) == [b"three\n", b"four\n", b"five\n"]


@pytest.mark.parametrize(
    ("speed", "said"), [(10.0, "20 s"), (0.5, "6 min 40 s"), (0.01, "5 h 33 min"), (0.0, "unknown")]
)
def test_the_time_that_is_left_is_told_as_people_do(speed: float, said: str) -> None:
    row: Any = {"step": 50, "samples": 100, "samples_per_second": speed}  # two a step
    assert remaining(row, 150) == f"ETA {said}"
