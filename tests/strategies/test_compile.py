"""``compile=true`` computes the same function, and in elastic mode the same bits with any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.outcome import outcome
from worldsize.strategies.compiled import Compilations

GPT = (
    *("recipe=stdlib_lm", "recipe.width=16", "recipe.depth=2", "recipe.heads=2", "recipe.context=32"),
    *("recipe.dropout=0.1", "recipe.test_bytes=2000", "batch_size=16", "cluster.threads=1"),
    *("steps=6", "log_every=1", "evaluate_every=3", "checkpoint.every=2"),
)
ELASTIC = ("reproducibility=elastic", "compile=true")
KILLED = "faults=[{action: kill, rank: 1, step: 5}]"
SAME = {
    "one process": ("strategy=single", "cluster.processes=1"),
    "ddp, 4": ("strategy=ddp", "cluster.processes=4"),
    "fsdp, 2": ("strategy=fsdp", "cluster.processes=2"),
    "killed and resumed": ("strategy=ddp", "cluster.processes=2", KILLED, "launcher.max_restarts=1"),
}
OTHERS = {
    "tensor": ("strategy=mesh", "strategy.tensor=2", "cluster.processes=2"),
    "zero": ("strategy=zero", "cluster.processes=2"),
    "pipeline": ("strategy=mesh", "strategy.pipeline=2", "cluster.processes=2"),
    "diloco": ("strategy=diloco", "strategy.inner_steps=3", "cluster.processes=2"),
}


def trained(train: Any, *options: str) -> dict[str, Any]:
    run = train(*GPT, *options)
    assert run.code == 0, run.error
    return {**run.json("result.json"), "folder": run.folder}


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled code, shared by a worker's tests."""
    folder = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


@pytest.mark.heavy
@pytest.mark.timeout(600)  # it compiles five times, on cores shared with other tests
def test_compiled_runs_end_with_the_same_bits_at_any_number_of_processes_and_after_a_kill(
    train: Any, code: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = {name: trained(train, *ELASTIC, "recipe.depth=1", *options) for name, options in SAME.items()}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cold"))
    runs["compiled anew"] = trained(train, *ELASTIC, "recipe.depth=1", "strategy=ddp", "cluster.processes=2")
    assert {(run["state_digest"], run["metrics_digest"]) for run in runs.values()} == {
        (runs["one process"]["state_digest"], runs["one process"]["metrics_digest"])
    }
    for name, run in runs.items():
        assert run["compiled"]["graphs"] >= 2, name  # forward and backward
        assert run["compiled"]["seconds"] > 0, name
    manifest = outcome(runs["one process"]["folder"])
    assert manifest["state_digest"] == runs["one process"]["state_digest"]


@pytest.mark.heavy
def test_a_compiled_run_computes_what_an_eager_one_does_but_for_rounding(train: Any, code: Path) -> None:
    options = ("recipe.dropout=0", "recipe.depth=1", "cluster.processes=2", "reproducibility=deterministic")
    compiled, eager = trained(train, "compile=true", *options), trained(train, *options)
    assert "compiled" not in eager
    assert compiled["state_digest"] != eager["state_digest"]  # sums are fused
    assert compiled["metrics"] == pytest.approx(eager["metrics"], rel=1e-4)
    assert any("grad_mode" in each for each in compiled["compiled"]["again"])  # evaluations run without gradients


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_other_strategies_compile_what_they_compute(train: Any, code: Path, options: tuple[str, ...]) -> None:
    eager = trained(train, *options, "recipe.dropout=0")
    compiled = trained(train, *options, "recipe.dropout=0", "compile=true")
    assert compiled["compiled"]["graphs"] >= 2
    assert compiled["metrics"] == pytest.approx(eager["metrics"], rel=1e-3)


def test_what_cannot_be_compiled_is_refused_before_the_start(train: Any) -> None:
    refused = {
        "compile=true is not supported with ParameterServer": ("strategy=parameter_server",),
        "kernels are chosen by autotuning": ("reproducibility=elastic", "compile_mode=max-autotune"),
        "did you mean 'default'?": ("compile_mode=defalt",),
    }
    for message, options in refused.items():
        run = train("recipe=digits", "steps=2", "compile=true", *options)
        assert (run.code, message in run.error) == (2, True), run.error


def test_nothing_compiled_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldsize.strategies.compiled._compilations", list)  # others in this process may have compiled
    assert Compilations().collect_statistics(speaks=True) == {}
