"""Sums by tier train like plain sums, and sums of elastic runs have the same bits on any network."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.strategies.test_elastic import trained
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.strategies.ddp import DDP
from worldsize.strategies.single import Single
from worldsize.testing.worlds import run_in_worlds


@pytest.fixture(scope="module")
def alone() -> Mapping[str, Tensor]:
    """The weights of a single process."""
    (state,) = run_in_worlds(lambda world: trained(Single(reduce="ordered"), world), 1)
    return state


@pytest.mark.parametrize("tiers", [{}, {"rack": 2}])
def test_an_elastic_run_ends_with_the_bits_of_one_process_with_and_without_tiers(
    alone: Mapping[str, Tensor], tiers: dict[str, int]
) -> None:
    states = run_in_worlds(lambda world: trained(DDP(reduce="ordered"), world), 4, local_size=1, tiers=tiers)
    assert {state_digest(tensor_digests(state)) for state in states} == {state_digest(tensor_digests(alone))}


@pytest.mark.parametrize(
    ("strategy", "most"),
    [
        (DDP(reduce="hierarchical", bucket_mb=0.001), 1e-5),
        (DDP(reduce="hierarchical", compress="int8", bucket_mb=0.001), 2e-2),
        (DDP(reduce="hierarchical", compress="powersgd", powersgd_rank=8), 1e-1),
    ],
    ids=str,
)
def test_sums_by_tier_end_near_the_weights_of_one_process(
    alone: Mapping[str, Tensor], strategy: DDP, most: float
) -> None:
    first, *others = run_in_worlds(lambda world: trained(strategy, world), 4, local_size=1, tiers={"rack": 2})
    weights = [name for name in alone if name.endswith(("weight", "bias"))]
    difference = torch.cat([(first[name] - alone[name]).flatten() for name in weights])
    size = torch.cat([alone[name].flatten() for name in weights]).norm()
    assert 0 < difference.norm() < most * size
    assert all(torch.equal(first[name], other[name]) for other in others for name in weights)
