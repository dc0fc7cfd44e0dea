"""The cost model agrees with the textbook's figures and with arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from worldsize.collectives.cluster_cost import (
    all_reduce_seconds,
    estimate_hierarchical_bytes,
    estimate_hierarchical_seconds,
    estimate_push_seconds,
    find_limiting_link,
    find_slowest_link,
)
from worldsize.collectives.cost import (
    all_gather_seconds,
    all_to_all_seconds,
    bubble_share,
    compute_seconds_for,
    efficiency,
    estimate_bucketed_exposure,
    estimate_exposed_seconds,
    hierarchical_all_reduce_seconds,
    reduce_scatter_seconds,
    ring_all_reduce_seconds,
    ring_payload_bytes,
    tree_all_reduce_seconds,
)
from worldsize.core import Cluster, Link

NODE, NETWORK = Link(300e9, 1e-6), Link(12.5e9, 5e-6)
PAYLOAD, COMPUTE = 2e9, 0.250  # 1 B parameters in two bytes


def test_an_all_reduce_of_a_billion_parameters_on_eight_gpus_takes_the_textbooks_time() -> None:
    inside, across = (ring_all_reduce_seconds(PAYLOAD, 8, link) for link in (NODE, NETWORK))
    assert f"{1e3 * inside:.2f} ms, {efficiency(COMPUTE, inside):.1%}" == "11.68 ms, 95.5%"
    assert f"{1e3 * across:.2f} ms, {efficiency(COMPUTE, across):.1%}" == "280.07 ms, 47.2%"
    assert f"{across / inside:.1f} x" == "24.0 x"
    assert f"{1e3 * compute_seconds_for(0.8, across):,.0f} ms" == "1,120 ms"


def test_half_of_a_step_of_64_gpus_is_a_flat_ring_at_the_computed_payload() -> None:
    payload = ring_payload_bytes(COMPUTE, 64, NETWORK)
    assert payload == pytest.approx((0.250 - 126 * 5e-6) * 12.5e9 * 64 / 126)
    assert efficiency(COMPUTE, ring_all_reduce_seconds(payload, 64, NETWORK)) == pytest.approx(0.5)
    assert ring_payload_bytes(1e-6, 64, NETWORK) == 0


def test_a_round_takes_no_less_than_the_gap_and_incast_slows_a_link() -> None:
    busy = Link(1e9, 1e-5, gap=1e-3, incast=0.8)
    assert all_gather_seconds(8e3, 8, busy) == pytest.approx(7 * 1e-3)
    assert ring_all_reduce_seconds(8e9, 8, busy) == pytest.approx(14 * (1e-5 + 1.0))
    assert all_to_all_seconds(8e3, 4, 2, NODE, busy) == pytest.approx(1e-3)
    assert all_to_all_seconds(8e9, 4, 2, NODE, busy) == pytest.approx(1e-5 + 12.0 / 0.8)  # 2 ranks × 6 GB leave a node


@pytest.mark.parametrize("payload", [1e6, 1e8, 2e9])
def test_a_hierarchical_all_reduce_of_eight_nodes_is_faster_than_one_flat_ring(payload: float) -> None:
    flat = ring_all_reduce_seconds(payload, 64, NETWORK)
    by_node = hierarchical_all_reduce_seconds(payload, 8, 8, NODE, NETWORK)
    inside = 2 * (7 * 1e-6 + 7 / 8 * payload / 300e9)
    assert by_node == pytest.approx(inside + 2 * (7 * 5e-6 + 7 / 8 * payload / 8 / 12.5e9))
    assert by_node < flat
    shared = hierarchical_all_reduce_seconds(payload, 8, 8, NODE, NETWORK, shared=True)
    assert shared == pytest.approx(inside + 2 * (7 * 5e-6 + 7 / 8 * payload / 12.5e9))


def test_three_tiers_send_over_each_link_what_is_left_for_it() -> None:
    """There are 2 racks of 4 nodes of 2 GPUs: a rank sums 1/2 of the payload in its rack, and 1/8 between racks."""
    links = {"node": NODE, "rack": NETWORK, "network": Link(1e9, 20e-6)}
    cluster = Cluster("test", 8, 16, "cuda", "nccl", links=links, tiers={"rack": 4})
    inside = 2 * (1e-6 + PAYLOAD / 2 / 300e9)
    rack = 2 * 3 * (5e-6 + PAYLOAD / 2 / 4 / (12.5e9 / 2))
    uplink = 2 * (20e-6 + PAYLOAD / 8 / 2 / (1e9 / 8))
    assert estimate_hierarchical_seconds(PAYLOAD, cluster) == pytest.approx(inside + rack + uplink)
    without = replace(cluster, tiers={})
    two = hierarchical_all_reduce_seconds(PAYLOAD, 8, 2, NODE, links["network"], shared=True)
    assert estimate_hierarchical_seconds(PAYLOAD, without) == pytest.approx(two)
    assert find_slowest_link(cluster) == links["network"]
    assert all_reduce_seconds(PAYLOAD, cluster) == ring_all_reduce_seconds(PAYLOAD, 16, links["network"])
    assert [find_limiting_link(cluster, ranks) for ranks in (2, 8, 4, 16)] == [NODE, NETWORK, NETWORK, links["network"]]
    sent, leaving = estimate_hierarchical_bytes(PAYLOAD, cluster)
    assert sent == pytest.approx(PAYLOAD * (1 + 3 / 4 + 1 / 8))
    assert leaving == pytest.approx(PAYLOAD * (3 / 2 + 1 / 4))


def test_the_uplink_of_a_rack_carries_what_its_clients_send_to_servers_elsewhere() -> None:
    links = {"node": NODE, "rack": Link(1e9, 0.0), "network": Link(1e8, 0.0)}
    cluster = Cluster("test", 4, 8, "cpu", "gloo", links=links, tiers={"rack": 2})
    # servers 0 and 1 are on the first node: of 6 clients, 4 are in the other rack, and send 1e8 bytes each
    assert estimate_push_seconds(1e8, range(2, 8), [0, 1], cluster) == pytest.approx(4 * 1e8 / 1e8)
    # a server in each rack: those 4 send half of their bytes over the uplink of their rack
    assert estimate_push_seconds(1e8, [2, 3, 4, 5, 6, 7], [0, 4], cluster) == pytest.approx(4 * 0.5e8 / 1e8)
    # the node with a server serves all 6 clients; with a faster uplink, its own link is the slowest
    fast = replace(cluster, links={**links, "network": Link(1e10, 0.0)})
    assert estimate_push_seconds(1e8, range(2, 8), [0, 1], fast) == pytest.approx(6 * 1e8 / 1e9)


def test_a_reduce_scatter_and_an_all_gather_take_the_time_of_an_all_reduce() -> None:
    halves = reduce_scatter_seconds(1e9, 5, NODE) + all_gather_seconds(1e9, 5, NODE)
    assert halves == ring_all_reduce_seconds(1e9, 5, NODE) == pytest.approx(8e-6 + 8 / 5 * 1e9 / 300e9)


def test_one_rank_communicates_in_no_time() -> None:
    assert ring_all_reduce_seconds(1e9, 1, NODE) == tree_all_reduce_seconds(1e9, 1, NODE) == 0
    assert hierarchical_all_reduce_seconds(1e9, 1, 1, NODE, NETWORK) == 0


def test_a_tree_is_faster_for_small_payloads_and_a_ring_for_large_ones() -> None:
    assert tree_all_reduce_seconds(1e3, 1024, NETWORK) < ring_all_reduce_seconds(1e3, 1024, NETWORK)
    assert ring_all_reduce_seconds(1e11, 1024, NETWORK) < tree_all_reduce_seconds(1e11, 1024, NETWORK)


@pytest.mark.parametrize(("servers", "of_ring"), [(4, 1.5), (2, 0.75), (1, 0.375)])
def test_servers_compare_with_a_ring_of_four_as_in_the_paper(servers: int, of_ring: float) -> None:
    """Jiang et al. compare one direction of servers, max(M/B, nM/kB), with a whole ring, 2 (n − 1) M / n B."""
    link = Link(1e9, 0.0)
    cluster = Cluster("test", 1, 8, "cpu", "gloo", links={"node": link})
    one_way = estimate_push_seconds(1e8, range(4), range(servers), cluster)
    assert ring_all_reduce_seconds(1e8, 4, link) / one_way == pytest.approx(of_ring)


def test_the_bubble_shrinks_with_more_micro_batches_and_with_more_stages_a_rank() -> None:
    assert bubble_share(1, 8) == 0
    assert bubble_share(4, 8) == 3 / 11
    assert bubble_share(4, 8, 2) == 3 / 19
    assert bubble_share(4, 8, 2, splits_backward=True) == 1 / 17


def test_messages_of_an_all_to_all_share_the_link_of_their_node() -> None:
    # 4 nodes of 2: each rank sends an eighth to six ranks elsewhere and to one beside it
    link = Link(1e9, 1e-5)
    assert all_to_all_seconds(8e8, 4, 2, NODE, link) == pytest.approx(1e-5 + 2 * 6 * 1e8 / 1e9)
    assert all_to_all_seconds(8e8, 1, 8, NODE, link) == pytest.approx(1e-6 + 7 * 1e8 / 300e9)


def test_the_last_bucket_does_not_overlap_with_the_backward_pass() -> None:
    seconds = partial(ring_all_reduce_seconds, ranks=8, link=Link(1e9, 0.0))  # 1.75 ns a byte
    assert estimate_bucketed_exposure(1e8, 25e6, 10.0, seconds) == pytest.approx(seconds(25e6))
    assert estimate_bucketed_exposure(1e8, 25e6, 0.0, seconds) == pytest.approx(seconds(1e8))
    # buckets are ready at 25, 50, 75 and 100 ms, and take 43.75 ms each, one after the other
    assert estimate_bucketed_exposure(1e8, 25e6, 0.1, seconds) == pytest.approx(0.025 + 4 * 0.04375 - 0.1)


def test_only_communication_that_outlasts_compute_is_exposed() -> None:
    assert estimate_exposed_seconds(0.3, 0.2) == pytest.approx(0.1)
    assert estimate_exposed_seconds(0.1, 0.2) == 0
