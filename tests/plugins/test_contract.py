"""The contract of every strategy; another mathematics than that of one process, hence the tolerance."""

from __future__ import annotations

from plugins.diloco.strategy import DiLoCo
from plugins.local_sgd.strategy import LocalSGD
from plugins.streaming_diloco.strategy import StreamingDiLoCo
from worldsize.strategies.ddp import DDP
from worldsize.testing.contract import StrategyContract


class TestDiLoCo(StrategyContract):
    strategy = DiLoCo(inner_steps=3, outer_lr=0.9, outer_momentum=0.1)
    sizes = (2, 3)  # the mean of two equal models has their bits; of three numbers the order of the sum decides
    tolerance = 0.3
    partners = (DDP(), LocalSGD(inner_steps=3))


class TestLocalSGDWithAMeanOptimizer(StrategyContract):
    strategy = LocalSGD(inner_steps=3, optimizer_state="mean")
    sizes = (3,)
    tolerance = 0.3


class TestStreamingDiLoCo(StrategyContract):
    """A fragment is on its way when the checkpoint of step 4 is saved."""

    strategy = StreamingDiLoCo(inner_steps=4, fragment_blocks=1, delay=3, mix=0.5, outer_lr=0.7)
    sizes = (3,)
    tolerance = 0.3
