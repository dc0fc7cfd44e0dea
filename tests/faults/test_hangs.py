"""A run that hangs reports each process's wait and location."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.observe.run_folders import write_run
from tests.support.runs import Train
from tests.support.waiting import wait_until
from worldsize.collectives import group
from worldsize.collectives.group import PEER_WAIT
from worldsize.observe.report.page import render_page
from worldsize.observe.report.read import read_run
from worldsize.observe.report.timeline import list_hangs
from worldsize.record.flight import collectives_file, flight_file, hang_report, hung_processes
from worldsize.worker import flight
from worldsize.worker.flight import hangs_watched

pytestmark = pytest.mark.heavy

HANGS = (
    *("recipe=digits", "recipe.width=4", "steps=8", "cluster.processes=2", "cluster.timeout=4", "launcher.grace=1"),
    *("log_every=1", "faults=[{action: slow, rank: 1, step: 4, seconds: 60}]"),
)


def test_the_error_and_the_report_of_a_hang_name_ranks_collectives_and_stacks(train: Train) -> None:
    """Rank 1 sleeps in step 4 in a live process; rank 0 waits for it in vain."""
    run = train(*HANGS, "cluster.debug=true")
    assert run.code == 1
    assert run.error.startswith("worker 1 failed at step 4:\ndid not respond at step 4")
    told = run.error.partition("when the run hung:")[2].splitlines()
    places = {line.split()[0]: place for place, line in enumerate(told) if line.startswith("  worker")}
    first, second = (told[places[name] :] for name in ("worker_00000", "worker_00001"))
    assert "waits in gloo:all" in first[0]
    assert "is not in a collective; last: gloo:" in second[0]
    assert any("group.py" in line for line in first[1:5])
    assert any("faults.py" in line for line in second[1:5])
    (counts,) = re.findall(r"collectives of group 0: (\d+) started, (\d+) completed by worker_00000; (.*)", run.error)
    began, completed = map(int, counts[:2])  # one more may not be marked as completed yet
    assert began - completed in (1, 2)
    assert counts[2].startswith(f"{began - 1} started, ")
    assert counts[2].endswith(" completed by worker_00001")
    assert run.folder is not None
    section = render_page([run.folder]).partition("<h2>Hangs</h2>")[2].partition("<h2>")[0]
    shown = " ".join(re.sub(r"<[^>]*>", " ", section).split())
    assert shown.startswith("attempt 1")
    waits = r"worker rank 1 is not in a collective; last: gloo:.*faults\.py.*worker rank 0 waits in gloo:all"
    assert re.search(waits, shown), shown


def test_a_gang_that_heals_goes_on_and_keeps_what_the_process_wrote_that_hung(train: Train) -> None:
    run = train(*HANGS, "strategy.on_failure=heal")
    assert run.code == 0, run.error
    assert run.folder is not None
    first, second = hung_processes(run.folder / "logs")
    assert (first.rank, first.waits, second.rank, second.waits) == (0, True, 1, False)
    assert "faults.py" in second.stack[-1]
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert attempt["transport"]["ranks"] == {"socket": 2}  # the only membership where two trained


def test_a_parameter_server_goes_on_without_a_worker_that_hangs_and_keeps_where_it_was(train: Train) -> None:
    slow = "faults=[{action: slow, rank: 2, point: 'push:begin', step: 3, seconds: 60}]"
    servers = ("strategy=parameter_server", "cluster.processes=3", "cluster.timeout=6", "logger=none")
    run = train(*HANGS[:3], *servers, "launcher.grace=1", slow)
    assert run.code == 0, run.error
    assert "still waiting for" in run.output + run.error
    assert "retired worker-1: lost the connection (the peer made no progress for 6 s)" in run.output + run.error
    assert run.folder is not None
    server, first, second = hung_processes(run.folder / "logs")
    assert (server.doing, first.doing) == ("waits for the workers", "waits for the message TASK from a peer")
    assert (server.waits, first.waits, second.waits) == (True, True, False)
    assert "faults.py" in second.stack[-1]


def test_a_run_that_is_debugged_has_the_same_bits(train: Train) -> None:
    options = ("recipe=digits", "recipe.width=4", "steps=3", "cluster.processes=2")
    plain, checked = train(*options), train(*options, "cluster.debug=true", "strategy.find_unused_parameters=true")
    assert (plain.code, checked.code) == (0, 0), checked.error
    assert plain.json("result.json")["state_digest"] == checked.json("result.json")["state_digest"]
    assert "gloo on lo\n" in checked.error
    assert re.search(
        r"collectives of group 0: (\d+) started, \1 completed by worker_00000, worker_00001\n", checked.error
    )
    assert re.search(
        r"warning from worker_00000 \(1\), worker_00001 \(1\): reducer.cpp:\d+ Warning: find_unused_parameters",
        checked.error,
    )


@pytest.mark.parametrize(("pending", "completed"), [((), 20), ((20,), 19), ((18, 20), 17)])
def test_collectives_that_end_in_another_order_are_counted_once_all_have_ended(
    monkeypatch: pytest.MonkeyPatch, pending: tuple[int, ...], completed: int
) -> None:
    """Torch's last completed one is number 18 here: its thread was the last to record its end."""
    entries = [
        {"pg_id": 0, "collective_seq_id": number, "retired": number not in pending, "is_p2p": False}
        for number in range(1, 21)
    ]
    status = {"0": {"last_enqueued_collective": "20", "last_completed_collective": "18"}}
    monkeypatch.setattr(flight, "_read_flight_recorder", lambda: {"entries": entries, "pg_status": status})
    assert flight._count_collectives() == {"0": [20, completed]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ""),
        ("[1]", ""),
        ("{" * 3000, ""),
        ("{}", "worker_00000 has not started a collective"),
        (json.dumps({"waiting": [3], "stack": 4}), "worker_00000 waits in an unknown collective"),
        (json.dumps({"waiting": [], "last": {"name": "\x1b[31m"}, "stack": ["a\nb"]}), r"last: \x1b[31m number"),
        (json.dumps({"stack": [1] * 600_000}), ""),
        (json.dumps({"awaited": {"what": "the message\n"}}), r"worker_00000 waits for the message\n"),
        (json.dumps({"awaited": [1]}), "worker_00000 has not started a collective"),
    ],
)
def test_files_that_are_damaged_or_hostile_are_left_out_or_escaped(tmp_path: Path, text: str, told: str) -> None:
    log = tmp_path / "worker_00000.log"
    flight_file(log).write_text(text)
    assert told in hang_report([log, tmp_path / "absent.log"])
    assert bool(told) == bool(hang_report([log]))
    assert [each.rank for each in hung_processes(tmp_path)] == [0] * bool(told)


