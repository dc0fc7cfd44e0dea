"""Backward passes in two parts: first the input gradients of layers, later their weight gradients.

A pipeline stage sends its input gradient before it computes weight gradients (Qi et al. 2024, arXiv 2401.10241). Linear
layers and convolutions have separate autograd graphs. Each graph runs twice: for the input gradient in the backward
pass of the stage, and for the weight gradients when they are due. All other gradients belong to the first part. Both
parts run the operations of an undivided backward pass, so the bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError
from worldsize.strategies.chunk_tensor import Chunks

_LAYERS = {each.forward for each in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}

Part = Literal["inputs", "weights"]
Deferred = list[Callable[[], None]]
"""Functions that add weight gradients to the parameters, in the order of the backward pass."""

_deferred: list[Deferred] = []  # of the current backward pass; global, since autograd may run it in a different thread
_parts: list[Part] = []  # the part that is computed now


@contextmanager
def deferring_weights() -> Iterator[Deferred]:
    """Defer the weight gradients of the backward pass within the block; yield the functions that add them."""
    deferred: Deferred = []
    _deferred.append(deferred)
    try:
        yield deferred
    finally:
        _deferred.pop()


def is_needed(part: Part) -> bool:
    """Return whether the current backward pass of a layer needs this part; ``ctx.needs_input_grad`` has both."""
    return not _parts or _parts[-1] == part


def allow_deferring(stage: nn.Module) -> None:
    """Give the linear layers and convolutions of ``stage`` separate graphs.

    Layers that share a parameter with others are omitted, to keep the summation order of its gradients.
    """
    holders = Counter(id(own) for module in stage.modules() for own in module.parameters(recurse=False))
    for module in stage.modules():
        is_sole = all(holders[id(own)] == 1 for own in module.parameters(recurse=False))
        if type(module).forward in _LAYERS and is_sole:
            module.forward = partial(_call_apart, module, module.forward)


def _call_apart(module: nn.Module, call: Callable[..., Tensor], input: Tensor) -> Tensor:
    weights = [own for own in module.parameters(recurse=False) if own.requires_grad]
    # a weight that is computed from other tensors needs the whole graph
    is_own = "weight" in dict(module.named_parameters(recurse=False)) and all(own.is_leaf for own in weights)
    if not (weights and is_own and torch.is_grad_enabled()) or isinstance(input, Chunks):
        return call(input)
    output: Tensor = _Apart.apply(call, input, *weights)
    return output


@final
class _Apart(torch.autograd.Function):
    """Calls a layer in a separate graph; ``weights`` are its trainable parameters."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Tensor], inputs: Tensor, *weights: Tensor) -> Tensor:
        with torch.enable_grad():
            own = inputs.detach().requires_grad_(inputs.requires_grad)
            ctx.output = call(own)
        ctx.inputs, ctx.weights = own, weights
        output: Tensor = ctx.output.detach()
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "a gradient is differentiated again (create_graph=True), but this schedule defers weight gradients. "
                "Set strategy.schedule=interleaved."
            )
        of_inputs = None
        if ctx.needs_input_grad[1]:
            (of_inputs,) = _differentiate("inputs", ctx.output, [ctx.inputs], gradients)
        if not _deferred:
            return None, of_inputs, *_differentiate("weights", ctx.output, ctx.weights, gradients)
        _deferred[-1].append(partial(_add_gradients, ctx.output, ctx.weights, gradients))
        return None, of_inputs, *(None for _ in ctx.weights)


def _differentiate(part: Part, output: Tensor, inputs: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``inputs``, given the gradients of ``output``, in their shapes; None if unused."""
    _parts.append(part)
    try:
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            [output], inputs, gradients, retain_graph=True, allow_unused=True
        )
    finally:
        _parts.pop()
    return found


def _add_gradients(output: Tensor, weights: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    for own, gradient in zip(weights, _differentiate("weights", output, weights, gradients), strict=True):
        if gradient is not None:
            _add_gradient(own, gradient)


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def hold_gradients(stage: nn.Module, deferred: Deferred) -> None:
    """Move the gradients of a pass from the parameters to ``deferred``, to keep them apart from later passes."""
    for own in stage.parameters():
        if own.grad is not None:
            deferred.append(partial(_add_gradient, own, own.grad))
            own.grad = None
