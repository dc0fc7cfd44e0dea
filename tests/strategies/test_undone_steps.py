"""A survivor of a gang that heals repeats a step with the state that it had at the step's beginning."""

from __future__ import annotations

import pytest

from worldsize.core import Reduction
from worldsize.strategies.ddp import DDP
from worldsize.testing.contract import StrategyContract


@pytest.mark.parametrize("reduce", ["ordered", "flat"])
def test_a_step_that_ends_before_its_update_changes_nothing(reduce: Reduction) -> None:
    class Healing(StrategyContract):
        strategy = DDP(reduce=reduce, on_failure="heal")

    Healing().test_a_step_that_ends_before_its_update_changes_nothing()