def test_of_many_that_hang_the_one_for_which_they_wait_is_told(tmp_path: Path) -> None:
    logs = [tmp_path / f"worker_{rank:05d}.log" for rank in range(40)]
    for log in logs:
        flight_file(log).write_text('{"waiting": [{"name": "gloo:all_reduce"}]}')
    flight_file(logs[33]).write_text('{"stack": ["data.py, line 7, in read"]}')
    first, second, third, *_, last = hang_report(logs).splitlines()[1:]
    assert (first, second) == ("  worker_00033 has not started a collective", "    data.py, line 7, in read")
    assert third.startswith("  worker_00000 waits in gloo:all_reduce")
    assert last == "  and 24 more"


def test_what_an_earlier_process_wrote_is_kept_and_not_taken_for_the_present(tmp_path: Path) -> None:
    """The second and the third process belong to one attempt, since an attempt may restart a process."""
    log = tmp_path / "worker_00003.log"
    for attempt in (1, 2, 2, 3):
        asked = tmp_path / f"hang_{attempt}"
        collectives_file(log).write_text('{"0": [3, 3]}')
        with hangs_watched(log, asked, attempt=attempt, timeout=2.0):
            assert not flight_file(log).exists()
            assert not collectives_file(log).exists()
            if attempt < 3:
                asked.touch()
                while not flight_file(log).exists():
                    threading.Event().wait(0.02)
    assert hang_report([log]) == ""
    written = [(each.attempt, each.rank, each.waits) for each in hung_processes(tmp_path)]
    assert written == [(1, 3, False), (2, 3, False), (2, 3, False)]


def test_two_processes_of_a_rank_that_did_the_same_are_one_row_of_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / "logs").mkdir(exist_ok=True)
    for suffix, rank in (("", 1), ("_before_1", 1), ("", 2)):
        (run / "logs" / f"worker_{rank:05d}.flight{suffix}.json").write_text('{"attempt": 2}')
    (hang,) = list_hangs(read_run(run))
    assert [row.who for row in hang.rows] == ["worker ranks 1-2"]


def test_a_process_that_outlives_a_hang_writes_of_the_next_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a message, then others query it, then it waits for a different message; each is written once."""
    log, asked = tmp_path / "server_00000.log", tmp_path / "hang_1"
    now, looks = [time.time()], [0]
    clock = SimpleNamespace(time_ns=lambda: int(now[0] * 1e9), monotonic=lambda: now[0], sleep=time.sleep)

    def look() -> list[Any]:
        looks[0] += 1
        return []

    for module in (flight, group):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(flight, "_SLOWEST", 0.01)
    monkeypatch.setattr(flight, "_collectives", look)

    def await_record(number: int) -> None:
        seen = looks[0]  # it checks again, and writes no other
        wait_until(lambda: len(hung_processes(tmp_path)) >= number and looks[0] >= seen + 3)
        assert len(hung_processes(tmp_path)) == number

    with hangs_watched(log, asked, attempt=1, timeout=1000.0):
        with PEER_WAIT.name_wait("work"):
            now[0] += 700
            await_record(1)
            now[0] += 700  # the same hang
            await_record(1)
        asked.touch()
        await_record(2)
        now[0] += 10
        asked.touch()  # by a second process, because of the same hang
        await_record(2)
        with PEER_WAIT.name_wait("an answer"):
            now[0] += 700
            await_record(3)
    names = ["server_00000.flight_before_1.json", "server_00000.flight_before_2.json", "server_00000.flight.json"]
    waits = [json.loads((tmp_path / name).read_text())["awaited"] for name in names]
    assert [each["what"] if each else None for each in waits] == ["work", None, "an answer"]
    assert waits[2]["seconds"] == pytest.approx(700)
