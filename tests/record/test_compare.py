"""Distances between runs match IEEE 754."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.save import Saver
from worldsize.core import MembershipRecord, World
from worldsize.record.attempt import Attempt, compute_goodput
from worldsize.record.compare import compare_runs, count_ulps, tensor_ulps
from worldsize.record.level import changes_but, drop_copies, find_changes, resume_downgrades
from worldsize.record.manifest import write_manifest


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        (1.0, math.nextafter(1.0, 2.0), 1),
        (1.0, 1.0 + 2**-50, 4),  # one unit at 1 is 2^-52
        (-0.0, 0.0, 0),
        (-5e-324, 5e-324, 2),  # from the smallest negative number past zero to the smallest positive one
        (1.0, 2.0, 2**52),
    ],
)
def test_distances_are_counted_in_units_in_the_last_place(one: float, other: float, distance: int) -> None:
    assert count_ulps(one, other) == count_ulps(other, one) == distance
    assert (
        tensor_ulps(torch.tensor([0.0, one], dtype=torch.float64), torch.tensor([0.0, other], dtype=torch.float64))
        == distance
    )


def test_tensors_are_compared_in_units_of_their_own_dtype() -> None:
    assert tensor_ulps(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])) == 1
    assert tensor_ulps(torch.tensor([1.0]).bfloat16(), torch.tensor([1.0 + 2**-7]).bfloat16()) == 1
    assert tensor_ulps(torch.tensor([3, 5]), torch.tensor([3, 1])) == 4


def a_run(folder: Path, weights: dict[int, float], losses: dict[int, float], digest: str) -> Path:
    world = World.create_single(torch.device("cpu"))
    saver = Saver(folder / "checkpoints", world, None, keep=Retention(last=9))
    for step, value in weights.items():
        saver.save({"model": {"w": torch.tensor([2.0, value])}}, step=step, facts={"metrics": {}})
    saver.finish()
    saver.close()
    row = '{{"event": "step", "step": {}, "loss": {}, "lr": 0.1, "grad_norm": null, "samples": 8, '
    row += '"samples_per_second": 9.0, "step_seconds": [0.1]}}\n'
    (folder / "metrics.jsonl").write_text("".join(row.format(step, loss) for step, loss in losses.items()))
    results = {"state_digest": digest, "metrics_digest": digest, "metrics": {}, "tensors": {}}
    write_manifest(folder / "run_manifest.json", {"attempts": [], "results": results})
    return folder


def test_a_comparison_names_the_first_step_that_differs_and_by_how_much(tmp_path: Path) -> None:
    first = a_run(tmp_path / "a", {5: 1.0, 10: 1.0, 15: 1.0}, {5: 0.5, 10: 0.25}, "x")
    second = a_run(tmp_path / "b", {5: 1.0, 10: 1.5, 15: 1.25, 20: 0.0}, {5: 0.5, 10: 0.2525}, "y")
    comparison = compare_runs(first, second, tolerance=0.01)
    (tensor,) = comparison.tensors
    assert (tensor.name, tensor.first_step, tensor.absolute, tensor.relative) == ("w", 10, 0.25, 0.2)
    assert tensor.ulp == 2**21  # a quarter is 2^21 units of 2^-23
    loss = comparison.metrics[0]
    assert (loss.name, loss.first_step) == ("loss", 10)
    assert loss.relative == pytest.approx(0.0025 / 0.2525)
    assert comparison.verdict == "within tolerance"
    assert compare_runs(first, second, tolerance=0.001).verdict == "different"
    assert compare_runs(first, first, tolerance=0).verdict == "bitwise identical"


def test_changes_of_configuration_are_named_and_accepted_by_key() -> None:
    then = {"lr": 0.1, "optimizer": {"lr": 0.1, "betas": [0.9]}, "cluster": {"processes": 2}, "recipe": {"width": 4}}
    now = {"lr": 0.2, "optimizer": {"lr": 0.2, "betas": [0.8]}, "cluster": {"processes": 4}, "recipe": {"width": 4}}
    differences = find_changes(then, now)
    assert [key for key, _, _ in differences] == ["lr", "optimizer.betas", "optimizer.lr"]
    assert [key for key, _, _ in changes_but(differences, ["lr"])] == ["optimizer.betas"]
    assert changes_but(differences, ["lr", "optimizer"]) == []
    assert drop_copies(differences) == [("lr", 0.1, 0.2), ("optimizer.betas", [0.9], [0.8])]
    apart = find_changes({"lr": 0.1, "optimizer": {"lr": 0.1}}, {"lr": 0.2, "optimizer": {"lr": 0.3}})
    assert drop_copies(apart) == apart  # the second has a separate value
    groups = find_changes({"a": {"lr": 0.1}, "b": {"lr": 0.1}}, {"a": {"lr": 0.2}, "b": {"lr": 0.2}})
    assert drop_copies(groups) == groups  # neither is a copy of the other


def attempt(number: int, *, start_at: float, first_step_at: float, end_at: float, steps: list[int]) -> Attempt:
    return {
        "number": number,
        "start": "2026-01-01T00:00:00+00:00",
        "start_at": start_at,
        "end": "2026-01-01T00:01:00+00:00",
        "end_at": end_at,
        "steps": steps,
        "first_step_at": first_step_at,
        "exit_reason": "completed",
        "exit_code": 0,
        "hosts": ["a"],
        "world_size": 1,
        "pid": 1,
    }


def membership(number: int, members: list[int], *, first: int, ended: float, began: float | None) -> MembershipRecord:
    return {
        "number": number,
        "first": first,
        "members": members,
        "lost": {},
        "left": [],
        "ended": ended,
        "began": began,
    }


def test_goodput_leaves_out_the_time_in_which_a_gang_changed() -> None:
    """Two changes, the second before all trained again, took 0.5 s of the 10 s of training."""
    healed = attempt(1, start_at=0.0, first_step_at=2.0, end_at=12.0, steps=[0, 10])
    healed["memberships"] = [
        membership(1, [0, 1, 2], first=0, ended=0.0, began=1.0),
        membership(2, [0, 2], first=4, ended=6.0, began=None),
        membership(3, [0, 2], first=4, ended=6.2, began=6.5),
    ]
    assert compute_goodput([healed])["useful_seconds"] == 9.5


@pytest.mark.parametrize("reduce", ["ordered", "flat"])
def test_a_run_that_lost_processes_claims_its_bits_only_if_sums_do_not_depend_on_them(reduce: str) -> None:
    healed = attempt(1, start_at=0.0, first_step_at=2.0, end_at=12.0, steps=[0, 10])
    healed["memberships"] = [
        membership(1, [0, 1, 2], first=0, ended=0.0, began=1.0),
        membership(2, [0, 2], first=4, ended=6.0, began=6.5),
    ]
    reasons = resume_downgrades({"determinism": {"reduce": reduce}, "attempts": [healed]})
    said = "attempt 1: 2 processes trained from step 5, which affects sums"
    assert [(each.level, each.reason) for each in reasons] == ([("tolerance", said)] if reduce == "flat" else [])


def test_goodput_counts_steps_that_were_done_again_as_lost() -> None:
    """There are 10 s for 10 steps, 4 of them lost, then 5 s of pause and start, then 6 s for 6 steps."""
    attempts = [
        attempt(1, start_at=0.0, first_step_at=2.0, end_at=12.0, steps=[0, 10]),
        attempt(2, start_at=13.0, first_step_at=17.0, end_at=23.0, steps=[6, 12]),
    ]
    measured = compute_goodput(attempts)
    assert measured == {
        "total_seconds": 23.0,
        "useful_seconds": 12.0,
        "fraction": 12 / 23,
        "lost_steps": [4],
        "recover_seconds": [5.0],
    }
