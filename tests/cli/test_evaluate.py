"""``worldsize evaluate`` reproduces the logged metrics at any world size, and leaves the run unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loop.test_evaluation import WORDS, evaluations, project

pytestmark = pytest.mark.heavy

__all__ = ["project"]

SAVED = ("checkpoint.every=2", "checkpoint.keep.last=4", "checkpoint.keep.best=validation/error")
Evaluate = Callable[..., Any]


@pytest.fixture
def evaluate(command: Any, project: Path, environment_without_wandb: dict[str, str]) -> Evaluate:
    """``evaluate(run, "split=test")`` calls the command and returns its outcome and output."""

    def call(run: Any, *words: str) -> Any:
        return command("evaluate", str(run.folder), *words, cwd=project, environment=environment_without_wandb)

    return call


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of the run's files, excluding evaluations."""
    files = [file for file in folder.rglob("*") if file.is_file() and "evaluations" not in file.parts]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def written(run: Any) -> dict[str, Any]:
    """Return the contents of the newest ``evaluation.json``."""
    files = sorted((run.folder / "evaluations").glob("*/evaluation.json"), key=lambda file: file.stat().st_mtime_ns)
    evaluation: dict[str, Any] = json.loads(files[-1].read_text())
    return evaluation


def test_a_checkpoint_has_the_figures_that_training_logged_at_its_step(train: Any, evaluate: Evaluate) -> None:
    run = train(*WORDS, *SAVED, "checkpoint.keep.direction=min", "cluster.processes=2", "strategy=ddp")
    logged, before = evaluations(run), digests(run.folder)
    best = min(logged, key=lambda step: (logged[step]["validation/error"], -step))
    for words, step in (
        ((), 8),
        (("checkpoint=best",), best),
        (("checkpoint=4", "cluster.processes=1", "strategy=single"), 4),
        (("checkpoint=6", "cluster.processes=3", "strategy=fsdp"), 6),
        (("checkpoint=6", "cluster.processes=3", "strategy=parameter_server"), 6),
    ):
        done = evaluate(run, *words)
        assert done.returncode == 0, done.stderr
        assert written(run)["metrics"] == logged[step], words
        assert written(run)["step"] == step
        assert repr(logged[step]["validation/error"]) in done.stdout
    one = evaluate(run, "checkpoint=2", "split=validation", "cluster.processes=1", "strategy=single")
    assert one.returncode == 0, one.stderr
    assert written(run)["metrics"] == {
        name: value for name, value in logged[2].items() if name.startswith("validation/")
    }
    assert digests(run.folder) == before


def test_what_cannot_be_evaluated_is_refused_in_a_sentence(train: Any, evaluate: Evaluate) -> None:
    run = train(*WORDS, "checkpoint.every=4", "cluster.processes=1", "strategy=single", "evaluate_every=0")
    shard = next((run.folder / "checkpoints" / "step_0000004").glob("*.safetensors"), None) or next(
        file for file in (run.folder / "checkpoints" / "step_0000004").iterdir() if file.stat().st_size > 0
    )
    for words, said in (
        (("checkpoint=5",), "checkpoint=5 not found; available: best, last, 4, 8."),
        (("checkpoint=best",), "checkpoint=best requires a run with checkpoint.keep.best"),
        (("split=validatoin",), "no split 'validatoin'; did you mean 'validation'?"),
        (("split=",), "split= is empty"),
        (("cluster=slurm",), "evaluate requires a launcher that starts processes on this machine"),
    ):
        done = evaluate(run, *words)
        assert (done.returncode, said in done.stderr) == (2, True), (words, done.stderr)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    done = evaluate(run, "checkpoint=4")
    assert done.returncode == 2
    assert "the checkpoint is damaged" in done.stderr
    assert not (run.folder / "evaluations").exists()
