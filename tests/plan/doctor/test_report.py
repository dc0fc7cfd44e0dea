"""A report is read from a job's log, although lines of other hosts and arbitrary text may be in it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from worldsize.core import Link
from worldsize.plan.doctor.report import Check, Pair, Report, report_in

REPORT = Report(
    [Check("clock", "h2", False, "+9.9 s from h1", "Synchronize the clock with NTP")],
    {"network": Link(1e9, 1e-4, 2e-4, 0.5)},
    [Pair("h1", "h2", Link(1e9, 1e-4))],
    [{"host": "h1"}],
)


def test_a_report_is_found_behind_the_names_that_launchers_put_before_lines() -> None:
    line = REPORT.format_log_line()
    for log in (f"[pod/x-0/worldsize] {line}\n[pod/x-1/worldsize] over", f"(worldsize, pid=12) {line}\n✓ Job finished"):
        assert report_in(log) == REPORT
    assert report_in(f"{REPORT.format_log_line()[:-20]}\n") is None
    assert report_in(f"{line}\nworldsize doctor found: [1, 2]\nworldsize doctor found: {{}}") == REPORT
    assert report_in("") is None


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("checks", {"check": "clock", "host": "h", "ok": "no", "detail": "late"}),
        ("checks", {"check": "clock", "host": 3, "ok": True, "detail": "late"}),
        ("checks", {"check": "clock", "host": "h", "ok": 1, "detail": "late"}),
        ("checks", {"check": "clock", "host": "h", "ok": True, "detail": ["late"]}),
        ("checks", {"check": "clock"}),
        ("pairs", {"from": "a", "to": 2, "bandwidth": 1.0, "latency": 1.0, "gap": 0.0, "incast": 1.0}),
        ("pairs", {"from": "a", "to": "b", "bandwidth": "1", "latency": 1.0, "gap": 0.0, "incast": 1.0}),
        ("hosts", "h"),
    ],
)
def test_a_report_of_wrong_types_is_refused(part: str, wrong: Any) -> None:
    facts = REPORT.to_json()
    assert Report.from_json(facts) == REPORT
    with pytest.raises(ValueError, match=r"wrong type|not a worldsize doctor report"):
        Report.from_json({**facts, part: [*facts[part], wrong]})


@pytest.mark.parametrize("ok", [True, False])
def test_names_that_look_like_markup_or_steer_a_terminal_are_shown_as_they_are(ok: bool) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(Report([Check("x[/red]", "h[/]", ok, "[bold]a\x1b[31m", "do[/] it")]).build_table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(text in shown for text in ("x[/red]", "h[/]", r"[bold]a\x1b[31m"))
    assert "do[/] it" in shown
    assert ("!" if ok else "✗") in shown
    assert "\x1b" not in shown
