"""Names that others chose reach a terminal intact, but without its control sequences."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from tests.observe.run_folders import attempt, write_run
from tests.support.loggers import keep_loggers
from worldsize.cli.watch import watch
from worldsize.errors import WorldsizeError
from worldsize.messages import report_error, show_messages
from worldsize.observe.progress import Progress
from worldsize.observe.summary import comparison_table, show_summary
from worldsize.observe.watch import Watched, render_screen
from worldsize.record.compare import compare_runs
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import refresh_run

NAMES = ["[/b]", "[top5]", "a\x1b]0;x\x07", "\ud800"]
SHOWN = {"a\x1b]0;x\x07": r"a\x1b]0;x\x07", "\ud800": r"\ud800"}


def rendered(*parts: RenderableType, is_terminal: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=is_terminal, color_system=None).print(*parts)
    return out.getvalue()


def evaluation(name: str) -> Mapping[str, Any]:
    return {"event": "evaluation", "step": 3, "metrics": {name: 0.5}}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_progress_of_a_run_shows_the_name_of_a_metric(tmp_path: Path, name: str, is_terminal: bool) -> None:
    out, path = io.StringIO(), tmp_path / "metrics.jsonl"
    with Progress(path, 3, Console(file=out, force_terminal=is_terminal, width=100, color_system=None)):
        path.write_text(json.dumps(evaluation(name)) + "\n")
    assert f"test: {SHOWN.get(name, name)} 0.5000" in out.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_comparison_shows_the_name_of_a_metric(tmp_path: Path, name: str) -> None:
    runs = [write_run(tmp_path / run, steps=40, loss=loss, metric=name) for run, loss in (("a", 1.0), ("b", 2.0))]
    text = rendered(comparison_table(compare_runs(*runs, tolerance=0.1)))
    assert f"test {SHOWN.get(name, name)} " in text


@pytest.mark.parametrize("name", NAMES)
def test_the_summary_of_a_run_shows_metrics_remarks_and_folder(tmp_path: Path, name: str) -> None:
    figures = {"steps": 1, "samples": 1, "seconds": 1.0, "samples_per_second": 1.0, "state_digest": "ab"}
    result = {"metrics": {name: 0.5}, "remarks": [f"see {name}"], **figures}
    out = io.StringIO()
    show_summary(Console(file=out, width=40), result, Path(f"/runs of mine/{'x' * 40}/{name}"))
    text, shown = out.getvalue(), SHOWN.get(name, name)
    assert all(part in text for part in (f"test {shown}", f"see {shown}"))
    assert text.splitlines()[-1].split(maxsplit=1)[1] == f"/runs of mine/{'x' * 40}/{shown}"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_watch_escapes_what_a_record_says_and_counts_damaged_lines(tmp_path: Path, is_terminal: bool) -> None:
    attempts = [attempt(1, steps=[0, 4], reason="fa\x1b[31miled"), attempt(2, steps=[0, 4], reason="[/b]\x1b[2J")]
    run = write_run(tmp_path / "run", steps=4, attempts=attempts)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("torn\n" + json.dumps(evaluation("[/b]\x1b[2J")) + "\n")
    (run / "events.jsonl").write_text("torn\n")
    out = io.StringIO()
    watch(RunDirectory(run), Console(file=out, width=200, force_terminal=is_terminal, color_system=None))
    text = out.getvalue()
    assert "\x1b[2J" not in text
    assert "\x1b[31m" not in text
    assert "skipped 2 damaged lines in the run's files" in text
    watched = Watched(run)
    watched.update_rows()
    assert "\x1b" not in rendered(render_screen(watched, refresh_run(RunDirectory(run)).manifest, "x\x1b[2J"))


def test_a_refusal_and_a_logged_line_are_escaped_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("worldsize")
    keep_loggers(monkeypatch)
    show_messages()
    report_error(WorldsizeError("one\x1b[2J\ntwo"))
    logger.warning("%s", "three\x1b[2J\nfour")
    assert capsys.readouterr().err == "one\\x1b[2J\ntwo\nwarning: three\\x1b[2J\nfour\n"
