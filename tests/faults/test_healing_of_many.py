"""A gang large enough for gloo to connect pairs lazily also heals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.test_healing import HEAL, equal_parts, faults, kill, memberships

PROCESSES = 34
OPTIONS = (
    *("recipe=digits", "recipe.width=4", "steps=8", "log_every=2", "checkpoint.every=0", "checkpoint.at_end=true"),
    *("cluster.threads=1", "reproducibility=elastic", f"logical_ranks={PROCESSES}", f"batch_size={2 * PROCESSES}"),
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_kills_in_a_large_gang_cost_no_bit(train: Any, reference_run: Any, strategy: str) -> None:
    """The first dies in the step before, the second while the losses are exchanged."""
    planted = faults(kill(0, 3), kill(20, 6, point="log:begin"))
    run = train(*OPTIONS, HEAL, f"strategy={strategy}", f"cluster.processes={PROCESSES}", planted)
    assert run.code == 0, run.error
    everyone = set(range(PROCESSES))
    assert [set(each) for each in memberships(run.folder)] == [everyone, everyone - {0}, everyone - {0, 20}]
    alone = equal_parts(reference_run(*OPTIONS, "strategy=single", "cluster.processes=1").folder)
    actual = equal_parts(run.folder)
    assert {key: actual[key] for key in ("state_digest", "metrics", "steps")} == {
        key: alone[key] for key in ("state_digest", "metrics", "steps")
    }
