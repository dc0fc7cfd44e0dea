"""Devices other than CPU and CUDA are listed by torch, and unsupported features are refused before the start.

No such device is here: tests register some with torch, as a package that extends it would.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plugins.parameter_server.hybrid import HybridParameterServer
from plugins.parameter_server.strategy import ParameterServer
from worldsize.config.cluster import build_cluster
from worldsize.config.shape import check_device
from worldsize.core import Cluster, Numerics, Strategy
from worldsize.devices import default_backend, device_count, synchronize, synchronize_stream
from worldsize.errors import ConfigError
from worldsize.launch.local import Local
from worldsize.record.determinism import Determinism
from worldsize.seeds import keep_generators, seed_generators
from worldsize.world.environments import Placement
from worldsize.world.world import select_device


class Module:
    """Stands in for a package's ``torch.xpu``: two devices with a Python random generator."""

    def __init__(self) -> None:
        self.waited = 0
        self._random = random.Random()

    def device_count(self) -> int:
        return 2

    def synchronize(self) -> None:
        self.waited += 1

    def manual_seed(self, seed: int) -> None:
        self._random.seed(seed)

    def get_rng_state(self) -> Tensor:
        return torch.tensor(self._random.getstate()[1])

    def set_rng_state(self, state: Tensor) -> None:
        self._random.setstate((3, tuple(state.tolist()), None))

    def draw(self) -> float:
        return self._random.random()


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Module:
    module, found = Module(), torch.get_device_module

    def module_of(device: Any = None) -> Any:
        return module if device is not None and torch.device(device).type == "xpu" else found(device)

    monkeypatch.setattr(torch, "get_device_module", module_of)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    return module


def cluster(device: str, **changes: Any) -> Cluster:
    return build_cluster({"name": "test", "nodes": 1, "processes": 2, "device": device, **changes}, threads=1)


def test_the_devices_and_the_backend_are_those_that_torch_names(xpu: Module) -> None:
    assert device_count("xpu") == 2
    assert cluster("xpu").backend == "xccl"
    assert cluster("xpu", backend="mpi").backend == "mpi"
    assert [cluster(kind).backend for kind in ("cpu", "cuda", "mps")] == ["gloo", "nccl", "gloo"]
    Local().check(cluster("xpu", backend="gloo"))
    with pytest.raises(ConfigError, match=r"3 processes require one xpu device each, but this machine has 2\."):
        Local().check(cluster("xpu", processes=3, backend="gloo"))


def test_a_backend_that_a_package_registers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "hpu", "hccl")
    assert default_backend("hpu") == "hccl"
    with pytest.raises(ConfigError, match=r"cluster.device=mtia\. Install a package .* cluster.backend\."):
        default_backend("mtia")


def test_a_device_that_torch_does_not_know_is_refused(xpu: Module) -> None:
    for kind, message in {
        "cudaa": r"'cudaa' is unknown; did you mean 'cuda'\? Available: cpu, cuda, hpu, mps, mtia, xpu",
        "gpu": r"'gpu' is unknown; did you mean 'cuda'\? Available: cpu, cuda",
        "meta": r"'meta' is unknown",
        "tpu": r"requires torch_xla.* docs/howto/gpus\.md",
    }.items():
        with pytest.raises(ConfigError, match=message):
            device_count(kind)
    assert device_count("hpu") == 0, "torch knows its name, and the package that brings it is not installed"


def test_each_process_computes_on_the_device_of_its_local_rank(xpu: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    device = select_device(Placement(5, 6, 1, 2, "file:///nowhere"), cluster("xpu"))
    assert (device, chosen) == (torch.device("xpu", 1), [1])
    synchronize(device)
    synchronize(torch.device("cpu"))
    assert xpu.waited == 1
    synchronize_stream(device)
    assert xpu.waited == 2


def test_the_random_numbers_of_a_device_follow_from_the_seed_and_can_be_kept(xpu: Module) -> None:
    device = torch.device("xpu", 0)
    with keep_generators():
        seed_generators(7, device)
        first = [xpu.draw(), xpu.draw()]
        seed_generators(7, device)
        with keep_generators(device):
            assert xpu.draw() == first[0]
        assert [xpu.draw(), xpu.draw()] == first


@pytest.mark.parametrize("strategy", [ParameterServer(), HybridParameterServer()], ids=["servers", "hybrid"])
def test_parameter_servers_compute_on_cpus_alone(strategy: Strategy) -> None:
    with pytest.raises(ConfigError, match=r"but cluster\.device=cuda\. Set cluster\.device=cpu, or use strategy=fsdp"):
        strategy.roles(cluster("cuda"))
    assert {role.processes for role in strategy.roles(cluster("cpu")).values()} == {1}


@pytest.mark.parametrize(
    ("numerics", "changes", "exact", "message"),
    [
        (
            Numerics(),
            {},
            "deterministic",
            "reproducibility=deterministic .* Set reproducibility=seeded",
        ),
        (Numerics(precision="fp8"), {}, None, "precision=fp8 .* cluster.device=xpu. Set precision=bf16"),
        (Numerics(compile=True, compile_mode="max-autotune"), {}, None, "CUDA graphs.* Set compile_mode=default"),
        (
            Numerics(activation_offload=True),
            {},
            None,
            "activation_offload=true .* Set activation_checkpointing=full",
        ),
        (Numerics(), {"hca": "mlx5_0"}, None, "an NCCL setting.* Set cluster.hca=null"),
    ],
    ids=["bits", "fp8", "graphs", "offload", "hca"],
)
def test_what_is_only_there_for_cuda_is_refused(
    numerics: Numerics, changes: dict[str, Any], exact: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_device(numerics, cluster("xpu", **changes), exact=exact)
    check_device(numerics, cluster("cuda", **changes), exact=exact)
    check_device(Numerics(precision="bf16", compile=True), cluster("xpu"), exact=None)


@pytest.mark.parametrize(("precision", "allowed"), [("highest", False), ("high", True)])
def test_convolutions_round_as_the_other_products_do(precision: Literal["highest", "high"], allowed: bool) -> None:
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        Determinism("fast", matmul_precision=precision).apply("cpu")
        assert torch.backends.cudnn.allow_tf32 == allowed
    finally:
        torch.backends.cudnn.allow_tf32, _, torch.backends.cudnn.benchmark = before
        torch.set_float32_matmul_precision(before[1])
