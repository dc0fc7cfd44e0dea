"""A report is read from the log of a job, whose lines may be of other hosts and of anything."""

from __future__ import annotations

from worldsize.core import Link
from worldsize.planning.doctor.report import Check, Pair, Report, report_in

REPORT = Report(
    [Check("clock", "h2", False, "+9.9 s against h1", "Have it set by NTP there")],
    {"network": Link(1e9, 1e-4, 2e-4, 0.5)},
    [Pair("h1", "h2", Link(1e9, 1e-4))],
    [{"host": "h1"}],
)


def test_a_report_is_found_behind_the_names_that_launchers_put_before_lines() -> None:
    line = REPORT.as_line()
    for log in (f"[pod/x-0/worldsize] {line}\n[pod/x-1/worldsize] over", f"(worldsize, pid=12) {line}\n✓ Job finished"):
        assert report_in(log) == REPORT
    assert report_in(f"{REPORT.as_line()[:-20]}\n") is None
    assert report_in(f"{line}\nworldsize doctor found: [1, 2]\nworldsize doctor found: {{}}") == REPORT
    assert report_in("") is None
