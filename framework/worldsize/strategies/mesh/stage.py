"""One pipeline stage, for recipes written without stages, and timing of sharded layers.

The timed waits are inside PyTorch's tensor and pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import PipelineStage

from worldsize.collectives.step_timer import mark_phase, measure_phase
from worldsize.core import Batch, ConfigError, Loss, MicroBatch, PrecisionName, Recipe
from worldsize.errors import WorldsizeError
from worldsize.seeds import derive_seed, seed_generators
from worldsize.strategies.mesh.groups import Edges
from worldsize.strategies.mesh.sums import StageSums
from worldsize.strategies.model_replica import autocast

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@final
class KnownOutput(nn.Module):
    """Stands in for the model in loss and evaluation: returns the output of the stages, once.

    All other uses of the model are refused, since this rank has only some of its layers. For example, a weight penalty
    over an empty list of parameters would silently be zero.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output: Tensor | None = output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._output is None:
            raise ConfigError(
                "the recipe calls its model twice per batch, but a pipeline supports one call. Set strategy.pipeline=1."
            )
        output, self._output = self._output, None
        return output

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._create_refusal(name)

    def __getitem__(self, index: Any) -> NoReturn:
        raise self._create_refusal(f"[{index!r}]")

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._create_refusal("parameters()")

    def named_buffers(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._create_refusal("buffers()")

    def named_modules(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._create_refusal("modules()")

    def named_children(self) -> NoReturn:
        raise self._create_refusal("children()")

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._create_refusal("state_dict()")

    @staticmethod
    def _create_refusal(what: str) -> ConfigError:
        return ConfigError(
            f"the recipe's loss or evaluation uses {what} of its model, but a pipeline process has only part of the "
            "model. Set strategy.pipeline=1, or use only the output of model(...)."
        )


@final
class Stage(nn.Module):
    """Consecutive layers of the model; the input of the first stage is ``Recipe.model_inputs``.

    The first stage uses the random stream of the micro-batch, so that code before the model generates the same random
    numbers as without a pipeline. Each other stage has its own stream, so that dropout masks differ between stages.
    """

    def __init__(
        self, recipe: Recipe, layers: Sequence[nn.Module], *, index: int, device: torch.device, precision: PrecisionName
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.index = index
        self._recipe, self._device, self._precision = recipe, device, precision
        self.at: Callable[[str], None] = lambda point: None  # called where a fault may be injected
        self.sums: StageSums | None = None  # set after sharding
        self._batches: Sequence[MicroBatch] = ()
        self._inputs: tuple[Any, ...] | None = None

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Begin a step with ``batches``, to which passes refer by index."""
        self._batches = batches

    def register_index_hook(self) -> None:
        """Register a hook that pops the micro-batch's index from the arguments of each pass.

        It must run before all other hooks, while the index is on the CPU.
        """
        self.register_forward_pre_hook(self._prepare_pass, prepend=True, with_kwargs=True)

    def _prepare_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if "number" not in kwargs:
            return None
        batch = self._batches[int(kwargs["number"])]
        seed_generators(derive_seed(batch.seed, "stage", self.index) if self.index else batch.seed, self._device)
        if self.index > 0:
            return args, {}
        self.feed_batch(batch.data)
        return (), {}

    def feed_batch(self, batch: Batch) -> None:
        """Set the input for the first stage's next pass."""
        self._inputs = self._recipe.model_inputs(batch)

    def forward(self, *hidden: Tensor) -> Tensor:
        args = hidden if self._inputs is None else self._inputs
        self._inputs = None
        with autocast(self._device, self._precision):
            first, *others = self.layers
            output: Tensor = first(*args)
            for layer in others:
                output = layer(output)
        return output.contiguous()

    def compute_loss(self, output: Tensor, number: Tensor) -> Loss:
        """Return the loss of micro-batch ``number``, a scalar, from the last stage's ``output``."""
        batch = self._batches[int(number)]
        seed_generators(batch.seed, self._device)  # the same random stream as on the first stage
        with autocast(self._device, self._precision):
            return self._recipe.micro_batch_loss(KnownOutput(output), batch)


def time_column(layer: nn.Module) -> None:
    """Time the all-reduce of input gradients in a layer sharded by output features.

    Call it after ``parallelize_module``, whose own hook must run before this one.
    """
    layer.register_forward_pre_hook(_time_gradient)


def _time_gradient(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Hook the backward pass that sums the gradients of the inputs, which are DTensors here."""
    for tensor in args:
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: mark_phase("communication"))
            tensor.grad_fn.register_hook(lambda *_: mark_phase("compute"))


def time_row(layer: nn.Module) -> None:
    """Time the all-reduce of the output in a layer sharded by input features.

    Call it after ``parallelize_module``, whose own hook must run before this one.
    """
    layer.register_forward_hook(_wait_for_output)


def _wait_for_output(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Wait for the output here, not in the next operation (usually the residual connection)."""
    if isinstance(output, AsyncCollectiveTensor):
        with measure_phase("communication"):
            output.trigger_wait()  # type: ignore[no-untyped-call]


@final
class TimedStage(PipelineStage):
    """A pipeline stage that times its passes as computation, apart from the schedule's waits.

    It reports each pass to the sums of ``stage``. ``edges``: carries messages if their waits must end with the gang.
    """

    def __init__(self, stage: Stage, *args: Any, edges: Edges | None, **kwargs: Any) -> None:
        super().__init__(stage, *args, **kwargs)
        assert stage.sums is not None
        self._sums, self._edges, self._at = stage.sums, edges, stage.at

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if fwd_chunk_id == 0:
            self._sums.begin_passes()
        self._at("step:forward")
        with measure_phase("compute"):
            with _refusals_shown():
                output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            self._sums.record_forward(fwd_chunk_id)
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._at("step:backward")
        with measure_phase("compute"):
            with _refusals_shown():
                super().backward_one_chunk(*args, **kwargs)
            self._sums.record_backward()
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
    """Unwrap our own errors, which torch hides in an error with the stage's arguments."""
    refusal = None
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error.__cause__, WorldsizeError):
            raise
        refusal = error.__cause__
    if refusal is not None:
        raise refusal  # raised outside the handler, to keep its own cause
