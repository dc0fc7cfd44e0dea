"""A report and ``watch`` show the share of time spent waiting for data, by rank, and a remedy."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.observe.run_folders import write_run
from worldsize.core import DataWorkersChanged
from worldsize.observe.events import EventLog
from worldsize.observe.report.page import render_page
from worldsize.observe.report.read import compute_wait_share, read_run, waiting_text
from worldsize.observe.watch import Watched, render_screen
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import refresh_run


def line(step: int, data: float, rest: float) -> dict[str, Any]:
    return {"step": step, "data_seconds": data, "step_seconds": rest}


def test_a_line_counts_for_the_steps_since_the_one_before() -> None:
    """The first step waits for 9 s; the 99 that follow do not wait."""
    assert compute_wait_share([line(1, 9.0, 1.0), line(100, 0.0, 1.0)]) == pytest.approx(9 / 109)
    assert compute_wait_share([line(10, 1.0, 3.0)]) == 0.25
    assert math.isnan(compute_wait_share([]))
    assert math.isnan(compute_wait_share([{"step": 3, "step_seconds": 1.0}]))


@pytest.mark.parametrize(
    ("workers", "remedy"),
    [
        (0, "Set data_workers=auto, add a load_batch method to the dataset, or prepare the data once"),
        (2, "Set data_workers=auto, or more than 2, add a load_batch method to the dataset"),
        ("auto", "data_workers=auto adds no more workers: they would not help, or CPU cores are lacking. Instead, add"),
    ],
)
def test_the_remedy_follows_from_the_workers_that_there_are(workers: int | str, remedy: str) -> None:
    said = waiting_text({0: 0.5}, {"data_workers": workers})
    assert said is not None
    assert said.startswith(f"Steps wait for data 50% of the time. {remedy}")


def test_ranks_that_wait_longest_are_named_and_short_waits_are_not() -> None:
    shares = {rank: 0.01 * rank for rank in range(8)}
    said = waiting_text({**shares, 8: math.nan}, {})
    assert said is not None
    assert "4% of the time; longest wait: rank 7 7%, rank 6 6%, rank 5 5%, rank 4 4%, rank 3 3%. Set" in said
    assert waiting_text({0: 0.05, 1: 0.01}, {}) is None
    assert waiting_text({0: math.nan}, {}) is None


@pytest.fixture
def slow_rank(tmp_path: Path) -> Path:
    """A run of two ranks; the second waits for its data half of the time."""
    run = write_run(tmp_path / "run", ranks=2, steps=50)
    timing = RunDirectory(run).get_timing_file(1)
    rows = [json.loads(row) for row in timing.read_text().splitlines()]
    timing.write_text("".join(json.dumps({**row, "data_seconds": row["step_seconds"]}) + "\n" for row in rows))
    return run


def test_the_report_shows_who_waits_and_the_remedy(slow_rank: Path, tmp_path: Path) -> None:
    text = render_page([slow_rank])
    assert "Wait for data by rank" in text
    assert "Steps wait for data 28% of the time: rank 1 50%, rank 0 6%. Set data_workers=auto" in text
    brisk = write_run(tmp_path / "brisk", ranks=2)
    for rank in (0, 1):
        timing = RunDirectory(brisk).get_timing_file(rank)
        timing.write_text(timing.read_text().replace('"data_seconds": 0.00', '"data_seconds": 0.0000'))
    assert "Wait for data by rank" not in render_page([brisk])
    assert "Set data_workers" not in render_page([brisk])


def test_watch_shows_who_waits_and_the_remedy(slow_rank: Path) -> None:
    watched, out = Watched(slow_rank), io.StringIO()
    watched.update_rows()
    Console(file=out, width=250).print(render_screen(watched, refresh_run(RunDirectory(slow_rank)).manifest, "running"))
    assert "rank 1 50%" in out.getvalue()
    assert "Set data_workers=auto" in out.getvalue()


def test_a_change_of_data_workers_is_a_line_of_events_and_good_news_in_the_timeline(
    slow_rank: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(slow_rank / "events.jsonl")
    with caplog.at_level("INFO", logger="worldsize"):
        log(DataWorkersChanged(step=25, rank=0, workers=1, before=0, waited=0.625))
        log(DataWorkersChanged(step=59, rank=0, workers=0, before=1, waited=0.6))
    first, second = read_run(slow_rank).events
    assert (first["event"], first["step"], first["workers"], first["before"]) == ("data_workers", 25, 1, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "step 25: rank 0: data workers changed from 0 to 1: steps waited for data 62% of the time",
        "step 59: rank 0: back to 0 data workers: steps were not faster with 1",
    ]
    assert second["workers"] == 0
    assert caplog.records[0].getMessage() in render_page([slow_rank])
