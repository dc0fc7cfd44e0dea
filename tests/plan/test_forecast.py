"""Predicted steps of strategies match formulas worked out by hand, and advice follows from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plugins.parameter_server.strategy import ParameterServer
from worldsize.collectives.cluster_cost import estimate_push_bytes
from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings
from worldsize.core import Cluster, ConfigError, Cost, Link, Workload
from worldsize.plan.advice import best_text, explain_memory_excess, retuning_text
from worldsize.plan.predictor import Forecast, Given, Predictor, forecast, scale_workload
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh

LINKS = {"node": Link(10e9, 0.0), "network": Link(1e9, 0.0)}
WORK = Workload(8e8, 1.6e9, compute_seconds=0.4, update_seconds=0.04, overlap=0.5)


def cluster(nodes: int, per_node: int, device: str = "cpu") -> Cluster:
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    return Cluster("test", nodes, nodes * per_node, device, backend, links=LINKS)


def test_a_rank_with_more_micro_batches_updates_once_and_overlaps_with_the_last_backward_pass() -> None:
    twice = scale_workload(WORK, 2)
    assert twice.compute_seconds == pytest.approx(0.36 * 2 + 0.04)
    assert twice.overlap * twice.compute_seconds == pytest.approx(WORK.overlap * WORK.compute_seconds)
    half = scale_workload(WORK, 0.5)
    assert half.compute_seconds == pytest.approx(WORK.compute_seconds / 2)
    assert half.overlap * half.compute_seconds == pytest.approx(WORK.overlap * WORK.compute_seconds / 2)


def test_gloo_all_reduces_where_other_backends_reduce_scatter() -> None:
    """A step sends 3 × 7/8 of the bytes with a reduce-scatter and 4 × 7/8 without; 0.2 s of backward pass hide some."""
    on_gpus = forecast(FSDP().cost(WORK, cluster(8, 1, "cuda")), WORK)
    assert on_gpus.exposed_seconds == pytest.approx(3 * 7 / 8 * 0.8 - 0.2)
    on_cpus = forecast(FSDP().cost(WORK, cluster(8, 1)), WORK)
    assert on_cpus.exposed_seconds == pytest.approx(4 * 7 / 8 * 0.8)
    assert on_cpus.step_seconds == pytest.approx(0.4 - 7 / 8 * 0.04 + 2.8)  # each rank updates an eighth


def test_compressed_sums_are_an_all_to_all_and_an_all_gather() -> None:
    cost = DDP(compress="bf16").cost(WORK, cluster(4, 2))
    assert cost is not None
    assert cost.communication_seconds == pytest.approx(4e8 * (2 * 6 / 8 + 7 / 8) / 1e9)


def test_sparse_sums_gather_numbers_with_indices_or_reduce_some() -> None:
    """Eight ranks gather 2 x 1 % of each rank's bytes, or reduce 1 % of them in a ring."""
    top, drawn = (DDP(compress=kind, density=0.01).cost(WORK, cluster(4, 2)) for kind in ("topk", "randomk"))
    assert top is not None
    assert drawn is not None
    assert top.sent_bytes == pytest.approx(7 * 2 * 0.01 * 8e8)
    assert top.communication_seconds == pytest.approx(7 * 2 * 0.01 * 8e8 / 1e9)
    assert drawn.sent_bytes == pytest.approx(2 * 7 / 8 * 0.01 * 8e8)
    assert drawn.communication_seconds == pytest.approx(2 * 7 / 8 * 0.01 * 8e8 / 1e9)
    by_node = DDP(compress="topk", density=0.01, reduce="hierarchical").cost(WORK, cluster(4, 2))
    assert by_node is not None
    assert by_node.across_bytes == pytest.approx(3 * 2 * 0.01 * 8e8), "a node sends to three others, for its two ranks"
    racks = replace(cluster(16, 1), tiers={"rack": 4}, links={**LINKS, "rack": LINKS["network"]})
    by_rack = DDP(compress="topk", density=0.1, reduce="hierarchical")
    by_rack.roles(racks)  # four senders, fewer than 1 / density
    cost = by_rack.cost(WORK, racks)
    assert cost is not None
    inside = 2 * 3 / 4 * 8e8
    assert cost.across_bytes == pytest.approx(inside + 3 * 2 * 0.1 * 8e8 / 4), "a quarter of each, to three other racks"
    with pytest.raises(
        ConfigError, match=r"strategy.density=0.3 is too high for .* on 4 units of the last tier: .* at most 1/4"
    ):
        replace(by_rack, density=0.3).roles(racks)


