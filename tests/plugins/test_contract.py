"""The contract of strategies holds for rare synchronisation, with losses within a tolerance."""

from __future__ import annotations

import pytest

from plugins.diloco.strategy import DiLoCo
from plugins.local_sgd.strategy import LocalSGD
from plugins.streaming_diloco.strategy import StreamingDiLoCo
from worldsize.strategies.ddp import DDP
from worldsize.testing.contract import StrategyContract
from worldsize.testing.loss_loops import GRADIENT_CASES

pytestmark = pytest.mark.heavy


class Held(StrategyContract):
    """The loss is neither worse nor better: the algorithms match one process, up to the tolerance."""

    two_sided = True


class TestDiLoCo(Held):
    strategy = DiLoCo(inner_steps=3, outer_lr=0.9, outer_momentum=0.1)
    sizes = (2, 3)  # the mean of two equal models is exact; the mean of three depends on the summation order
    tolerance = 0.3
    partners = (DDP(), LocalSGD(inner_steps=3))


class TestLocalSGDWithAMeanOptimizer(Held):
    strategy = LocalSGD(inner_steps=3, optimizer_state="mean")
    sizes = (3,)
    tolerance = 0.3
    cases = GRADIENT_CASES  # TestDiLoCo covers other programs


class TestStreamingDiLoCo(Held):
    """The checkpoint of step 4 is saved while a fragment is being sent."""

    strategy = StreamingDiLoCo(inner_steps=4, fragment_blocks=1, delay=3, mix=0.5, outer_lr=0.7)
    sizes = (3,)
    tolerance = 0.3
    cases = GRADIENT_CASES
