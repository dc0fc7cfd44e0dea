"""Files of JSON lines are read while they grow, however damaged or long they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from worldsize.core import RunEnded, RunStarted
from worldsize.observe.progress import Tail
from worldsize.observe.timing import Timing
from worldsize.record.json_lines import JsonRows, parse_row
from worldsize.record.metrics import MetricsFile, is_timing, last_metrics, metric_rows, metrics_digest, truncate_metrics
from worldsize.record.run_directory import RunDirectory
from worldsize.strict_json import parse_strict_json

STEP = {"event": "step", "samples": 8, "samples_per_second": 9.0, "loss": "nan", "step_seconds": [0.1]}


def write_metrics(path: Path, steps: int) -> list[str]:
    """Write a file of steps, with an evaluation after every tenth."""
    lines = []
    for step in range(1, steps + 1):
        lines.append(json.dumps({**STEP, "step": step}))
        if step % 10 == 0:
            lines.append(json.dumps({"event": "evaluation", "step": step, "metrics": {"accuracy": 0.5}}))
    path.write_text("".join(f"{line}\n" for line in lines))
    return lines


@pytest.mark.parametrize(
    "text",
    [
        *("NaN", "[1e400]", "-Infinity", "", "x" * 200, b"\xff"),
        *("[" * 100_000, '{"a":' * 100_000, "[" * 102 + "]" * 102, '{"a":[' * 60 + "]}" * 60),
        *("1" + "0" * 400 + ".0", "1" * 250 + "e99", "[" + "1" * 400 + "]", "-" + "9" * 309),
    ],
)
def test_what_is_no_strict_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="."):
        parse_strict_json(text, at_most=100 if text == "x" * 200 else 1 << 20)


def test_large_exponents_that_are_finite_are_read() -> None:
    assert parse_strict_json('[1e-400, 2.5e+100, 1, "1e400"]') == [0.0, 2.5e100, 1, "1e400"]
    assert parse_strict_json("9" * 308) == 10**308 - 1


def test_our_own_checkpoints_may_say_nan() -> None:
    """A metric may be NaN, and Python's JSON writes it as NaN."""
    assert math.isnan(parse_strict_json('{"loss": NaN}', finite=False)["loss"])


def test_many_brackets_are_not_deep() -> None:
    assert parse_strict_json(json.dumps([[[]]] * 200)) == [[[]]] * 200
    assert parse_strict_json("[" * 150 + "]" * 150, deepest=200)


def test_a_line_that_was_cut_off_or_is_no_object_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'{"step": 1}\nnull\n\xff\n{"x": NaN}\n{"step": 2}\n{"st')
    rows = JsonRows(tmp_path / "file")
    assert (list(rows), rows.damaged) == ([{"step": 1}, {"step": 2}], 3)
    assert list(JsonRows(tmp_path / "absent")) == []


def test_a_long_file_is_thinned_but_for_evaluations_and_its_end(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.jsonl", 1001)
    rows = metric_rows(tmp_path / "metrics.jsonl", at_most=50)
    read = list(rows)
    assert [row["step"] for row in read if row["event"] == "evaluation"] == list(range(10, 1001, 10))
    steps = [row["step"] for row in read if row["event"] == "step"]
    assert (steps[0], steps[-1], rows.every) == (1, 1001, 23)
    assert len(steps) <= 52


def test_damage_among_lines_that_are_not_parsed_is_counted_too(tmp_path: Path) -> None:
    lines = write_metrics(tmp_path / "metrics.jsonl", 1000)
    lines[501] = "torn"
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    rows = metric_rows(tmp_path / "metrics.jsonl", at_most=50)
    list(rows)
    assert rows.damaged == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"step": 0},
        {"samples": 0},
        {"samples_per_second": "inf"},
        {"samples_per_second": 0},
        {"loss": None},
        {"step_seconds": ["x"]},
        {"step_seconds": 5},
    ],
)
def test_a_step_that_no_reader_can_use_is_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({**STEP, "step": 1}) + "\n" + json.dumps({**STEP, "step": 2, **damage}) + "\n")
    rows = metric_rows(path)
    assert ([row["step"] for row in rows], rows.damaged) == ([1], 1)


