"""The number of processes follows from the shape of the cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings
from worldsize.config.shape import (
    check_gpus,
    check_graphs,
    check_heals,
    check_operations,
    count_training_nodes,
    resolve_processes,
)
from worldsize.core import Cluster, Numerics, Role
from worldsize.core.numerics import CompileMode
from worldsize.errors import ConfigError
from worldsize.launch.local import Local
from worldsize.launch.ssh import Ssh
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.testing.loss_loops import Contrast
from worldsize.testing.recipes import Chain, TwoPlayers

BASE: dict[str, Any] = {"nodes": 1, "device": "cpu", "processes": None, "processes_per_node": None}


@pytest.mark.parametrize(
    ("given", "gpus", "processes"),
    [
        ({"processes": 3}, 0, 3),
        ({"nodes": 2, "processes_per_node": 4}, 0, 8),
        ({"nodes": 2, "processes": 4, "processes_per_node": 2}, 0, 4),
        ({"device": "cuda"}, 4, 4),
        ({"device": "cuda", "processes": 2}, 4, 2),
        ({"device": "xpu"}, 4, 4),
        ({}, 0, 1),
    ],
)
def test_processes_follow_from_what_is_given(given: dict[str, Any], gpus: int, processes: int) -> None:
    assert resolve_processes({**BASE, **given}, gpus)["processes"] == processes


@pytest.mark.parametrize(
    ("given", "gpus", "message"),
    [
        ({"processes": 0}, 0, "cluster.processes=0 must be 1 or more"),
        ({"nodes": 0}, 0, "cluster.nodes=0 must be 1 or more"),
        ({"nodes": 2, "processes": 3}, 0, "3 processes are not divisible by 2 nodes. Set cluster.processes=4."),
        (
            {"nodes": 2, "processes": 4, "processes_per_node": 4},
            0,
            "cluster.processes=4 contradicts .* Set cluster.processes=null to run 8 processes, or remove",
        ),
        ({"device": "cuda"}, 0, "torch found no GPU on this machine"),
        (
            {"device": None},
            0,
            "cluster.device=null requires a cluster with cluster.gpus_per_node or cluster.accelerators",
        ),
        ({"device": "xpu"}, 0, "cluster.device=xpu: torch found no xpu device on this machine"),
    ],
)
def test_a_contradictory_shape_is_an_error(given: dict[str, Any], gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_processes({**BASE, **given}, gpus)


def test_more_processes_than_gpus_is_an_error_that_says_how_many_there_are() -> None:
    with pytest.raises(
        ConfigError, match="8 processes require one GPU each, but this machine has 2. Set cluster.processes=2"
    ):
        check_gpus(8, gpus=2)


def test_the_last_hosts_wait_and_one_at_least_trains() -> None:
    assert count_training_nodes(["a", "b", "c"], spare=2) == 1
    with pytest.raises(
        ConfigError, match="spare_nodes=3 must be less than the 3 hosts in cluster.hosts. Set at most 2"
    ):
        count_training_nodes(["a", "b", "c"], spare=3)


def test_spare_nodes_need_a_gang_that_heals_and_a_launcher_that_tells_nodes_of_each_other() -> None:
    cluster = Cluster("ssh", nodes=2, processes=4, device="cpu", backend="gloo", spares=1, spare_nodes=2)
    assert (cluster.all_nodes, cluster.waiting) == (4, 5)
    check_heals({"worker": Role(4, restart="heal")}, cluster, Ssh(hosts=["a", "b", "c", "d"]))
    with pytest.raises(
        ConfigError, match="spare_nodes=1 requires strategy.on_failure=heal. Set strategy.on_failure=heal"
    ):
        check_heals({"worker": Role(1)}, Cluster("ssh", 1, 1, "cpu", "gloo", spare_nodes=1), Ssh(hosts=["a", "b"]))
    with pytest.raises(ConfigError, match="min_processes=2 requires strategy.on_failure=heal"):
        check_heals({"worker": Role(3)}, Cluster("laptop", 1, 3, "cpu", "gloo", min_processes=2), Local())
    with pytest.raises(
        ConfigError, match="spare_nodes=1 is not supported with Local: .* report lost .* Use cluster=ssh or slurm"
    ):
        check_heals({"worker": Role(1, restart="heal")}, Cluster("laptop", 1, 1, "cpu", "gloo", spare_nodes=1), Local())


HEALS = ("recipe=digits", "strategy.on_failure=heal", "cluster.processes=2", "cluster.device=cuda")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("cluster=node",),
        ("cluster.backend=NCCL",),
        ('cluster.backend="cpu:gloo,cuda:nccl"',),
        ("cluster.backend=ucc",),
        ("cluster=slurm", "cluster.gpus_per_node=2", "cluster.min_processes=1", "cluster.spares=1"),
        ("cluster=ssh", "cluster.hosts=[a,b]", "autoscale=file"),
        ("strategy=fsdp", "checkpoint.peers=1"),
    ],
    ids=" ".join,
)
def test_a_gang_heals_on_gpus_with_gloo_only_until_a_gpu_has_shown_more(words: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"strategy.on_failure=heal requires gloo, got .* Set strategy\.on_failure=restart"
    ):
        build_settings(compose_only([*HEALS, *words]))
    others = [word for word in words if "backend" not in word]
    assert build_settings(compose_only([*HEALS, *others, "cluster.backend=gloo"])).heals


AUDITED = ("recipe=digits", "cluster.processes=4", "reproducibility=elastic", "integrity.audit=0.5")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cluster.processes=1",), "integrity.audit requires at least two processes"),
        (
            ("strategy=mesh", "strategy.tensor=4", "logical_tensor=4"),
            "integrity.audit requires at least two data-parallel",
        ),
        (("strategy=mesh", "strategy.pipeline=2"), "integrity.audit is not supported with strategy.pipeline=2"),
        (
            ("strategy=local_sgd", "reproducibility=seeded", "integrity.audit=0", "integrity.replicas=5"),
            "integrity.replicas is not supported",
        ),
        (("reproducibility=seeded",), "integrity.audit requires reproducibility=elastic"),
        (("integrity.on_mismatch=heal",), "integrity.on_mismatch=heal requires strategy.on_failure=heal"),
        (("integrity.audit=2",), "integrity.audit=2.0 must be between 0 and 1"),
        (("integrity.replicas=-1",), "integrity.replicas=-1 must be 0 or more"),
    ],
)
def test_comparisons_that_a_run_cannot_make_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_settings(compose_only([*AUDITED, *words]))
    assert build_settings(compose_only([*AUDITED])).integrity.audit == 0.5


def test_a_flip_that_no_replica_would_make_is_refused() -> None:
    words = ["recipe=digits", "cluster.processes=2", "faults=[{action: flip, target: weight, rank: 1, step: 3}]"]
    with pytest.raises(ConfigError, match="the fault action flip is not supported with LocalSGD"):
        build_settings(compose_only([*words, "strategy=local_sgd"]))
    assert build_settings(compose_only(words)).faults.planned[0].flip
    gradient = [*words[:-1], words[-1].replace("weight", "gradient")]
    with pytest.raises(ConfigError, match="flipping a gradient requires reproducibility=elastic"):
        build_settings(compose_only(gradient))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused_where_they_would_overwrite_gradients_or_follow_shards(mode: CompileMode) -> None:
    graphs = Numerics(compile=True, compile_mode=mode)
    gpu = Cluster("node", nodes=1, processes=1, device="cuda", backend="nccl")
    with pytest.raises(
        ConfigError, match=r"requires 1 micro-batch per process and step, got 4.* Set compile_mode=default"
    ):
        check_graphs(graphs, gpu, 4, Chain())
    with pytest.raises(ConfigError, match=r"several updates per step, as in TwoPlayers.* Set compile_mode=default"):
        check_graphs(graphs, gpu, 1, TwoPlayers())
    check_graphs(graphs, gpu, 1, Chain())
    check_graphs(graphs, replace(gpu, device="cpu"), 4, TwoPlayers())
    check_graphs(replace(graphs, compile=False), gpu, 4, TwoPlayers())
    for strategy in (FSDP(), Mesh()):
        with pytest.raises(
            ConfigError, match=r"each pass gathers parameters into new memory\. Set compile_mode=default"
        ):
            strategy.check_numerics(graphs)
        strategy.check_numerics(replace(graphs, compile_mode="default"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("cluster.processes=2", "integrity.replicas=1"),
            "integrity.audit or integrity.replicas: .* integrity.audit=0",
        ),
        (("cluster.processes=2", "reproducibility=elastic", "integrity.audit=0.5"), "integrity.audit or"),
    ],
)
def test_steps_whose_operations_cannot_be_compared_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"operations cannot be compared with .*{message}"):
        build_settings(compose_only(["recipe=digits", "profile.operations=1", *words]))


def test_operations_of_losses_on_gathered_features_are_refused() -> None:
    settings = build_settings(compose_only(["recipe=digits", "profile.operations=1"]))
    with pytest.raises(ConfigError, match=r"with Contrast: its loss combines .* without --operations\."):
        check_operations(settings, settings.integrity, Contrast())


def test_a_run_that_a_scheduler_would_restart_does_not_stop_early() -> None:
    assert build_settings(compose_only(["recipe=digits", "run.stop_after=3"])).run.stop_after == 3
    words = ["recipe=digits", "+cluster=slurm", "cluster.gpus_per_node=1", "run.stop_after=3"]
    with pytest.raises(ConfigError, match=r"run\.stop_after=3 requires a cluster without a scheduler"):
        build_settings(compose_only(words))
