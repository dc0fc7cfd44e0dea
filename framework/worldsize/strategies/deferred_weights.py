"""Backward passes in two parts: first input gradients of layers, later weight gradients.

A pipeline stage sends its input gradient before it computes weight gradients (Qi et al. 2024, arXiv 2401.10241). Linear
layers and convolutions have separate autograd graphs. Each graph runs twice: for the input gradient in the backward
pass of the stage, and for the weight gradients when they are due. All other gradients belong to the first part. Both
parts run the operations of an undivided backward pass, so the bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, final

import torch
from torch import _C, Tensor, nn

from worldsize.core import ConfigError
from worldsize.strategies.chunk_tensor import Chunks
from worldsize.strategies.token_shard import TokenShard

_FORWARDS = {each.forward for each in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}

Part = Literal["inputs", "weights"]


@final
@dataclass
class _Uses:
    """The calls of one layer in a backward pass; tensors may have any shape."""

    weights: Sequence[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)  # of the outputs


@final
class DeferredWeights:
    """The weight gradients of a stage's backward pass, to be computed later."""

    def __init__(self) -> None:
        self._uses: dict[int, _Uses] = {}
        self._held: list[tuple[Tensor, Tensor]] = []  # parameters, and their gradients from the first part

    def defer(self, weights: Sequence[Tensor], output: Tensor, gradient: Tensor) -> None:
        """Defer the gradients of ``weights``, given a layer's ``output`` and its gradient."""
        uses = self._uses.setdefault(id(weights[0]), _Uses(weights))
        uses.outputs.append(output)
        uses.gradients.append(gradient)

    def hold_gradients(self, stage: nn.Module) -> None:
        """Hold the gradients of the first part, apart from those of later passes.

        Raises:
            ConfigError: a weight is used by a deferred layer and directly, so the order of sums would change.
        """
        deferred = {id(own) for uses in self._uses.values() for own in uses.weights}
        for name, own in stage.named_parameters():
            if own.grad is None:
                continue
            if id(own) in deferred:
                raise ConfigError(
                    f"the parameter {name} of a stage is used both by its layer and directly, but this schedule "
                    "defers the gradients of the layer, so the gradients would be added in a different order. Set "
                    "strategy.schedule=interleaved."
                )
            self._held.append((own, own.grad))
            own.grad = None

    def add_gradients(self) -> None:
        """Compute the deferred gradients, and add all gradients of the pass to the parameters."""
        for own, gradient in self._held:
            _add_gradient(own, gradient)
        for uses in self._uses.values():  # all calls of a layer at once, since autocast may share a cast of the weight
            found = _differentiate("weights", uses.outputs, uses.weights, uses.gradients, retain_graph=False)
            for own, each in zip(uses.weights, found, strict=True):
                if each is not None:
                    _add_gradient(own, each)
        self._held, self._uses = [], {}


_passes: list[DeferredWeights] = []  # the current backward pass; global, since autograd may run in a different thread
_parts: list[Part] = []  # the part of a layer that is computed now


@contextmanager
def deferring_weights() -> Iterator[DeferredWeights]:
    """Defer the weight gradients of the backward pass within the block."""
    deferred = DeferredWeights()
    _passes.append(deferred)
    try:
        yield deferred
    finally:
        _passes.pop()


def is_needed(part: Part) -> bool:
    """Return whether a layer's backward pass needs this part now.

    For autograd functions inside such a layer. Their ``ctx.needs_input_grad`` does not depend on the part.
    """
    return not _parts or _parts[-1] == part


def allow_deferring(stage: nn.Module) -> None:
    """Give the linear layers and convolutions of ``stage`` separate graphs.

    Layers that share a parameter with others are skipped, to keep the summation order of its gradients, and so are
    layers with a custom forward method.
    """
    holders = Counter(id(own) for module in stage.modules() for own in module.parameters(recurse=False))
    for module in stage.modules():
        is_sole = all(holders[id(own)] == 1 for own in module.parameters(recurse=False))
        is_plain = "forward" not in vars(module) or getattr(module.forward, "is_separable", False)
        if type(module).forward in _FORWARDS and is_sole and is_plain:
            module.forward = partial(_call_apart, module, module.forward)


def _call_apart(module: nn.Module, call: Callable[..., Tensor], input: Tensor) -> Tensor:
    """Call a layer in a separate graph if possible; users may pass ``input`` by keyword."""
    own: list[Any] = [each for each in (module.weight, module.bias) if each is not None]
    weights = [each for each in own if each.requires_grad]
    has_hooks: Any = _C._autograd._top_saved_tensors_default_hooks(False)  # a checkpoint would run for each part
    if (
        not (weights and torch.is_grad_enabled())
        or not all(isinstance(each, nn.Parameter) for each in own)  # computed from others, outside of the layer's graph
        or isinstance(input, Chunks | TokenShard)
        or _C._are_functorch_transforms_active()
        or has_hooks
    ):
        return call(input)
    output: Tensor = _Apart.apply(call, input, *weights)
    return output


@final
class _Apart(torch.autograd.Function):
    """Calls a layer in a separate graph; ``weights`` are its trainable parameters."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Tensor], inputs: Tensor, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            own = inputs.detach().requires_grad_(inputs.requires_grad)
            ctx.output = call(own)
        ctx.inputs, ctx.weights = own, weights
        output: Tensor = ctx.output.detach()
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,), missing = gradients, [None for _ in ctx.weights]
        if torch.is_grad_enabled():
            raise ConfigError(
                "double backward (create_graph=True) is not supported with this schedule, because it defers weight "
                "gradients. Set strategy.schedule=interleaved."
            )
        if gradient is None:
            return None, None, *missing
        of_inputs = None
        if ctx.needs_input_grad[1]:
            (of_inputs,) = _differentiate("inputs", [ctx.output], [ctx.inputs], [gradient])
        if not (_passes and _accumulates(ctx)):
            return None, of_inputs, *_differentiate("weights", [ctx.output], ctx.weights, [gradient])
        _passes[-1].defer(ctx.weights, ctx.output, gradient)
        ctx.output = ctx.inputs = None  # the schedule keeps this node until the end of the step
        return None, of_inputs, *missing


def _accumulates(ctx: Any) -> bool:
    """Return whether backward accumulates into ``.grad``; False in torch.autograd.grad."""
    try:
        return _C._will_engine_execute_node(ctx.next_functions[-1][0])  # of the last weight
    except RuntimeError:  # raised for a leaf whose gradient torch.autograd.grad returns
        return False


def _differentiate(
    part: Part,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    retain_graph: bool = True,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``inputs``, given the gradients of ``outputs``; None if unused."""
    _parts.append(part)
    try:
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            outputs, inputs, gradients, retain_graph=retain_graph, allow_unused=True
        )
    finally:
        _parts.pop()
    return found


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
