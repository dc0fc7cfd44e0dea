"""Killed runs resume under the same strategy, a different one, or with a different number of workers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.diloco.strategy import DiLoCo
from plugins.local_sgd.strategy import LocalSGD
from plugins.streaming_diloco.strategy import StreamingDiLoCo
from recipes.digits.recipe import Digits
from tests.support.outcome import outcome
from worldsize.core import ConfigError, Replica, RunContext, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.strategies.ddp import DDP
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

OPTIONS = ("recipe=digits", "recipe.width=4", "steps=14", "log_every=3", "checkpoint.every=4", "cluster.threads=1")
STRATEGIES = {
    "local_sgd": ("strategy.inner_steps=5", "precision=fp16", "cluster.processes=2"),
    "diloco": ("strategy.inner_steps=5", "cluster.processes=3"),
    "easgd": ("strategy.period=5", "cluster.processes=3"),
}


@pytest.mark.parametrize("name", ["diloco", "easgd"])  # the contract covers resuming the others
def test_a_run_whose_worker_is_killed_within_a_round_recovers_to_the_last_bit(train: Any, name: str) -> None:
    options = (*OPTIONS, f"strategy={name}", *STRATEGIES[name], "evaluate_every=6")
    undisturbed = train(*options)
    assert undisturbed.code == 0, undisturbed.error
    run = train(*options, "launcher.max_restarts=1", "faults=[{action: kill, rank: 1, step: 13}]")
    assert run.code == 0, run.error
    assert [attempt["exit_reason"] for attempt in run.json("run_manifest.json")["attempts"]] == ["failed", "completed"]
    assert run.json("run_manifest.json")["attempts"][1]["steps"][0] in (8, 12)
    assert outcome(run.folder) == outcome(undisturbed.folder)
    assert undisturbed.steps()[-1]["facts"]["sent_bytes"] > 0


def test_a_run_resumes_under_other_strategies_and_with_another_number_of_workers(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    def asked_to_end(step: int, attempt: int) -> str:
        return f"faults=[{{action: terminate, rank: 1, step: {step}, attempt: {attempt}}}]"

    run = train(*OPTIONS, "cluster.processes=2", asked_to_end(3, 1))
    changes = [
        ("strategy=diloco", asked_to_end(6, 2)),
        ("strategy=diloco", "cluster.processes=3", asked_to_end(9, 3)),
        ("strategy=ddp", "cluster.processes=2"),
    ]
    codes = [
        command("resume", str(run.folder), *words, cwd=run.folder, environment=environment_without_wandb)
        for words in changes
    ]
    assert [run.code, *(done.returncode for done in codes)] == [75, 75, 75, 0], codes
    attempts = run.json("run_manifest.json")["attempts"]
    assert [one["steps"] for one in attempts] == [[0, 4], [4, 7], [7, 10], [10, 14]], "stopped in the step after"
    losses = [step["loss"] for step in run.steps()]
    assert losses[-1] < losses[0]


RECIPE = Digits(4, 0.0, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))


def stepped(replica: Replica, world: World, steps: int) -> dict[str, Tensor]:
    order = Order(seed=3, batch_size=24, logical_ranks=world.size, mine=(world.rank,))
    batches = micro_batches(RECIPE.data("train"), order, world.device)
    for _ in range(steps):
        replica.step(next(batches))
    model: dict[str, Tensor] = replica.state()["model"]
    return {name: tensor.clone() for name, tensor in model.items()}


def test_the_first_round_after_another_strategy_begins_at_its_model_with_its_optimizer() -> None:
    def body(world: World) -> list[dict[str, Tensor]]:
        ddp = DDP().replica(RECIPE, RunContext(world))
        begun = stepped(ddp, world, 3)
        models = [begun]
        for strategy in (LocalSGD(inner_steps=100), DiLoCo(inner_steps=1)):
            replica = strategy.replica(RECIPE, RunContext(world))
            replica.load({**copy.deepcopy(ddp.state()), "strategy": replica.state()["strategy"]})
            assert all(torch.equal(tensor, begun[name]) for name, tensor in replica.state()["model"].items())
            models.append(stepped(replica, world, 1))
        return models

    for begun, mean, after in run_in_worlds(body, 2):
        for name, before in begun.items():
            expected = before - 0.7 * 1.9 * (before - mean[name])  # Nesterov's first step
            assert (after[name] - expected).norm() <= 1e-5 * expected.norm()
            assert not torch.equal(mean[name], before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(inner_steps=0), r"strategy.inner_steps=0 must be 1 or more"),
        (lambda: LocalSGD(reduce="ordered"), r"Set reproducibility=deterministic"),
        (lambda: DiLoCo(reduce="hierarchical"), r"reduce=hierarchical .* Set strategy.reduce=flat"),
        (lambda: LocalSGD(optimizer_state="gone"), r"'gone' is unknown. Available: local, mean, zero"),  # type: ignore[arg-type]
        (lambda: DiLoCo(outer_lr=0.0), r"strategy.outer_lr=0.0 must be positive"),
        (lambda: DiLoCo(outer_momentum=1.0), r"strategy.outer_momentum=1.0 must be at least 0 and below 1"),
        (lambda: StreamingDiLoCo(fragment_blocks=0), r"strategy.fragment_blocks=0 must be 1 or more"),
        (lambda: StreamingDiLoCo(inner_steps=5, delay=5), r"strategy.delay=5 must be less than strategy.inner_steps=5"),
        (lambda: StreamingDiLoCo(mix=1.0), r"strategy.mix=1.0 .* never synchronize"),
        (lambda: StreamingDiLoCo(wire="int4"), r"'int4' is unknown. Available: fp32, e3m0_gather"),  # type: ignore[arg-type]
    ],
)
def test_options_that_cannot_run_are_refused_with_the_remedy(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_elastic_runs_are_refused_before_a_process_starts(train: Any) -> None:
    run = train(*OPTIONS, "strategy=diloco", "reproducibility=elastic")
    assert run.code == 2
    assert "depends on the number of workers" in run.error
    assert run.folder is None
