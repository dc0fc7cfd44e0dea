"""``worldsize audit`` trains parts of a run again, and finds what was altered during the run or in its record."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forgery import CONF, RECIPE, forge_checkpoint, forge_loss, forge_value
from tests.support.own_recipe import write_recipe
from tests.support.runs import Command, Once, Run, Train, environment, folders
from worldsize.checkpoint.format import folder_name
from worldsize.record.chain_check import check_record
from worldsize.record.run_record import read_run

pytestmark = pytest.mark.heavy

OPTIONS = ("recipe=audited", "reproducibility=elastic", "logical_ranks=4", "cluster.processes=2", "log_every=4")
DDP = ("strategy=ddp", "strategy.bucket_mb=5")  # an option that other strategies do not have
SAVES = ("checkpoint.every=8", "checkpoint.keep.last=9", "evaluate_every=16")
VERIFIER = Path(__file__).parents[2] / "docs" / "howto" / "verify_chain.py"


@pytest.fixture
def honest(train_in: Callable[[Path], Train], once: Once, tmp_path: Path) -> Path:
    """A copy of a run of 40 steps that was saved every 8 steps."""

    def fill(folder: Path) -> None:
        write_recipe(folder, "audited", RECIPE, audited=CONF)
        trained = train_in(folder)(*OPTIONS, *SAVES, *DDP)
        assert trained.code == 0, trained.error

    (original,) = folders(once("an audited run", fill) / "runs")
    shutil.copytree(original, tmp_path / "runs" / "audited" / original.name)
    write_recipe(tmp_path, "audited", RECIPE, audited=CONF)
    return tmp_path / "runs" / "audited" / original.name


@pytest.fixture
def audit(command: Command, warm_python: Path, tmp_path: Path) -> Callable[..., Any]:
    """``audit(run, ...)`` audits a run, and returns the exit code and the report."""

    def run(folder: Path, *options: str) -> tuple[int, Any]:
        words = ("audit", str(folder), "--json", *options)
        done = command(*words, cwd=tmp_path, environment=environment(), timeout=600, python=warm_python)
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr

    return run


def verify(folder: Path, *head: str) -> tuple[int, str]:
    words = [sys.executable, "-I", str(VERIFIER), str(folder), *head]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_an_honest_run_passes_at_other_world_sizes_and_strategies(honest: Path, audit: Callable[..., Any]) -> None:
    assert verify(honest)[0] == 0
    code, report = audit(honest, "--samples=9", "cluster.processes=4", "strategy=fsdp")
    assert (code, report["verdict"], report["differences"]) == (0, "nothing found", [])
    assert report["audited"] == [[1, 8], [9, 16], [17, 24], [25, 32], [33, 40]]
    assert report["pass_probability"] == {"0.01": 0, "0.05": 0, "0.2": 0}
    shutil.rmtree(honest / "checkpoints" / folder_name(16))
    code, report = audit(honest, "--samples=9", "cluster.processes=1", "strategy=single")
    assert (code, report["verdict"]) == (0, "nothing found")
    assert report["audited"] == [[1, 8], [9, 16], [25, 32], [33, 40]]
    assert report["unreached_share"] == pytest.approx(0.2)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_mesh_is_audited_by_one_process(axis: str, train: Train, audit: Callable[..., Any]) -> None:
    model = ("recipe=stdlib_lm", "recipe.width=32", "recipe.depth=2", "recipe.heads=4", "recipe.context=32")
    mesh = ("strategy=mesh", f"strategy.{axis}=2", "logical_tensor=4", "cluster.processes=4")
    length = ("steps=4", "batch_size=8", "log_every=1", "checkpoint.every=2", "checkpoint.keep.last=9")
    run = train(*model, *mesh, *length, "reproducibility=elastic", "logical_ranks=4")
    assert run.code == 0, run.error
    code, report = audit(run.folder or Path(), "--samples=9", "strategy=single", "cluster.processes=1")
    assert (code, report["differences"], report["audited"]) == (0, [], [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("kind", "what"),
    [("data", "logged.grad_norm"), ("step", "logged.grad_norm"), ("weight", "checkpoint: model/2.bias")],
)
def test_alterations_during_the_run_are_found_in_their_interval(
    kind: str, what: str, tmp_path: Path, train: Train, audit: Callable[..., Any]
) -> None:
    write_recipe(tmp_path, "audited", RECIPE, audited=CONF)
    step = 24 if kind == "weight" else 20  # the last step of an interval shows only in the saved state
    altered = train(*OPTIONS, *SAVES, ALTER=f"{kind}:{step}")
    assert altered.code == 0, altered.error
    assert altered.folder is not None
    assert verify(altered.folder)[0] == 0
    code, report = audit(altered.folder, "--samples=9", "cluster.processes=1")
    (found,) = report["differences"]
    assert (code, report["verdict"]) == (4, "altered")
    assert 17 <= found["step"] <= 24
    assert found["what"] == what


def test_forged_losses_and_checkpoints_are_found_by_training_again(honest: Path, audit: Callable[..., Any]) -> None:
    forge_loss(honest, 12)
    forge_checkpoint(honest, 32, 24)
    assert verify(honest)[0] == 0
    code, report = audit(honest, "--samples=9")
    assert code == 4
    found = [(each["step"], each["what"].partition(":")[0]) for each in report["differences"]]
    assert found[:2] == [(12, "logged.loss"), (32, "checkpoint")]
    assert found[2][0] > 32, "the interval that starts from the wrong checkpoint"


def test_hyperparameters_changed_in_a_checkpoint_are_found(
    tmp_path: Path, train: Train, command: Command, audit: Callable[..., Any]
) -> None:
    write_recipe(tmp_path, "audited", RECIPE, audited=CONF)
    run = train(*OPTIONS, *SAVES, "cluster.processes=1", "run.stop_after=16").folder
    assert run is not None
    forge_value(run, 16, '"weight_decay": 0.01', '"weight_decay": 5.0')
    done = command("resume", str(run), cwd=tmp_path, environment=environment(), timeout=240)
    assert done.returncode == 0, done.stderr
    assert verify(run)[0] == 0
    code, report = audit(run, "--samples=9", "cluster.processes=1")
    (found,) = report["differences"]
    assert (code, found["step"], found["what"]) == (4, 16, "checkpoint: optimizer/param_groups/0/weight_decay")


def test_an_early_stop_is_repeated_from_the_last_checkpoint(
    tmp_path: Path, train: Train, audit: Callable[..., Any]
) -> None:
    write_recipe(tmp_path, "audited", RECIPE, audited=CONF)
    rule = ("metric=error", "patience=2", "min_delta=1")
    stops = ("evaluate_every=3", *(f"early_stopping.{each}" for each in rule))
    run = train(*OPTIONS, *SAVES[:2], *stops, "log_every=7").folder
    assert run is not None
    assert json.loads((run / "result.json").read_text())["steps"] == 9
    audited = []
    for seed in (0, 1):  # one of the two intervals each
        code, report = audit(run, "--samples=1", f"--seed={seed}")
        assert (code, report["verdict"]) == (0, "nothing found"), report
        audited.append(report["audited"])
    assert sorted(audited) == [[[1, 8]], [[9, 9]]]


def test_killed_and_healed_runs_are_consistent(tmp_path: Path, train: Train, command: Command) -> None:
    write_recipe(tmp_path, "audited", RECIPE, audited=CONF)
    slow = '{action: sleep, rank: 0, seconds: 1.5, step: 13, point: "step:forward"}'
    kill = '{action: kill, rank: 0, step: 13, point: "step:updated"}'
    often = ("checkpoint.every=4", "checkpoint.keep.last=99")
    healed = train(*OPTIONS, *often, "strategy.on_failure=heal", f"faults=[{slow},{kill}]")
    # a process that is killed right after its save, and a resume that fails before the first step
    failing = '{action: raise, rank: 0, point: "load:begin", attempt: 2}'
    killed = train(*OPTIONS, *often, f'faults=[{{action: kill, rank: 0, step: 15, point: "step:updated"}},{failing}]')
    assert killed.folder is not None
    for run in (healed.folder, killed.folder):
        assert run is not None
        assert check_record(read_run(run)) == []
        assert verify(run)[0] == 0
    assert healed.code == 0
    assert command("resume", str(killed.folder), cwd=tmp_path, environment=environment()).returncode == 1
    assert check_record(read_run(killed.folder)) == []
    assert verify(killed.folder)[0] == 0


def test_a_run_resumed_without_a_part_of_its_state_is_refused(
    tmp_path: Path, train: Train, command: Command, audit: Callable[..., Any]
) -> None:
    write_recipe(tmp_path, "audited", RECIPE, audited=CONF)
    run = train(*OPTIONS, *SAVES, "run.stop_after=8").folder
    assert run is not None
    words = ("resume", str(run), "--ignore=optimizer")
    assert command(*words, cwd=tmp_path, environment=environment()).returncode == 0
    code, error = audit(run)
    assert code == 2
    assert "checkpoint.ignore: [] -> ['optimizer'] in attempt 2" in error


def edit_metrics(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["loss"] *= 0.99
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def drop_lines(folder: Path) -> None:
    path = folder / "chain.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))


def swap_checkpoints(folder: Path) -> None:
    one, other = (folder / "checkpoints" / folder_name(step) for step in (8, 16))
    shutil.copy(other / "manifest.json", one)
    shutil.copy(other / "COMPLETE", one)


def unseal_checkpoint(folder: Path) -> None:
    (folder / "checkpoints" / folder_name(8) / "COMPLETE").write_text("0\n")


def damage_shard(folder: Path) -> None:
    path = folder / "checkpoints" / folder_name(8) / "rank_00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


EDITED = "metrics.jsonl differs from the chain at step 12"


@pytest.mark.parametrize(
    ("alter", "problem", "verified"),
    [
        (
            edit_metrics,
            "metrics.jsonl differs from the chain at step 12",
            "metrics.jsonl differs from the chain at step 12",
        ),
        (drop_lines, "the chain has", "the chain does not end with the line in the manifest"),
        (swap_checkpoints, "the checkpoint step_0000008 differs", "step_0000008 is not the checkpoint in the chain"),
        (unseal_checkpoint, "SHA-256 0 in COMPLETE", ""),
        (damage_shard, "", "step_0000008/rank_00000.safetensors is damaged"),
    ],
)
def test_an_edited_record_contradicts_itself(
    alter: Callable[[Path], None], problem: str, verified: str, honest: Path
) -> None:
    assert check_record(read_run(honest)) == []
    alter(honest)
    problems, output = check_record(read_run(honest)), verify(honest)[1]
    assert problem in "\n".join(problems)
    assert bool(problems) == bool(problem)
    assert verified in output
    assert output.startswith("consistent") == (not verified)


def test_a_damaged_shard_is_found_if_its_interval_is_audited(honest: Path, audit: Callable[..., Any]) -> None:
    damage_shard(honest)
    code, report = audit(honest, "--samples=9", "cluster.processes=1")
    assert (code, {each["step"] for each in report["differences"]}) == (4, {8})
    assert "rank_00000.safetensors" in report["differences"][0]["recorded"]


def test_the_published_head_reveals_a_record_forged_later(honest: Path) -> None:
    head = verify(honest)[1].split()[-1]
    assert verify(honest, head)[0] == 0
    forge_loss(honest, 12)
    assert verify(honest)[0] == 0
    code, output = verify(honest, head)
    assert (code, "does not end with the expected line" in output) == (1, True)


def test_runs_that_promise_no_bits_are_refused(reference_run: Callable[..., Run], audit: Callable[..., Any]) -> None:
    run = reference_run(
        "recipe=digits", "steps=4", "strategy=single", "cluster.processes=1", "log_every=1", "recipe.dropout=0.2"
    )
    assert run.folder is not None
    code, error = audit(run.folder)
    assert code == 2
    assert "only runs with bitwise reproducibility can be audited" in error
    assert "Train with reproducibility=elastic or deterministic" in error


def test_options_that_change_the_bits_are_refused(honest: Path, audit: Callable[..., Any]) -> None:
    code, error = audit(honest, "seed=3")
    assert code == 2
    assert "seed: 0 -> 3, a different experiment" in error
    assert "cannot be re-created exactly" in error
