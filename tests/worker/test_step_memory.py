"""A recipe that keeps values between steps saves them by logical rank, or is refused where bits are promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins.parameter_server.sharding import refuse_remembering
from tests.support.own_recipe import write_recipe
from worldsize.config.shape import check_remembers, check_resumes
from worldsize.core import ConfigError, Role
from worldsize.launch.local import Local
from worldsize.testing.recipes import Chain

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
OPTIONS = (
    *("recipe=remembering", "steps=8", "checkpoint.every=4", "log_every=3", "cluster.threads=1", "strategy=ddp"),
    *("reproducibility=elastic", "logical_ranks=4"),
)


class Forgetful(Chain):
    remembers = True


class Saving(Forgetful):
    def state(self, logical_rank: int) -> int:
        return logical_rank


def gang(restart: Any = "gang") -> dict[str, Role]:
    return {"worker": Role(2, restart=restart)}


def test_values_without_a_state_are_refused_where_they_would_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    restarts = Local(max_restarts=2)
    with pytest.raises(
        ConfigError, match=r"Forgetful has state that is not checkpointed .*state and load_state.*on_failure=restart"
    ):
        check_remembers(Forgetful(), gang("heal"), Local(), exact=None)
    with pytest.raises(ConfigError, match=r"max_restarts=2 is not supported with reproducibility=elastic: Forgetful "):
        check_remembers(Forgetful(), gang(), restarts, exact="elastic")
    with pytest.raises(
        ConfigError,
        match=r"checkpoint of step 4 does not include the state of Forgetful .*reproducibility=deterministic",
    ):
        check_resumes(Forgetful(), 4, exact="deterministic")
    check_remembers(Forgetful(), gang(), Local(), exact="elastic")
    check_resumes(Forgetful(), 0, exact="elastic")
    check_resumes(Forgetful(), 4, exact=None)
    assert "state and load_state" in caplog.text
    for exact in ("elastic", None):
        check_remembers(Saving(), gang("heal"), restarts, exact=exact)
        check_resumes(Saving(), 4, exact=exact)


LATE = """
from recipes.stateful.recipe import Remembering

class Late(Remembering):
    def optimizer(self, model):
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(lambda *_: self.load_state(0, {"average": 0.5}))
        return optimizer
"""


def test_a_state_that_changes_after_it_was_shared_is_refused_where_a_gang_heals(train: Any, tmp_path: Path) -> None:
    write_recipe(tmp_path, "late", LATE, late="# @package _global_\nrecipe: {_target_: recipes.late.recipe.Late}\n")
    words = ("recipe=late", "steps=3", "batch_size=8", "cluster.processes=2", "logger=none")
    run = train(*words, "strategy=ddp", "strategy.on_failure=heal", WORLDSIZE_PLUGINS=BENCHMARKS)
    assert run.code == 1
    assert "Late may change its state only in micro_batch_loss, not in an optimizer hook or" in run.error
    assert train(*words, "strategy=ddp", WORLDSIZE_PLUGINS=BENCHMARKS).code == 0


def test_workers_that_come_and_go_keep_no_values() -> None:
    for recipe in (Forgetful(), Saving()):
        with pytest.raises(ConfigError, match="workers may join and leave"):
            refuse_remembering(recipe)
    refuse_remembering(Chain())


def test_a_resumed_run_has_the_values_of_each_logical_rank_on_other_processes(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    """Terminated at 2 processes, resumed with one; and refused with a different number of logical ranks."""
    whole = train(*OPTIONS, "cluster.processes=1", WORLDSIZE_PLUGINS=BENCHMARKS)
    assert whole.code == 0, whole.error
    ends = "faults=[{action: terminate, rank: 0, step: 5}]"
    run = train(*OPTIONS, "cluster.processes=2", ends, WORLDSIZE_PLUGINS=BENCHMARKS)
    assert run.code == 75, run.error
    words = ("resume", str(run.folder), "--ignore", "cluster", "--ignore", "logical_ranks")
    environment = {**environment_without_wandb, "WORLDSIZE_PLUGINS": BENCHMARKS}
    other = command(*words, "cluster.processes=1", "logical_ranks=8", cwd=run.folder, environment=environment)
    assert "Remembering's states for 4 logical ranks, the run has 8" in other.stderr
    done = command(*words, "cluster.processes=1", "logical_ranks=4", cwd=run.folder, environment=environment)
    assert done.returncode == 0, done.stderr
    for key in ("state_digest", "metrics_digest"):
        assert run.json("result.json")[key] == whole.json("result.json")[key]