def test_a_line_that_is_too_long_is_passed_over_like_any_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worldsize.record.json_lines._LONGEST", 1000)
    path = tmp_path / "metrics.jsonl"
    lines = [f"{line}\n".encode() for line in write_metrics(path, 30)]
    path.write_bytes(b"".join([*lines[:5], b'{"x": "' + b"y" * 2500 + b'"}\n', *lines[5:], b"z" * 2500]))
    rows = metric_rows(path)
    assert (len(list(rows)), rows.damaged) == (33, 1)
    tail = Tail(path, from_start=True)
    assert len(list(tail.read())) == 34
    assert list(tail.read()) == []
    truncate_metrics(path, 20)
    assert path.read_bytes() == b"".join(lines[:22])


def test_a_resumed_run_keeps_the_times_of_the_steps_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "timing" / "worker_00000.jsonl"
    timing = Timing(RunDirectory(tmp_path), rank=0)
    for step in (10, 20, 30):
        timing.write_line(step, step_seconds=0.1, data_seconds=0.0)
    timing(RunEnded(30, "preempted"))
    with path.open("a") as file:
        file.write('{"step": 40, "step_se')
    timing = Timing(RunDirectory(tmp_path), rank=0)
    timing(RunStarted("run", 100, 20, True))
    timing.write_line(30, step_seconds=0.2)
    timing(RunEnded(30, "completed"))
    rows = JsonRows(path, is_valid=is_timing)
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert (rows.damaged, caplog.text) == (0, "")


def test_an_attempt_parses_the_metrics_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, 100)
    truncate_metrics(path, 100)  # like the launching process
    parsed: list[bytes] = []

    def counted(line: bytes) -> dict[str, Any] | None:
        parsed.append(line)
        return parse_row(line)

    for name in ("metrics", "json_lines"):
        monkeypatch.setattr(f"worldsize.record.{name}.parse_row", counted)
    begin(path, 100)
    assert len(parsed) == 1
    assert last_metrics(path) == {"accuracy": 0.5}
    assert len(parsed) == 11


@pytest.mark.parametrize(
    ("first", "evaluated", "last"),
    [(100, False, ("step", 100)), (95, True, ("step", 95)), (90, True, ("evaluation", 90))],
)
def test_an_attempt_drops_what_another_one_wrote_meanwhile(
    tmp_path: Path, first: int, evaluated: bool, last: tuple[str, int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, 100)
    begin(path, first, evaluated=evaluated)
    *_, row = metric_rows(path)
    assert (row["event"], row["step"]) == last
    with path.open("a") as file:
        file.write('{"event": "st')
    begin(path, first)
    assert path.read_bytes().endswith(b"}\n")


def begin(path: Path, first: int, *, evaluated: bool = True) -> None:
    """Begin to write like a rank 0 that continues after step ``first``."""
    listener = MetricsFile(path)
    listener(RunStarted("run", 200, first, evaluated))
    listener(RunEnded(first, "completed"))


@pytest.mark.parametrize(
    "damage", [b"torn\n", b"\xff\xfe\n", b"[]\n", b'{"event": "step", "step": "x"}\n', b"[" * 5000 + b"\n"]
)
def test_a_damaged_line_keeps_no_run_from_being_resumed(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f"{line}\n".encode() for line in write_metrics(path, 30)]
    path.write_bytes(b"".join([*lines[:5], damage, *lines[5:], b'{"event": "st']))
    truncate_metrics(path, 20)
    assert path.read_bytes() == b"".join(lines[:22])
    assert not path.with_name(".metrics.jsonl").exists()


def test_a_file_that_needs_no_rewinding_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, 20)
    before = path.stat().st_ino
    truncate_metrics(path, 20)
    assert path.stat().st_ino == before
    truncate_metrics(path, 20, evaluated=False)
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "step"


def test_the_digest_of_metrics_passes_over_damage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, 20)
    digest = metrics_digest(path)
    path.write_bytes(b"torn\n" + path.read_bytes() + b'{"ev')
    assert metrics_digest(path) == digest
