"""The GAN of docs/howto/gans.md trains to the same bits everywhere, also if stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import REPOSITORY, files
from tests.support.outcome import outcome

WORDS = ("recipe=dcgan", "recipe.width=4", "recipe.critics=5", "cluster.threads=1", "log_every=1", "evaluate_every=7")
ELASTIC = (*WORDS, "steps=12", "batch_size=16", "reproducibility=elastic", "logical_ranks=4", "checkpoint.every=3")
SHARDED = ("strategy.wrap=size", "strategy.wrap_parameters=100")
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]  # a test starts several runs


@pytest.fixture(autouse=True)
def _project(tmp_path: Path) -> None:
    """Write the page's files into the project of ``train``."""
    for name, text in files(REPOSITORY / "docs" / "howto" / "gans.md").items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def digests(run: Any) -> tuple[str, str]:
    assert run.code == 0, run.error
    result = run.json("result.json")
    return result["state_digest"], result["metrics_digest"]


def killed(step: int) -> tuple[str, str]:
    return "launcher.max_restarts=1", f"faults=[{{action: kill, rank: 1, step: {step}}}]"


LONG = ("steps=60", "checkpoint.every=19", "evaluate_every=25")
SHORT = ("steps=12", "checkpoint.every=7")


@pytest.mark.parametrize(
    ("pace", "ways"),
    [
        (
            LONG,
            [
                ("strategy=ddp", "cluster.processes=4", *killed(48)),
                ("strategy=zero", "cluster.processes=2", *killed(48)),
            ],
        ),
        (SHORT, [("strategy=fsdp", "cluster.processes=2", *SHARDED, *killed(8))]),
    ],
    ids=["60 steps", "each strategy"],
)
def test_strategies_world_sizes_and_a_kill_in_the_middle_of_a_cycle_do_not_change_a_bit(
    train: Any, pace: tuple[str, ...], ways: list[tuple[str, ...]]
) -> None:
    """The critic is updated five times per generator update; steps 7 and 47 are the second of a cycle."""
    words = (*ELASTIC, *pace)
    alone = train(*words, "strategy=single", "cluster.processes=1")
    for run in [train(*words, *way) for way in ways]:
        assert digests(run) == digests(alone)
        assert len(run.json("run_manifest.json")["attempts"]) == 2
    last = alone.steps()[-1]
    assert last["loss"] > 0
    assert set(last["metrics"]) == {"loss/discriminator", "loss/generator", "lr/generator"}


def test_strategies_change_at_a_resume_without_changing_a_bit(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    def asked_to_end(step: int, attempt: int) -> str:
        return f"faults=[{{action: terminate, rank: 1, step: {step}, attempt: {attempt}}}]"

    undisturbed = train(*ELASTIC, "strategy=single", "cluster.processes=1")
    run = train(*ELASTIC, "strategy=zero", "cluster.processes=2", asked_to_end(3, 1))
    changes = [
        ("strategy=fsdp", *SHARDED, asked_to_end(6, 2)),
        ("strategy=ddp", "cluster.processes=4", asked_to_end(9, 3)),
        ("strategy=zero", "cluster.processes=2"),
    ]
    codes = [
        command("resume", str(run.folder), *words, cwd=run.folder.parents[2], environment=environment_without_wandb)
        for words in changes
    ]
    assert [run.code, *(done.returncode for done in codes)] == [75, 75, 75, 0], codes
    assert digests(run.__class__(0, "", "", run.folder)) == digests(undisturbed)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local_sgd", ("strategy.inner_steps=5", "strategy.optimizer_state=mean", "cluster.processes=2")),
        ("diloco", ("strategy.inner_steps=5", "cluster.processes=2")),
        ("easgd", ("strategy.period=5", "cluster.processes=3")),
    ],
)
def test_workers_that_train_apart_go_on_to_the_last_bit(train: Any, name: str, options: tuple[str, ...]) -> None:
    words = (*WORDS, "steps=12", "batch_size=16", "checkpoint.every=4", f"strategy={name}", *options)
    undisturbed = train(*words)
    assert undisturbed.code == 0, undisturbed.error
    run = train(*words, "launcher.max_restarts=1", "faults=[{action: kill, rank: 1, step: 11}]")
    assert run.code == 0, run.error
    assert [each["exit_reason"] for each in run.json("run_manifest.json")["attempts"]] == ["failed", "completed"]
    assert outcome(run.folder) == outcome(undisturbed.folder)


@pytest.mark.parametrize(
    ("name", "fact", "remedy"),
    [
        ("mesh", "DCGAN requires several updates per step", "Set strategy=ddp, zero, fsdp or single."),
        (
            "parameter_server",
            "the running statistics of generator.1 (BatchNorm2d) are not supported on parameter servers",
            "or strategy=ddp.",
        ),
    ],
)
def test_strategies_that_cannot_train_it_refuse_it_before_there_is_a_folder(
    train: Any, name: str, fact: str, remedy: str, tmp_path: Path
) -> None:
    run = train(*WORDS, f"strategy={name}", "cluster.processes=2")
    assert run.code == 2
    assert fact in run.error
    assert remedy in run.error
    assert not list((tmp_path / "runs").rglob("*"))


def test_plan_predicts_it_and_says_which_strategies_refuse_it(
    command: Any, tmp_path: Path, environment_without_wandb: dict[str, str]
) -> None:
    words = (*WORDS, "cluster.processes=2", "--strategies", "ddp,zero,mesh")
    done = command("plan", *words, cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert "mesh: DCGAN requires several updates per step" in done.stdout
    assert all(f"│ {name} " in done.stdout for name in ("ddp", "zero"))
