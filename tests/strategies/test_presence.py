"""A rank that has all its gradients reads no tensor to find that out: it would wait for its GPU in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from worldsize.core import Reduction, World
from worldsize.strategies.gradient_reducer import PresenceExchange
from worldsize.strategies.unit_gradients import scalar_gradients
from worldsize.testing.worlds import run_in_worlds


class Waits(TorchFunctionMode):
    """Counts copies between host and device that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.number += func in (torch.tensor, Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.cpu, Tensor.to)
        return func(*args, **(kwargs or {}))


def test_only_a_rank_that_lacks_a_gradient_waits_for_the_others() -> None:
    def exchanged(world: World) -> tuple[list[bool], bool]:
        assert world.group is not None
        exchange = PresenceExchange(world.group, world.device)
        with Waits() as waits:
            present = exchange.present_anywhere([True, world.rank == 0])
        lacks_none = exchange.present_anywhere([True, True])
        assert [*lacks_none] == [True, True]
        return [*present], waits.number > 0

    assert run_in_worlds(exchanged, 2) == [([True, True], False), ([True, True], True)]


@pytest.mark.parametrize("reduce", ["flat", "ordered"])
def test_only_scalars_that_a_rank_lacks_are_waited_for(reduce: Reduction) -> None:
    def gradients(world: World) -> tuple[list[Any], int]:
        assert world.group is not None
        model = nn.ParameterList([nn.Parameter(torch.tensor(1.0)) for _ in range(3)])
        sums = scalar_gradients(reduce, model, world.group)
        sums.begin_step(2, 4)
        loss_scale = 0.5 if reduce == "flat" else 1.0  # see GradientReducer.run
        for batch in range(2):
            used = model[0] + model[1] if world.rank == 0 and batch == 0 else model[0]
            (loss_scale * used).backward()
            sums.add(batch)
        with Waits() as waits:
            sums.set_means()
        return [None if each.grad is None else float(each.grad) for each in model], waits.number

    # the third has none on any rank; the second has one in one of four micro-batches
    assert run_in_worlds(gradients, 2) == [([1.0, 0.25, None], 1), ([1.0, 0.25, None], 2)]
