"""Every built-in strategy fulfils the contract."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.parameter_server.hybrid import HybridParameterServer
from plugins.parameter_server.strategy import ParameterServer
from worldsize.core import Cluster, ConfigError, RunContext, Strategy
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.contract import StrategyContract, assert_close
from worldsize.testing.loss_loops import GRADIENT_CASES
from worldsize.testing.training import STEPS, reference, train
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy


class Held(StrategyContract):
    """The loss is neither worse nor better: the algorithms match one process, up to the tolerance."""

    two_sided = True


class TestSingle(Held):
    strategy = Single()
    sizes = (1,)
    impossible = 2


class TestDDP(Held):
    strategy = DDP()
    sizes = (3,)


class TestDDPByNode(Held):
    strategy = DDP(reduce="hierarchical", bucket_mb=0.001)
    sizes = (4,)
    local_size = 2
    cases = GRADIENT_CASES  # TestDDP trains the other programs


class TestDDPInInt8AcrossNodes(Held):
    strategy = DDP(reduce="hierarchical", compress="int8", bucket_mb=0.001)
    sizes = (4,)
    local_size = 2
    tolerance = 0.05
    cases = GRADIENT_CASES


class TestPowerSGD(Held):
    strategy = DDP(compress="powersgd", powersgd_rank=4)
    sizes = (3,)
    tolerance = 0.2
    cases = GRADIENT_CASES


@pytest.mark.slow  # the gate runs tests/collectives/test_sparse.py: the algorithm, and the bits of a resumed run
class TestTopK(Held):
    strategy = DDP(compress="topk", density=0.25, bucket_mb=0.001)
    sizes = (3,)
    loss_differs = "it sends some numbers later than the last of these steps"


@pytest.mark.slow
class TestRandomKAcrossNodes(Held):
    strategy = DDP(reduce="hierarchical", compress="randomk", density=0.25, bucket_mb=0.001)
    sizes = (4,)
    local_size = 2
    loss_differs = "it sends some numbers later than the last of these steps"


class TestZeRO(Held):
    strategy = ZeRO()
    sizes = (3,)


class TestFSDP(Held):
    strategy = FSDP()
    sizes = (3,)


class TestHSDP(Held):
    strategy = FSDP(shard="node")
    sizes = (4,)
    local_size = 2
    cases = GRADIENT_CASES  # tests/contract/test_loops.py trains the others with ordered sums


class TestParameterServer(Held):
    strategy = ParameterServer(servers=2)
    sizes = (2,)
    impossible = 1


class TestHybridParameterServer(Held):
    strategy = HybridParameterServer()
    cases = GRADIENT_CASES  # TestParameterServer trains the other programs
    sizes = (2,)
    impossible = 1


class TestMeshOfTensorsAndStages(Held):
    strategy = Mesh(tensor=2, pipeline=2)
    sizes = (4,)
    impossible = 6


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        (DDP(compress="int8", bucket_mb=0.001), 0.05),
        (DDP(compress="bf16"), 0.01),
        (DDP(reduce="hierarchical", compress="powersgd", powersgd_rank=4), 0.2),
        (
            FSDP(
                reduce="ordered",
                wrap="size",
                wrap_parameters=100,
                reshard_after_forward=False,
            ),
            1e-5,
        ),
        (FSDP(param_dtype="bf16", reduce_dtype="fp32"), 0.01),
    ],
    ids=str,
)
def test_strategies_with_other_options_reach_the_loss_of_one_process(strategy: Strategy, tolerance: float) -> None:
    for result in run_in_worlds(lambda world: train(strategy, RunContext(world), STEPS), 4, local_size=2):
        assert_close("loss", result.losses[-1], reference().losses[-1], tolerance)


def test_hsdp_with_two_shards_a_copy_needs_an_even_number_of_ranks() -> None:
    with pytest.raises(ConfigError, match="3 processes cannot be split into groups of 2 shards"):
        FSDP(shard=2).roles(Cluster("test", 1, 3, "cpu", "gloo"))


@pytest.mark.parametrize("shard", [1, "node"])
def test_ordered_sums_over_copies_of_one_rank_are_refused(shard: Any) -> None:
    two_nodes = Cluster("test", 2, 2, "cpu", "gloo")
    FSDP(shard=shard).roles(two_nodes)
    with pytest.raises(
        ConfigError, match=f"strategy.shard={shard} puts a whole copy of the model on each.*shard=2, or strategy=ddp"
    ):
        FSDP(shard=shard, reduce="ordered").roles(two_nodes)