def test_compute_measured_under_the_strategy_replaces_that_of_the_workload() -> None:
    cost = Cost(0.0, 0.0, 0.0, 1.0, idle=0.2, exposed_seconds=0.3, added_seconds=0.1)
    assert forecast(cost, WORK).step_seconds == pytest.approx((0.4 + 0.1) / 0.8 + 0.3)
    assert forecast(cost, WORK, 0.6).step_seconds == pytest.approx(0.6 / 0.8 + 0.3)


@pytest.mark.parametrize("idle", [0.0, 0.1])
def test_the_compute_for_an_efficiency_counts_all_that_is_lost(idle: float) -> None:
    """A step below the target efficiency needs more, also if its strategy computes much besides the model."""
    cost = Cost(0.0, 0.0, 0.0, 1.0, idle=idle, exposed_seconds=0.1, added_seconds=0.4)
    for measured in (None, 1.4):  # as added by the strategy's cost, or as measured
        found = forecast(cost, Workload(0.0, 0.0, compute_seconds=1.0), measured)
        assert found.added_seconds == pytest.approx(0.4)
        needed = found.compute_seconds_for(0.8)
        assert needed > found.compute_seconds
        assert forecast(cost, Workload(0.0, 0.0, compute_seconds=needed)).efficiency == pytest.approx(0.8)


def test_no_computation_makes_up_for_a_rank_that_is_idle_for_longer() -> None:
    found = forecast(Cost(0.0, 0.0, 0.0, 1.0, idle=0.25), Workload(0.0, 0.0, compute_seconds=1.0))
    assert found.compute_seconds_for(0.8) == math.inf
    assert "ranks are idle 25% of the time at any batch size" in best_text({"mesh": found}, {})


def test_ranks_of_a_node_share_its_link_to_the_servers() -> None:
    """Two nodes have two servers each, two have two workers each; pushes leave by the link of their node."""
    assert estimate_push_bytes(1e8, range(4, 8), range(4), cluster(4, 2)) == pytest.approx(2e8)
    # one server shares a node with a worker
    assert estimate_push_bytes(1e8, range(1, 4), range(1), cluster(2, 2)) == pytest.approx(2e8)
    assert estimate_push_bytes(1e8, range(1, 4), range(1), cluster(1, 4)) == pytest.approx(3e8)
    cost = ParameterServer(servers=4, nodes=4).cost(WORK, cluster(4, 2))
    assert cost.communication_seconds == pytest.approx(2 * 1.6)
    assert cost.exposed_seconds == pytest.approx(1.6 + 1.6 - 0.2)
    assert cost.added_seconds == pytest.approx(0.01 - 0.04)


def test_fewer_bits_reduce_only_the_messages_that_are_sent_with_them() -> None:
    """FSDP on GPUs gathers bf16 parameters twice and scatters float32 gradients; servers get one bit per number."""
    assert FSDP(param_dtype="bf16", reduce_dtype="fp32").cost(WORK, cluster(8, 1, "cuda")).sent_bytes == pytest.approx(
        (2 * 0.5 + 1) * 7 / 8 * 8e8
    )
    cost = ParameterServer(servers=4, nodes=4, compression="onebit").cost(WORK, cluster(4, 2))
    assert cost.communication_seconds == pytest.approx(1.6 + 1.6 / 32, rel=1e-6)
    assert DDP(compress="powersgd").cost(WORK, cluster(4, 2)) is None, "that depends on the matrices"


def test_the_idle_share_of_a_pipeline_follows_from_the_micro_batches_of_the_run() -> None:
    """Four stages are idle for 3 / (64 + 3) of the step, and by default for 3 / (8 + 3)."""
    cost = Mesh(pipeline=4).cost(replace(WORK, micro_batches=64), cluster(4, 1))
    assert cost.idle == pytest.approx(3 / 67)
    assert Mesh(pipeline=4).cost(WORK, cluster(4, 1)).idle == pytest.approx(3 / 11)


