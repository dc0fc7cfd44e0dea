"""Traces of selected steps can be read back as JSON for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from worldsize.observe.timing import trace_steps

CPU = torch.device("cpu")


def names(path: Path) -> set[str]:
    trace: dict[str, Any] = json.loads(path.read_text())
    for event in trace["traceEvents"]:
        assert event["ph"] == "M" or isinstance(event["ts"], float | int)
    return {str(event["name"]) for event in trace["traceEvents"]}


def steps(names: set[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("step "))


def data() -> Iterator[str]:
    for number in range(1, 100):
        torch.full((3,), number).cumsum(0)
        yield f"batch {number}"


def test_exactly_the_chosen_steps_are_traced(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    with closing(trace_steps(data(), path, first=0, span=(2, 3), device=CPU)) as batches:
        seen = []
        for batch in islice(batches, 5):
            seen.append(batch)
            torch.ones(2).exp()
    assert seen == [f"batch {number}" for number in range(1, 6)]
    traced_names = names(path)
    assert steps(traced_names) == ["step 2", "step 3"]
    assert {"aten::cumsum", "aten::exp"} <= traced_names


def test_a_trace_on_the_cpu_has_what_was_allocated_and_freed(tmp_path: Path) -> None:
    path, count = tmp_path / "worker.json", 1 << 18
    with closing(trace_steps(repeat(None), path, first=0, span=(1, 1), device=CPU)) as batches:
        for _ in islice(batches, 2):
            torch.full((count,), 1.0)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    changes = [event["args"]["Bytes"] for event in events]
    assert {4 * count, -4 * count} <= set(changes)
    before = [event["args"]["Total Allocated"] for event in sorted(events, key=lambda event: float(event["ts"]))]
    assert max(before) - min(before) >= 4 * count


@pytest.mark.parametrize(("first", "span", "expected"), [(0, (3, 9), ["step 3", "step 4"]), (5, (2, 7), ["step 6"])])
def test_a_run_that_ends_or_resumes_within_the_chosen_steps_traces_those_it_takes(
    tmp_path: Path, first: int, span: tuple[int, int], expected: list[str]
) -> None:
    path = tmp_path / "worker.json"
    with closing(trace_steps(repeat(None), path, first=first, span=span, device=CPU)) as batches:
        for _ in islice(batches, 4 if first == 0 else 1):
            torch.ones(2).exp()
    assert steps(names(path)) == expected


def test_a_run_that_resumes_after_the_chosen_steps_traces_nothing(tmp_path: Path) -> None:
    with closing(trace_steps(repeat(None), tmp_path / "worker.json", first=5, span=(2, 4), device=CPU)) as batches:
        list(islice(batches, 3))
    assert not (tmp_path / "worker.json").exists()
