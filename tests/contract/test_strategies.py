"""Every built-in strategy whose processes all train is held to the contract."""

from __future__ import annotations

from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.contract import StrategyContract


class TestSingle(StrategyContract):
    strategy = Single()
    sizes = (1,)
    impossible = 2


class TestDDP(StrategyContract):
    strategy = DDP()
    sizes = (3,)


class TestDDPInOrder(StrategyContract):
    strategy = DDP(reduce="ordered")
    sizes = (3,)


class TestDDPByNode(StrategyContract):
    strategy = DDP(reduce="hierarchical", bucket_mb=0.001)
    sizes = (4,)
    local_size = 2


class TestDDPInInt8(StrategyContract):
    strategy = DDP(compress="int8", bucket_mb=0.001)
    sizes = (3,)
    tolerance = 0.05


class TestDDPInInt8AcrossNodes(StrategyContract):
    strategy = DDP(reduce="hierarchical", compress="int8", bucket_mb=0.001)
    sizes = (4,)
    local_size = 2
    tolerance = 0.05


class TestDDPInBF16(StrategyContract):
    strategy = DDP(compress="bf16")
    sizes = (2,)
    tolerance = 0.01


class TestDDPInFP16AcrossNodes(StrategyContract):
    strategy = DDP(reduce="hierarchical", compress="fp16")
    sizes = (4,)
    local_size = 2
    tolerance = 0.01


class TestPowerSGD(StrategyContract):
    strategy = DDP(compress="powersgd", powersgd_rank=4)
    sizes = (3,)
    tolerance = 0.2


class TestPowerSGDAcrossNodes(StrategyContract):
    strategy = DDP(reduce="hierarchical", compress="powersgd", powersgd_rank=4)
    sizes = (4,)
    local_size = 2
    tolerance = 0.2


class TestZeRO(StrategyContract):
    strategy = ZeRO()
    sizes = (3,)


class TestFSDP(StrategyContract):
    strategy = FSDP()
    sizes = (3,)


class TestFSDPInOrder(StrategyContract):
    strategy = FSDP(reduce="ordered", wrap="size", wrap_parameters=100)
    sizes = (3,)


class TestFSDPWithCheckpointedActivations(StrategyContract):
    strategy = FSDP(activation_checkpointing=True, reshard_after_forward=False)
    sizes = (2,)


class TestFSDPInBF16(StrategyContract):
    strategy = FSDP(param_dtype="bf16", reduce_dtype="fp32")
    sizes = (2,)
    tolerance = 0.01


class TestHSDP(StrategyContract):
    strategy = FSDP(shard="node")
    sizes = (4,)
    local_size = 2


class TestHSDPOfTwo(StrategyContract):
    strategy = FSDP(shard=2)
    sizes = (4,)
    impossible = 3


class TestMeshOfTensorsAndStages(StrategyContract):
    strategy = Mesh(tensor=2, pipeline=2)
    sizes = (4,)
    impossible = 6


class TestMeshOfShardsAndStages(StrategyContract):
    strategy = Mesh(data=2, pipeline=2, schedule="interleaved")
    sizes = (4,)
    impossible = 8
