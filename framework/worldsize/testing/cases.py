"""All programs used by :class:`~worldsize.testing.contract.StrategyContract`."""

from __future__ import annotations

from collections.abc import Sequence

from worldsize.testing.loops import Case, Loop
from worldsize.testing.loss_loops import GRADIENT_CASES, LOSS_CASES
from worldsize.testing.module_loops import MODULES
from worldsize.testing.state_loops import STATES
from worldsize.testing.update_loops import OPTIMIZERS, UPDATES

CASES: Sequence[Case] = (
    Case("plain", Loop()),
    *MODULES,
    *STATES,
    *UPDATES,
    *LOSS_CASES,
    *OPTIMIZERS,
    *GRADIENT_CASES,
)
