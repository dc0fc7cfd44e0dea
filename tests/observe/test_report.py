"""The page of a run, a sweep or a scaling study has correct figures, and renders in a browser without errors."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import struct
import zlib
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.observe.browser import PROGRAM, browser
from tests.observe.run_folders import HOSTILE, START, attempt, write_run
from worldsize.cli.logs import read_log_lines
from worldsize.cli.report import write_report
from worldsize.errors import WorldsizeError
from worldsize.launch.scheduled import Scheduler
from worldsize.observe.report import read
from worldsize.observe.report.curves import StepCurve, average_rows, read_sweep, search_charts
from worldsize.observe.report.curves import draw_lines as lines_chart
from worldsize.observe.report.page import collect_summary, render_page
from worldsize.observe.report.ranks import heat_map, list_servers, step_breakdown
from worldsize.observe.report.read import find_runs, parse_number, read_run
from worldsize.observe.report.scaling import read_study
from worldsize.observe.report.timeline import timeline
from worldsize.observe.watch import RankTimes
from worldsize.record.manifest import write_manifest
from worldsize.record.run_directory import RunDirectory, run_lock


class Shown(HTMLParser):
    """The elements, ids and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two failures, servers, a straggler, and names that are markup."""
    attempts = [
        attempt(1, steps=[0, 90], reason="failed"),
        attempt(2, steps=[80, 150], reason="failed", hosts=[HOSTILE, "gpu-b"]),
        attempt(3, steps=[150, 200], hosts=["gpu-a", HOSTILE]),
    ]
    words = ["recipe=digits", f"note={HOSTILE}"]
    root = tmp_path_factory.mktemp("eventful")
    run = write_run(root / "run", ranks=6, servers=2, attempts=attempts, overrides=words, metric=HOSTILE)
    event = {"event": "straggling", "step": 40, "rank": 5, "host": "gpu-b", "cause": "compute", "slower": 1.2}
    (run / "events.jsonl").write_text(json.dumps({**event, "time": START + 30, "note": HOSTILE}) + "\n")
    return run


@pytest.fixture(scope="module")
def text(eventful: Path) -> str:
    return render_page([eventful])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    points = [_point(size, 0.1 / size + 0.005 * (size > 1)) for size in (4, 1, 2)]
    facts = {"schema": 1, "recipe": "digits", "mode": "strong", "points": points, "knee": {"ddp": 2}, "cluster": {}}
    (folder / "scaling.json").write_text(json.dumps({**facts, "command": f"worldsize scale {HOSTILE}"}))
    return folder


def _point(size: int, seconds: float) -> dict[str, Any]:
    phases = {"data": 0.001, "compute": 0.1 / size, "communication": 0.004, "update": 0.001}
    speed = {"samples_per_second": 96 / seconds, "efficiency": 0.1 / size / seconds}
    measured = {"step_seconds": seconds, "spread_seconds": 0.001, "phases": phases, **speed}
    predicted = None if size == 4 else 1.1 * seconds
    return {"strategy": "ddp", "world_size": size, "accumulation": 1, **measured, "predicted_seconds": predicted}


# ---------------------------------------------------------------- reading


def test_many_rows_become_means_of_neighbours_without_those_that_are_missing() -> None:
    values_nk = np.arange(14.0).reshape(7, 2)
    values_nk[0, 0] = np.nan
    expected = [
        [values_nk[1, 0], values_nk[0:2, 1].mean()],
        *(values_nk[a : a + 2].mean(axis=0) for a in (2, 4)),
        values_nk[6],
    ]
    assert average_rows(values_nk, at_most=4).tolist() == np.array(expected).tolist()


def test_the_time_line_shows_when_attempts_ran_and_what_a_failure_cost(eventful: Path) -> None:
    line = timeline(read_run(eventful))
    assert line is not None
    assert line.seconds == 190
    assert [(bar.start, bar.first, bar.end) for bar in line.bars] == [
        (0.0, 2.11, 31.58),
        (34.21, 36.32, 65.79),
        (68.42, 70.53, 100.0),
    ]
    texts = {round(mark.seconds): mark.text for mark in line.marks}
    assert texts[60] == "attempt 1 ended: failed after step 90 (exit code 1)"
    assert texts[30].startswith("step 40: straggling, rank 5, 1.2 × as slow as the others, host gpu-b, cause compute")
    assert "recovered in 9.0 s; 10 steps repeated" in [mark.text for mark in line.marks]


def test_the_breakdown_has_the_phases_that_ranks_measured(tmp_path: Path) -> None:
    (chart,) = step_breakdown(read_run(write_run(tmp_path / "run", ranks=2)))
    assert [label for label, _ in chart.key] == ["data 1 ms", "compute 11 ms", "communication 3 ms", "update 1 ms"]


def test_without_phases_the_breakdown_is_the_step_and_the_wait_for_data(tmp_path: Path) -> None:
    (chart,) = step_breakdown(read_run(write_run(tmp_path / "run", ranks=2, phases=False)))
    assert [label for label, _ in chart.key] == ["data 1 ms", "step 15 ms"]


def test_runs_of_a_sweep_are_named_by_the_overrides_in_which_they_differ(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{rate}", overrides=["recipe=digits", f"lr={rate}"], steps=3) for rate in (1, 2)]
    folders.append(write_run(tmp_path / "again", overrides=["recipe=digits", "lr=2"], steps=3))
    sweep = read_sweep([*folders, tmp_path / "absent"])
    assert list(sweep.runs) == ["lr=1", "lr=2 2", "lr=2 again"]
    assert "cannot be read" in sweep.refused["absent"]


def test_a_folder_means_its_run_or_the_runs_in_it_or_those_of_the_sweep(tmp_path: Path) -> None:
    sweep, runs = tmp_path / "runs" / "sweeps" / "one", tmp_path / "runs" / "digits"
    sweep.mkdir(parents=True)
    of_sweep = write_run(runs / "a", steps=1, config={"run": {"group": "runs/sweeps/one"}})
    other = write_run(runs / "b", steps=1)
    assert find_runs(other) == [other]
    assert find_runs(runs) == [of_sweep, other]
    assert find_runs(sweep) == [of_sweep]


def test_a_scaling_study_is_sorted_and_knows_how_wrong_the_prediction_was(study: Path) -> None:
    points = read_study(study / "scaling.json").points
    assert [point.world_size for point in points] == [1, 2, 4]
    assert [point.is_knee for point in points] == [False, True, False]
    assert points[1].error == pytest.approx(0.1)
    assert points[1].predicted_samples == pytest.approx(points[1].samples_per_second / 1.1)


@pytest.mark.parametrize(
    "damage",
    [
        *("{", "[]", '{"schema": 1}', '{"schema": 9, "points": []}', '{"schema": Infinity, "points": []}'),
        *('{"schema": 1, "points": 5}', '{"schema": 1, "points": [5]}', '{"schema": 1, "points": [], "knee": 3}'),
        '{"schema": 1, "points": [{"strategy": "ddp", "world_size": 1, "phases": "x"}]}',
        '{"schema": 1, "points": [{"strategy": "ddp", "world_size": 0}]}',
        '{"schema": 1, "points": [{"strategy": "ddp", "world_size": 1, "step_seconds": ' + "9" * 400 + "}]}",
    ],
)
def test_a_scaling_study_that_cannot_be_read_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / "scaling.json").write_text(damage)
    with pytest.raises(WorldsizeError, match=r"Run worldsize scale again|Upgrade worldsize"):
        render_page([tmp_path])


def test_lines_that_no_run_writes_are_counted_and_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4, ranks=2, servers=1)
    timing = run / "timing"
    with (timing / "worker_00000.jsonl").open("a") as file:
        file.write('{}\n{"step": 5, "data_seconds": [1]}\n')
    for name in ("worker_abc.jsonl", "worker_00002x.jsonl", "worker_99999.jsonl"):
        (timing / name).write_text('{"step": 1, "step_seconds": 1}\n')
    events = ("{}", '{"event": "x", "time": ' + "9" * 400 + "}", '{"event": "straggling", "time": 1, "rank": "x"}')
    (run / "events.jsonl").write_text("".join(f"{line}\n" for line in events))
    step = {"event": "step", "samples": 8, "samples_per_second": 9.0, "loss": 1, "step_seconds": ["nan", 0.1]}
    with (run / "metrics.jsonl").open("a") as file:
        for number, facts in enumerate(([], {"servers": 5}, {"servers": [{}]}, {"servers": [5]}), 5):
            file.write(json.dumps({**step, "step": number, "facts": facts}) + "\n")
    record = read_run(run)
    assert (record.damaged, sorted(record.timing), record.events) == (5, [0, 1], [])
    assert "skipped 5 damaged lines in the run's files" in render_page([run])


def test_a_report_of_many_ranks_and_steps_reads_some_lines_and_keeps_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=400, ranks=4, servers=1)
    for path in (run / "timing").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "read_bytes": 10}) + "\n" for row in rows))
    whole = read_run(run)
    monkeypatch.setattr(read, "_LEAST", 10)
    monkeypatch.setattr(read, "_IN_ALL", 250)  # 50 for each of five processes
    record = read_run(run)
    assert ({len(rows) for rows in whole.timing.values()}, len(whole.steps)) == ({400}, 400)
    assert ({len(rows) for rows in record.timing.values()}, len(record.steps)) == ({51}, 45)
    (some,), (every,) = list_servers(record), list_servers(whole)
    assert every.pushes == 1600
    assert some.pushes == pytest.approx(every.pushes, rel=0.03)
    assert ("data read", "16 kB") in collect_summary(whole)
    assert ("data read", "16.3 kB") in collect_summary(record)
    one_of_two = read_sweep([run, tmp_path / "absent"]).runs["run"]
    assert (dict(one_of_two.timing), len(one_of_two.steps), one_of_two.steps[-1]["step"]) == ({}, 24, 400)


def test_no_folder_has_the_files_of_more_than_a_thousand_ranks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, ranks=2345, nodes=5)
    record = read_run(run)
    assert sorted(record.timing) == list(range(2345))
    assert record.timing[2344][0]["compute_seconds"] == pytest.approx(0.012)
    assert RankTimes(run).read_times(2345)[2344]["compute_seconds"] == pytest.approx(0.012)
    folders = (run / "timing", *(run / "timing").glob("0*"))
    assert sorted(sum(path.is_file() for path in folder.iterdir()) for folder in folders) == [345, 1000, 1000]


def test_logs_of_thousands_of_ranks_are_shown(tmp_path: Path) -> None:
    run = RunDirectory(write_run(tmp_path / "run", steps=1))
    for rank in (3, 1500):
        log = run.get_log_file("worker", rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"rank {rank} says this\n")
    shown = [f"[worker {rank}] rank {rank} says this" for rank in (3, 1500)]
    assert [*read_log_lines(Scheduler(run), None, follow=False)] == shown
    assert [*read_log_lines(Scheduler(run), [1500], follow=False)] == shown[1:]


@pytest.mark.parametrize("value", [None, "x", [], {}, 10**400, "nan", float("inf")])
def test_what_is_no_finite_number_is_nan(value: Any) -> None:
    assert math.isnan(parse_number(value))


def test_a_file_that_cannot_be_read_spoils_no_page_but_its_own(tmp_path: Path) -> None:
    whole, damaged, lacking = (write_run(tmp_path / name, steps=2) for name in ("whole", "damaged", "lacking"))
    (damaged / "metrics.jsonl").unlink()
    os.mkfifo(damaged / "metrics.jsonl")
    manifest = json.loads((lacking / "run_manifest.json").read_text())
    del manifest["overrides"]
    write_manifest(lacking / "run_manifest.json", manifest)
    sweep = read_sweep([whole, damaged, lacking])
    assert [record.folder for record in sweep.runs.values()] == [whole]
    assert "metrics.jsonl cannot be read: not a regular file" in sweep.refused["damaged"]
    assert "missing field 'overrides'" in sweep.refused["lacking"]
    assert "missing field" in render_page([tmp_path])
    with pytest.raises(WorldsizeError, match="not a regular file"):
        render_page([damaged])


# ---------------------------------------------------------------- display


def test_names_that_are_markup_are_shown_as_text(text: str) -> None:
    shown = Shown(text)
    assert "script" not in shown.tags
    assert shown.text.count(HOSTILE) >= 4  # a metric, a host, an override, an event
    assert "never-to-be-shown" not in text


def test_the_same_run_always_gives_the_same_page(eventful: Path, text: str) -> None:
    assert render_page([eventful]) == text


def test_charts_take_their_colours_from_the_page(text: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) >= 10
    assert all(re.findall(r"(?:fill|stroke)[=:] ?[\"']?#\w+", chart) == [] for chart in charts)
    assert all("var(--c1)" in chart or "<image" in chart for chart in charts)
    assert all(ElementTree.fromstring(chart).tag == "svg" for chart in charts)
    ids = Shown(text).ids
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("state", ["not started", "running", "killed", "failed", "cut off"])
def test_a_run_is_shown_in_any_state(tmp_path: Path, state: str) -> None:
    unended = {"end_at": None, "exit_code": None}
    attempts = {
        "not started": [],
        "running": [attempt(1, steps=[0, 1], reason="failed"), attempt(2, steps=None, reason="running", **unended)],
        "killed": [attempt(1, steps=None, reason="running", **unended)],
        "failed": [attempt(1, steps=None, reason="failed")],
        "cut off": [attempt(1, steps=[0, 3])],
    }[state]
    run = write_run(tmp_path / "run", steps=3, attempts=attempts)
    if state == "cut off":
        (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-40])
    else:
        (run / "metrics.jsonl").unlink()
    with run_lock(run) if state == "running" else nullcontext():
        shown = Shown(render_page([run]))
    assert {"cut off": "completed"}.get(state, state) in shown.text


def test_the_title_names_recipe_strategy_processes_and_command(tmp_path: Path) -> None:
    options = {"recipe": "digits", "strategy": "fsdp", "cluster": "slurm"}
    words = ["recipe=digits", "note=a b"]
    run = write_run(tmp_path / "one", steps=3, overrides=words, options=options)
    shown = Shown(render_page([run])).text
    assert "digits · fsdp · 4 processes" in shown
    assert "worldsize train recipe=digits 'note=a b'" in shown
    write_run(tmp_path / "two", steps=3, options={**options, "strategy": "ddp"})
    assert "2 runs · digits · 4 processes" in Shown(render_page([tmp_path])).text


def test_the_pointer_shows_the_values_of_all_runs_at_its_place() -> None:
    curves = [StepCurve(name, [1, 2, 3], [scale, 2 * scale, np.nan]) for name, scale in (("a<b", 0.5), ("c", 3.0))]
    (chart,) = lines_chart("Training loss", curves)
    titles = [each.text for each in ElementTree.fromstring(chart.svg).iter("title")]
    assert titles == ["step 1\na<b: 0.5\nc: 3", "step 2\na<b: 1\nc: 6"]


@pytest.mark.parametrize(("last", "is_log"), [(0.011, False), (0.009, True), (0.0, False), (-1.0, False)])
def test_a_loss_over_two_decades_has_a_logarithmic_axis(last: float, is_log: bool) -> None:
    losses = [1.0, math.sqrt(abs(last)) or 0.3, last]
    (chart,) = lines_chart("loss", [StepCurve("", [1, 2, 3], losses)], has_loss_axis=True)
    assert ("Log scale" in chart.note) == is_log
    (path,) = (each.get("d", "") for each in ElementTree.fromstring(chart.svg).iter("path") if each.get("fill"))
    first, second, third = (float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path))
    assert ((second - first) == pytest.approx(third - second, abs=0.2)) == is_log


def test_colours_of_a_heat_map_end_at_the_99th_percentile() -> None:
    seconds = {step: {0: 0.010, 1: 0.012} for step in range(1, 81)}
    seconds[40][1] = 5.0
    (chart,) = heat_map("Step time by rank", seconds, (), "")
    assert "dark: 12 ms (99th percentile) and above" in chart.note
    (image,) = ElementTree.fromstring(chart.svg).iter("image")
    data = base64.b64decode(image.get("href", "").partition("base64,")[2])
    place, rows, width = data.index(b"IDAT"), 2, 80
    (length,) = struct.unpack(">I", data[place - 4 : place])
    pixels = zlib.decompress(data[place + 4 : place + 4 + length])
    assert len(pixels) == rows * (1 + 4 * width)
    upper, lower = (pixels[row * (1 + 4 * width) + 1 :][: 4 * width] for row in range(rows))
    assert {upper[at : at + 4] for at in range(0, 4 * width, 4)} == {bytes((255, 255, 217, 255))}  # rank 0
    assert {lower[at : at + 4] for at in range(0, 4 * width, 4)} == {bytes((8, 29, 88, 255))}
    assert "rank 1, step 40: 5e+03 ms" in [each.text for each in ElementTree.fromstring(chart.svg).iter("title")]


def test_a_search_is_drawn_as_metric_by_value(tmp_path: Path) -> None:
    for rate in ("1e-4", "1e-3", "0.1"):
        words = ["recipe=digits", f"lr={rate}", "optimizer=sgd"]
        write_run(tmp_path / rate, overrides=words, results={"metrics": {"accuracy": float(rate) + 0.5}})
    (chart,) = search_charts(read_sweep(find_runs(tmp_path)))
    assert chart.title == "test accuracy by lr"
    dots = {
        title.text: float(each.get("cx", "nan"))
        for each in ElementTree.fromstring(chart.svg).iter("circle")
        for title in each
    }
    assert list(dots) == ["lr=0.1: 0.6", "lr=1e-3: 0.501", "lr=1e-4: 0.5001"]
    high, middle, low = dots.values()
    assert (high - middle) / (middle - low) == pytest.approx(2.0, abs=0.02)  # decades


@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")
def test_a_browser_shows_the_pages_at_any_width_and_requests_nothing_else(
    eventful: Path, study: Path, tmp_path: Path
) -> None:
    for rate in (1, 2):
        write_run(tmp_path / "sweep" / f"{HOSTILE.replace('/', '')[:5]}{rate}", overrides=[f"lr={rate}"])
    pages = [tmp_path / name for name in ("run.html", "study.html", "sweep.html")]
    for path, folder in zip(pages, (eventful, study, tmp_path / "sweep"), strict=True):
        path.write_text(render_page([folder]), errors="replace")
    backgrounds = set()
    with browser(tmp_path / "profile") as tab:
        for path in pages:
            for theme in ("light", "dark"):
                for width in (1280, 400):
                    tab.show(path, theme=theme, width=width)
                    assert tab.complaints == []
                    assert [url for url in tab.requests if not url.startswith("data:")] == [path.as_uri()]
                    assert tab.evaluate("document.documentElement.scrollWidth") == width
                    assert tab.evaluate("document.querySelectorAll('svg text').length") > 10
                    backgrounds.add((theme, tab.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert len(backgrounds) == 2
    assert len({colour for _, colour in backgrounds}) == 2


# ---------------------------------------------------------------- the commands


def test_a_run_that_was_trained_is_reported_and_watched(
    train: Any, command: Any, tmp_path: Path, environment_without_wandb: dict[str, str]
) -> None:
    run = train("recipe=digits", "steps=6", "cluster.processes=2", "cluster.threads=1", "log_every=2")
    environment = {**environment_without_wandb, "COLUMNS": "200"}
    done = command("report", str(run.folder), cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(run.folder / "report.html")
    shown = Shown((run.folder / "report.html").read_text())
    accuracy = run.json("result.json")["metrics"]["accuracy"]
    assert f"{accuracy:.4g}" in shown.text
    assert "data groups" in shown.text
    watched = command("watch", str(run.folder), cwd=tmp_path, environment=environment)
    assert watched.returncode == 0, watched.stderr
    assert "attempt 1: completed" in watched.stdout
    assert f"step 6  test: accuracy {accuracy:.4f}" in watched.stdout


def test_only_the_page_in_a_run_folder_replaces_a_link(tmp_path: Path) -> None:
    run, target = write_run(tmp_path / "run", steps=1), tmp_path / "target"
    for link in (run / "report.html", tmp_path / "output"):  # an output may be /dev/stdout
        target.write_bytes(b"")
        link.symlink_to(target)
        write_report([run], link if link.name == "output" else None)
        assert link.is_symlink() == (target.stat().st_size > 0) == (link.name == "output")


def test_a_folder_without_runs_is_refused(command: Any, tmp_path: Path) -> None:
    done = command("report", str(tmp_path), cwd=tmp_path, environment={})
    assert done.returncode == 2
    assert "no runs found in" in done.stderr
