"""Measures the waits of a mesh's ranks inside PyTorch's tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import PipelineStage

from worldsize.dist.step_timer import mark, phase
from worldsize.errors import WorldsizeError
from worldsize.strategies.mesh.edges import Edges
from worldsize.strategies.mesh.stage import Stage


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
    """A stage whose passes count as computing; between them the schedule waits for neighbour stages.

    Each pass is told to the sums of the stage, whose module is ``stage``. ``edges``: send its messages, if waits for
    them are to end when the gang does.
    """

    def __init__(self, stage: Stage, *args: Any, edges: Edges | None, **kwargs: Any) -> None:
        super().__init__(stage, *args, **kwargs)
        assert stage.sums is not None
        self._sums, self._edges, self._at = stage.sums, edges, stage.at

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if fwd_chunk_id == 0:
            self._sums.begin_passes()
        self._at("step:forward")
        with phase("compute"):
            with _refusals_shown():
                output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            self._sums.forwarded(fwd_chunk_id)
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._at("step:backward")
        with phase("compute"):
            with _refusals_shown():
                super().backward_one_chunk(*args, **kwargs)
            self._sums.backwarded()
        self._at("step:reduce")

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._interruptible(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._interruptible(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._interruptible(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._interruptible(super().get_bwd_send_ops(bwd_chunk_id))

    def _interruptible(self, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        return self._edges.messages(messages) if self._edges else messages


@contextmanager
def _refusals_shown() -> Iterator[None]:
    """Raise a refusal of ours as it is: torch hides it behind the arguments of the stage."""
    refusal = None
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error.__cause__, WorldsizeError):
            raise
        refusal = error.__cause__
    if refusal is not None:
        raise refusal  # here it keeps its own cause
