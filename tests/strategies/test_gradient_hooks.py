"""Hooks on the gradients of parameters are called once per step while they are registered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from worldsize.core import ConfigError
from worldsize.strategies.parameter_changes import GradientHooks


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_a_loss_removes_is_not_called_again(kind: str) -> None:
    called: list[str] = []
    parameter = nn.Parameter(torch.ones(2))
    register: Callable[[Callable[[Tensor], None]], RemovableHandle] = getattr(parameter, kind)
    first, _ = register(lambda _: called.append("first")), register(lambda _: called.append("second"))
    hooks = GradientHooks([parameter])
    for _ in range(2):
        with hooks.suspend_hooks():
            first.remove()
            parameter.sum().backward()  # type: ignore[no-untyped-call]
            assert len(called) in (0, 1)
        hooks.run([parameter])
    assert called == ["second", "second"]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2, 2]


def test_a_hook_that_a_loss_registers_beside_another_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="a gradient hook was registered"), GradientHooks([parameter]).suspend_hooks():
        parameter.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
