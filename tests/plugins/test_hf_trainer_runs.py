"""A Trainer's models of any kind train as under the Trainer, also in real runs under every strategy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.plugins import hf_programs as programs
from tests.plugins.hf_reference import ACCUMULATED, Make, config, recipe, trained_by_transformers, values
from worldsize.checkpoint.format import complete, read_checkpoint
from worldsize.core import Strategy
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.testing.port import same_losses

pytestmark = pytest.mark.heavy

OPTIONS = (
    *("recipe=hf_trainer", "recipe.trainer=hf_programs.make_classifier", "epochs=null", "steps=20", "batch_size=8"),
    *("lr=0.001", "clip_norm=0.5", "log_every=1", "cluster.threads=1"),
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a program's folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(programs.__file__, tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        partial(programs.make_classifier, dropout=0.1),
        partial(programs.make_classifier, lr_scheduler_type="cosine", optim="sgd", label_smoothing_factor=0.1),
        partial(programs.make_causal, label_smoothing_factor=0.1, activation_checkpointing=True),
        programs.make_pair,
    ],
    ids=["dropout", "cosine sgd smoothed", "causal smoothed", "pair"],
)
def test_losses_and_weights_are_those_of_the_trainer(program: None, make: Make) -> None:
    same_losses(recipe(make), trained_by_transformers(make), config())


def test_a_model_that_ignores_the_number_of_labels_has_the_gradient_of_the_whole_batch(program: None) -> None:
    """The Trainer sums the means of the parts there: its gradient is that many times too large."""
    own = recipe(partial(programs.make_pair, **ACCUMULATED), run=values(logical_ranks=4))

    def original(model: Any, batches: Iterator[Any]) -> Generator[Tensor, None, Any]:
        optimizer = own.optimizer(model)
        schedule = own.schedule(optimizer)
        for _ in range(programs.STEPS):
            parts = list(islice(batches, 4))
            count = sum(int((part["labels"] != -100).sum()) for part in parts)
            optimizer.zero_grad()
            loss = torch.zeros(())
            for part in parts:
                logits, labels = model(**part).logits, part["labels"]
                share = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
                share.backward()  # type: ignore[no-untyped-call]
                loss += share.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            yield loss
        return model

    same_losses(own, original, config(4), tolerance=2e-6)


@pytest.mark.parametrize("strategy", [DDP(), FSDP()], ids=["ddp", "fsdp"])
def test_ranks_train_to_the_losses_and_weights_of_the_trainer(program: None, strategy: Strategy) -> None:
    make = partial(programs.make_causal, **ACCUMULATED)
    own = recipe(make, run=values(logical_ranks=4))
    same_losses(own, trained_by_transformers(make, 4), config(4), strategy=strategy, processes=2, tolerance=2e-6)


def test_elastic_runs_end_with_the_same_bits_at_every_world_size(program: None, train: Any) -> None:
    """The Trainer's default, a fused update, has different bits at a shard's end, and is refused with shards."""
    refused = train(*OPTIONS, "reproducibility=elastic", "strategy=fsdp", "cluster.processes=2")
    assert (refused.code, refused.folder) == (2, None)
    assert "TrainingArguments(optim='adamw_torch')" in refused.error
    own = ("recipe.trainer=hf_programs.make_unfused", "reproducibility=elastic")
    digests = set()
    for strategy, processes in (("ddp", 1), ("fsdp", 2), ("ddp", 4)):
        run = train(*OPTIONS, *own, f"strategy={strategy}", f"cluster.processes={processes}")
        assert run.code == 0, run.error
        digests.add(run.json("result.json")["state_digest"])
    assert len(digests) == 1


def test_runs_keep_the_checkpoint_that_the_programs_own_metric_calls_best(program: None, train: Any) -> None:
    others = [option for option in OPTIONS if not option.startswith(("recipe.trainer", "log_every"))]
    best = (
        "checkpoint.every=5",
        "checkpoint.keep.last=1",
        "checkpoint.keep.best=eval/accuracy",
        "checkpoint.keep.direction=max",
    )
    options = (
        *others,
        *best,
        "recipe.trainer=hf_programs.make_measured",
        "evaluate_every=5",
        "reproducibility=elastic",
    )
    metrics = []
    for processes in (1, 2):
        run = train(*options, f"cluster.processes={processes}")
        assert run.code == 0, run.error
        metrics.append(run.json("result.json")["metrics"])
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        measured = {line["step"]: line["metrics"]["eval/accuracy"] for line in lines if line["event"] == "evaluation"}
        best = max(measured, key=lambda step: (measured[step], step))
        assert sorted(measured) == [5, 10, 15, 20]
        assert {read_checkpoint(path).step for path in complete(run.folder / "checkpoints")} == {best, 20}
    assert metrics[0] == metrics[1]
    right = 13 * metrics[0]["eval/accuracy"]  # of 13 samples
    assert right == pytest.approx(round(right))


def test_servers_hold_the_parameters_and_the_losses_are_those_of_one_process(program: None, train: Any) -> None:
    alone = train(*OPTIONS, "strategy=single", "cluster.processes=1")
    served = train(*OPTIONS, "strategy=parameter_server", "cluster.processes=3", "strategy.servers=1")
    assert (alone.code, served.code) == (0, 0), alone.error + served.error
    losses = [[line["loss"] for line in run.steps()] for run in (alone, served)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
