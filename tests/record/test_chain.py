"""The hash chain of a run: its lines, what a resume keeps, and what an edited line reveals."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from tests.observe.run_folders import write_run
from worldsize.checkpoint.format import folder_name
from worldsize.core import CheckpointSaved, Evaluated, Event, GradientsAudited, RunEnded, RunStarted, StepDone
from worldsize.errors import WorldsizeError
from worldsize.record.chain import BrokenChainError, ChainFile, read_chain, seal_chain
from worldsize.record.chain_check import Coverage, Interval, choose_intervals, compare_chains
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import read_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def step(number: int, loss: float = 0.5) -> StepDone:
    losses, indices = f"losses {loss}", f"indices {number}"
    return StepDone(
        number, 8 * number, loss, 0.1, 1.5, 0, 0.2, (0.1,), 80.0, losses_sha256=losses, indices_sha256=indices
    )


def save(run: RunDirectory, number: int) -> CheckpointSaved:
    """Write the two files of a checkpoint that identify it."""
    folder = run.checkpoints / folder_name(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(f"manifest {number}")
    (folder / "COMPLETE").write_text(f"{hash_text(f'manifest {number}')}\n")
    return CheckpointSaved(number, folder)


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(run: RunDirectory, *events: Event) -> list[str]:
    chain = ChainFile(run)
    for event in (*events, RunEnded(0, "preempted")):
        chain(event)
    return run.chain.read_text().splitlines()


def test_each_line_contains_the_digest_of_the_previous_line(run: RunDirectory) -> None:
    started, audited, evaluated = (
        RunStarted(run.id, 4),
        GradientsAudited(1, "0f"),
        Evaluated(2, {"error": float("nan")}),
    )
    lines = write(run, started, audited, step(1), step(2), evaluated, save(run, 2))
    rows = [json.loads(line) for line in lines]
    assert [row["previous"] for row in rows] == ["", *map(hash_text, lines[:-1])]
    logged = {"event": "step", "step": 1, "samples": 8, "loss": 0.5, "lr": 0.1, "grad_norm": 1.5, "skipped": 0}
    assert [{key: value for key, value in row.items() if key != "previous"} for row in rows] == [
        {"run": run.id},
        {"step": 1, "audited": "0f"},
        {"step": 1, "logged": logged, "losses": "losses 0.5", "indices": "indices 1"},
        {"step": 2, "logged": {**logged, "step": 2, "samples": 16}, "losses": "losses 0.5", "indices": "indices 2"},
        {"step": 2, "evaluated": {"error": "nan"}},
        {"step": 2, "checkpoint": hash_text("manifest 2")},
    ]


def test_a_resumed_run_has_the_chain_of_an_uninterrupted_one(run: RunDirectory, tmp_path: Path) -> None:
    whole = RunDirectory(tmp_path / "whole" / run.id)
    whole.path.mkdir(parents=True)
    begins: list[Event] = [RunStarted(run.id, 6), step(1), step(2), Evaluated(2, {"error": 0.1})]
    expected = write(whole, *begins, save(whole, 2), step(3), step(4))
    # the process is killed while it writes a line; the checkpoint's line, written late, is lost
    write(run, *begins, step(3, loss=0.7), Evaluated(3, {"error": 0.3}))
    with run.chain.open("a") as file:
        file.write('{"previous": "')
    save(run, 2)
    resumed = RunStarted(run.id, 6, first=2)
    assert write(run, resumed, step(3), step(4)) == expected
    assert write(run, RunStarted(run.id, 6, first=4), step(4), Evaluated(2, {})) == expected, "written twice"


def test_checkpoints_whose_lines_were_lost_with_a_process_are_added(run: RunDirectory) -> None:
    write(run, RunStarted(run.id, 9), step(1), step(2), step(3))
    for number in (2, 3):
        save(run, number)
    for line in write(run, RunStarted(run.id, 9, first=3), step(4))[-3:-1]:
        assert json.loads(line)["checkpoint"] in (hash_text("manifest 2"), hash_text("manifest 3"))
    save(run, 4)
    sealed = seal_chain(run)
    lines = run.chain.read_text().splitlines()
    assert json.loads(lines[-1]) == {"previous": hash_text(lines[-2]), "step": 4, "checkpoint": hash_text("manifest 4")}
    assert sealed == {"head": hash_text(lines[-1]), "lines": len(lines)}
    assert seal_chain(run) == sealed
    assert len(list(read_chain(run.chain))) == len(lines)


def test_the_first_nonfinite_loss_may_be_of_a_step_before_the_interval(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other")
    other.path.mkdir()
    recorded, same = replace(step(4, math.nan), losses_sha256="x"), replace(step(4, 0.5), losses_sha256="x")
    write(run, RunStarted(run.id, 9), step(2), recorded, step(6, math.nan))
    write(other, RunStarted("other", 9), step(2), same, step(6, 0.5))
    assert compare_chains(run.chain, other.chain, first=3, last=4) is None
    assert compare_chains(run.chain, other.chain, first=3, last=6) is not None
    write(run, RunStarted(run.id, 9, first=6), step(8))
    with pytest.raises(WorldsizeError, match=r"the repetition ended before step 8\. Audit the run again"):
        compare_chains(run.chain, other.chain, first=3, last=8)


@pytest.mark.parametrize(
    "line",
    [
        '{"previous": "PREVIOUS", "step": "3", "audited": "0f"}',
        '{"previous": "PREVIOUS", "step": true, "audited": "0f"}',
        '{"previous": "PREVIOUS", "step": 3, "audited": "0f", "evaluated": {}}',
        '{"previous": "PREVIOUS", "step": 3, "audited": "0f", "more": 1}',
        '{"previous": "PREVIOUS", "step": 3, "logged": {}}',
        '{"previous": "PREVIOUS", "step": 3}',
        "[]",
        '{"previous": "PREVIOUS", "step": 3, "audited": ',
        "\x00",
    ],
)
def test_damaged_lines_are_named(line: str, run: RunDirectory) -> None:
    lines = write(run, RunStarted(run.id, 9), step(1))
    with run.chain.open("a") as file:
        file.write(line.replace("PREVIOUS", hash_text(lines[-1])) + "\n")
    with pytest.raises(BrokenChainError, match="line 3 of .* is damaged"):
        list(read_chain(run.chain))


def test_an_evaluation_to_be_repeated_is_removed(run: RunDirectory) -> None:
    write(run, RunStarted(run.id, 6), step(2), Evaluated(2, {"error": 0.1}))
    lines = write(run, RunStarted(run.id, 6, first=2, evaluated=False), Evaluated(2, {"error": 0.2}))
    assert [json.loads(line).get("evaluated") for line in lines] == [None, None, {"error": 0.2}]


def test_an_edited_line_is_found_even_after_the_run_was_resumed(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    write(run, RunStarted(run.id, 6), step(1), step(2), step(3))
    run.chain.write_text(run.chain.read_text().replace('"loss": 0.5', '"loss": 0.4', 1))
    with pytest.raises(BrokenChainError, match="line 3 of .* does not contain the digest of the previous line"):
        list(read_chain(run.chain))
    with caplog.at_level(logging.WARNING):
        lines = write(run, RunStarted(run.id, 6, first=3), step(4))
    assert "`worldsize audit` will report this" in caplog.text
    assert json.loads(lines[-1])["previous"] == hash_text(lines[-2])
    with pytest.raises(BrokenChainError, match="line 3"):
        list(read_chain(run.chain))


def test_chains_are_compared_in_the_repeated_steps_only(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other")
    other.path.mkdir()
    audited = GradientsAudited(3, "0f")
    write(run, RunStarted(run.id, 6), step(1), step(2), audited, step(3), Evaluated(3, {"error": 0.1}), step(4))
    write(other, RunStarted("other", 6), step(1, 0.7), step(2), step(3), Evaluated(3, {"error": 0.2}), step(4, 0.7))
    assert compare_chains(run.chain, other.chain, first=1, last=2) is None
    found = compare_chains(run.chain, other.chain, first=1, last=4)
    assert found is not None
    assert (found.step, found.what, found.recorded, found.repeated) == (3, "evaluated.error", "0.1", "0.2")
    missing = compare_chains(run.chain, other.chain, first=3, last=6)
    assert missing is not None
    assert missing.step == 4


def test_intervals_are_reached_from_the_newest_kept_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(write_run(tmp_path / "run", ranks=1, steps=1))
    saves = [save(run, number) for number in (10, 20, 30, 40, 50)]
    write(run, RunStarted(run.id, 60), step(1), *saves, step(57))
    for number in (10, 20, 40):
        (run.checkpoints / folder_name(number)).rename(run.path / str(number))
    coverage = choose_intervals(read_run(run.path), samples=9, longest=None, seed=1)
    bounds = [(each.first, each.last, each.start) for each in coverage.intervals]
    assert bounds == [(0, 10, 0), (10, 20, 0), (20, 30, 0), (30, 40, 30), (40, 50, 30), (50, 57, 50)]
    assert [each.first for each in coverage.chosen] == [0, 30, 50]
    assert coverage.list_stretches() == [(0, 10), (30, 40), (50, 57)]
    assert coverage.unreached_share == pytest.approx(30 / 57)
    farther = choose_intervals(read_run(run.path), samples=9, longest=20, seed=1)
    assert farther.list_stretches() == [(0, 20), (30, 50), (50, 57)]
    samples = [choose_intervals(read_run(run.path), samples=1, longest=None, seed=seed).chosen for seed in range(20)]
    chosen = {each.first for sample in samples for each in sample}
    assert len(chosen) == 3, "the choice depends on the seed"


@pytest.mark.parametrize(("total", "audited", "share"), [(7, 3, 0.2), (10, 4, 0.05), (5, 5, 0.1), (6, 0, 0.5)])
def test_the_probability_of_passing_is_that_of_counting_all_choices(total: int, audited: int, share: float) -> None:
    intervals = [Interval(10 * number, 10 * number + 10, 10 * number) for number in range(total)]
    altered = set(range(-(-int(share * total * 100) // 100)))
    choices = list(combinations(range(total), audited))
    passing = sum(not altered & {*choice} for choice in choices) / len(choices)
    coverage = Coverage(intervals, intervals, intervals[:audited])
    assert coverage.compute_pass_probability(share) == pytest.approx(passing)