def test_rings_along_data_share_the_link_of_their_node() -> None:
    """Two nodes of four ranks hold two data parts of four tensor ranks.

    Four rings of a quarter of the parameters cross the link, at a quarter of its bandwidth each. With one tensor
    rank, one ring crosses, as with fsdp.
    """
    crossed = Mesh(data=2, tensor=4).cost(WORK, cluster(2, 4, "cuda"))
    assert crossed.communication_seconds == pytest.approx(3 * 1 / 2 * 2e8 / (1e9 / 4))
    assert crossed.across_bytes == pytest.approx(4 * 3 * 1 / 2 * 2e8)
    whole, fsdp = (strategy.cost(WORK, cluster(2, 4, "cuda")) for strategy in (Mesh(), FSDP()))
    assert whole.across_bytes == pytest.approx(fsdp.across_bytes)
    # one stage per node: data parts communicate inside, and four ranks send outputs to the next node
    stages = Mesh(data=4, pipeline=2).cost(replace(WORK, boundary_bytes=1e6, micro_batches=8), cluster(2, 4, "cuda"))
    assert stages.across_bytes == pytest.approx(4 * 2 * 8 * 1e6)


def made(seconds: float, *, memory: float = 1e9, same: bool = True) -> Forecast:
    return Forecast(Cost(memory, 0.0, 0.0, seconds, same=same), 1.0, seconds, 1.0 + seconds)


def test_the_best_is_the_fastest_that_fits_and_computes_the_same() -> None:
    rivals = {
        "slow": made(1.0),
        "near": made(0.26),
        "best": made(0.2),
        "large": made(0.1),
        "apart": made(0, same=False),
    }
    text = best_text(rivals, {"large"})
    assert text.startswith("Best: best, 1200.00 ms per step. near is about as fast (5.0% slower) and needs ")
    assert "Faster, but out of memory: large." in text
    assert "Faster, but not equivalent to a single process (compare the loss): apart." in text
    text = best_text({"slow": made(1.0), "slower": made(2.0)}, ())
    assert (
        "slower is next and takes 1.50 × as long: it waits 2000.00 ms for communication instead of 1000.00 ms." in text
    )
    assert "only 50.0% of the time is compute. 80% requires 4000.00 ms of compute per step, 4.0 × as much: " in text
    assert best_text(rivals, set(rivals)).startswith("No strategy fits in memory.")
    assert best_text({"apart": made(0, same=False)}, ()).endswith("Approximate alternatives (compare the loss): apart.")
    assert best_text({}, ()) == "No strategy could be predicted; see the reasons below."


def test_advice_names_what_is_too_large_and_how_to_change_the_rate_for_a_larger_batch() -> None:
    assert explain_memory_excess(made(1.0, memory=3e9), 2e9) == (
        "out of memory: requires 3.00 GB per rank, found 2.00 GB. Shard the model over more ranks."
    )
    assert explain_memory_excess(made(1.0), 1e9) is None
    assert explain_memory_excess(made(1.0), None) is None
    assert retuning_text(64, 64, 0.1, "runs/x") is None
    assert "start at 4 × with SGD, 2 × with Adam (currently lr=0.1)" in (retuning_text(64, 256, 0.1, "runs/x") or "")


@pytest.mark.parametrize(("hosts", "expected"), [("a,b", "rack"), ("a,b,c,d", "network")])
def test_hosts_that_are_all_in_one_rack_have_its_measured_link(hosts: str, expected: str) -> None:
    """They do not use the measured link between racks."""
    measured = {"node": Link(10e9, 0.0), "rack": Link(2e9, 1e-5), "network": Link(0.5e9, 1e-4)}
    words = ["recipe=digits", "+cluster=ssh", f"cluster.hosts=[{hosts}]", "+cluster.tiers.rack=2"]
    seen = Predictor(Given(links=measured)).resolve_cluster(build_settings(compose_only(words)))
    assert seen.links["network"] == measured[expected]
    assert seen.links["device"] == build_settings(compose_only(words)).cluster.links["device"]  # not measured
