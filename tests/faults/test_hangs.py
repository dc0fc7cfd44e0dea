"""A run that hangs says which rank waits in which collective, and where each of them is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Train
from worldsize.records.flight import flight_file, hang_report


def test_the_error_of_a_hang_names_ranks_collectives_and_stacks(train: Train) -> None:
    """Rank 1 sleeps in step 4, in a process that is alive; rank 0 waits for it in vain."""
    run = train(
        *("recipe=digits", "recipe.width=4", "steps=8", "cluster.processes=2", "cluster.timeout=4", "launcher.grace=1"),
        *("log_every=1", "cluster.debug=true", "faults=[{action: slow, rank: 1, step: 4, seconds: 60}]"),
    )
    assert run.code == 1
    assert run.error.startswith("worker 1 failed at step 4:\ndid not answer at step 4")
    told = run.error.partition("when the gang hung:")[2].splitlines()
    places = {line.split()[0]: place for place, line in enumerate(told) if line.startswith("  worker")}
    first, second = (told[places[name] :] for name in ("worker_00000", "worker_00001"))
    assert "waits in gloo:all" in first[0]
    assert "waits in no collective; it began gloo:" in second[0]
    assert any("interruption.py" in line for line in first[1:5])
    assert any("faults.py" in line for line in second[1:5])
    (counts,) = re.findall(r"collectives of group 0: (\d+) begun, (\d+) completed by worker_00000; (.*)", run.error)
    assert int(counts[0]) == int(counts[1]) + 1
    assert counts[2] == f"{counts[1]} begun, {counts[1]} completed by worker_00001"


def test_a_run_that_is_debugged_has_the_same_bits(train: Train) -> None:
    options = ("recipe=digits", "recipe.width=4", "steps=3", "cluster.processes=2")
    plain, checked = train(*options), train(*options, "cluster.debug=true", "strategy.find_unused_parameters=true")
    assert (plain.code, checked.code) == (0, 0), checked.error
    assert plain.json("result.json")["state_digest"] == checked.json("result.json")["state_digest"]
    assert "gloo by lo\n" in checked.error
    assert re.search(
        r"collectives of group 0: (\d+) begun, \1 completed by worker_00000, worker_00001\n", checked.error
    )
    assert re.search(
        r"warned by worker_00000 \(1\), worker_00001 \(1\): reducer.cpp:\d+ Warning: find_unused_parameters",
        checked.error,
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ""),
        ("[1]", ""),
        ("{" * 3000, ""),
        ("{}", "worker_00000 began no collective"),
        (json.dumps({"waiting": [3], "stack": 4}), "worker_00000 waits in an unknown one"),
        (json.dumps({"waiting": [], "last": {"name": "\x1b[31m"}, "stack": ["a\nb"]}), r"began \x1b[31m number"),
        (json.dumps({"stack": [1] * 600_000}), ""),
    ],
)
def test_files_that_are_damaged_or_hostile_are_left_out_or_escaped(tmp_path: Path, text: str, told: str) -> None:
    log = tmp_path / "worker_00000.log"
    flight_file(log).write_text(text)
    assert told in hang_report([log, tmp_path / "absent.log"])
    assert bool(told) == bool(hang_report([log]))
