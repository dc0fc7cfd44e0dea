"""Measures the waits of a mesh's ranks inside PyTorch's tensor and pipeline parallelism."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import PipelineStage

from worldsize.collectives.step_timer import mark, phase


def time_column(layer: nn.Module) -> None:
    """Measure the all-reduce of input gradients of a layer that is divided by its output features.

    Call it after ``parallelize_module``, whose own hook must run before this one.
    """
    layer.register_forward_pre_hook(_time_gradient)


def _time_gradient(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Hook the backward pass that sums gradients of the inputs, which are DTensors by now."""
    for tensor in args:
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: mark("communication"))
            tensor.grad_fn.register_hook(lambda *_: mark("compute"))


def time_row(layer: nn.Module) -> None:
    """Measure the all-reduce of the output of a layer that is divided by its input features.

    Call it after ``parallelize_module``, whose own hook must run before this one.
    """
    layer.register_forward_hook(_wait_for_output)


def _wait_for_output(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Wait here rather than in the next operation, usually the residual connection, which follows immediately."""
    if isinstance(output, AsyncCollectiveTensor):
        with phase("communication"):
            output.trigger_wait()  # type: ignore[no-untyped-call]


@final
class TimedStage(PipelineStage):
    """A stage whose passes count as computing; between them the schedule waits for neighbour stages."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with phase("compute"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with phase("compute"):
            return super().backward_one_chunk(*args, **kwargs)
