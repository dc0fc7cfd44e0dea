"""The norm of a gradient does not depend on its position in a DDP bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import World
from worldsize.strategies import gradient_reducer
from worldsize.strategies.ddp_reducers import OrderedReducer
from worldsize.testing.worlds import run_in_worlds


def test_elastic_norms_on_an_accelerator_are_taken_of_aligned_tensors_one_by_one() -> None:
    """CPU kernels stand in for CUDA's, where addresses affect the summation order."""

    def body(world: World) -> tuple[list[int], list[int], float, float, float]:
        torch.manual_seed(0)
        parts = (nn.Conv2d(3, 6, 5), nn.Flatten(), nn.Linear(6 * 28 * 28, 83), nn.Linear(83, 10), nn.Linear(10, 127))
        model = nn.Sequential(*parts)
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        for _ in range(2):  # DDP rebuilds the buckets after the first pass
            model.zero_grad()
            replica(torch.randn(2, 3, 32, 32)).square().sum().backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        expected = torch.stack([each.double().square().sum() for each in gradients]).sum().sqrt()
        calls, norms = list[list[Tensor]](), torch._foreach_norm

        def spied(tensors: list[Tensor], *rest: Any) -> Any:
            calls.append(tensors)
            return norms(tensors, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_foreach_norm", spied)
            patch.setattr(gradient_reducer, "is_accelerator", lambda device: True)
            reducer = OrderedReducer.__new__(OrderedReducer)  # its clipping does not need it
            norm = reducer.clip(list(model.parameters()), 1.0)
        left = torch.stack([each.double().square().sum() for each in gradients]).sum().sqrt()
        addresses = [each.data_ptr() % 16 for (each,) in calls]
        return [each.data_ptr() % 16 for each in gradients], addresses, float(norm), float(expected), float(left)

    ((before, taken, norm, expected, left), *_) = run_in_worlds(body, 2)
    assert any(before), "this model must have gradients that are not aligned"
    assert taken == [0] * 8
    assert norm == pytest.approx(expected, rel=1e-5)
    assert left == pytest.approx(1, rel=1e-5)
