"""One pipeline stage, for recipes written without stages, with timing of its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from worldsize.collectives.step_timer import measure_phase
from worldsize.core import Batch, ConfigError, Loss, MicroBatch, PrecisionName, Recipe
from worldsize.errors import WorldsizeError
from worldsize.seeds import derive_seed, get_generator_state, seed_generators
from worldsize.strategies.chunk_tensor import ChunkLayout, Chunks
from worldsize.strategies.deferred_weights import DeferredWeights, deferring_weights
from worldsize.strategies.layer_streams import LayerStreams
from worldsize.strategies.mesh.groups import Edges
from worldsize.strategies.mesh.sums import StageSums
from worldsize.strategies.model_replica import autocast
from worldsize.strategies.token_shard import TokenShard

SEQUENCE = 1  # dimension of sequences in tensors between stages; dimension 0 is the batch
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@final
class KnownOutput(nn.Module):
    """Stands in for the model in loss and evaluation.

    Returns the output of the stages, once, after ``on_call()``. All other uses of the model are refused, since this
    rank has only some of its layers. For example, a weight penalty over an empty list of parameters would silently be
    zero.
    """

    def __init__(self, output: Tensor, on_call: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._output: Tensor | None = output
        self._on_call = on_call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._output is None:
            raise ConfigError(
                "the recipe calls its model twice per batch, but a pipeline supports one call. Set strategy.pipeline=1."
            )
        output, self._output = self._output, None
        self._on_call()
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


def _return_whole(output: Tensor) -> Tensor:
    return output


@final
class Stage(nn.Module):
    """Consecutive layers of the model; the input of the first stage is ``Recipe.model_inputs``.

    The first stage uses the random stream of the micro-batch, so that code before the model generates the same random
    numbers as without a pipeline. Other stages begin with the stream of their first layer, or if layers do not have
    separate streams, with one derived from the stage's index.
    """

    def __init__(
        self,
        recipe: Recipe,
        layers: Sequence[nn.Module],
        *,
        index: int,
        first: int,
        device: torch.device,
        precision: PrecisionName,
        chunks: ChunkLayout | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.index, self._first, self.is_last = index, first, is_last
        self._wrap_output: Callable[[Tensor], Tensor] = _return_whole  # for loss and evaluation, in the last stage
        self._recipe, self._device, self._precision, self.chunks = recipe, device, precision, chunks
        self._is_trial = False  # whether batches are already cut
        self.at: Callable[[str], None] = lambda point: None  # called where a fault may be injected
        self.sums: StageSums | None = None  # set after sharding, as are the streams
        self.streams: LayerStreams | None = None
        self._batches: Sequence[MicroBatch] = ()
        self._inputs: tuple[Any, ...] | None = None

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Begin a step with ``batches``, to which passes refer by index."""
        self._batches = batches

    def register_index_hook(self) -> None:
        """Register a hook that pops the micro-batch's index from the arguments of each pass.

        The hook must run before all other hooks, while the index is on the CPU.
        """
        self.register_forward_pre_hook(self._prepare_pass, prepend=True, with_kwargs=True)

    def _prepare_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if "number" not in kwargs:
            return None
        batch = self._batches[int(kwargs["number"])]
        self.begin_stream(batch.seed)
        if self.index > 0:
            return args, {}
        self.feed_batch(batch.data)
        return (), {}

    def begin_stream(self, seed: int) -> None:
        """Begin the random stream of this stage for a batch with ``seed``."""
        assert self.streams is not None
        self.streams.begin(seed)
        if self.index == 0:
            return
        if self.streams.by_layer:
            self.streams.enter(self._first)
        else:
            seed_generators(derive_seed(seed, "stage", self.index), self._device)

    def feed_batch(self, batch: Batch) -> None:
        """Set the input for the first stage's next pass."""
        chunks = None if self._is_trial else self.chunks
        data = batch if chunks is None else self._recipe.cut_sequences(batch, chunks.cut)
        self._inputs = self._recipe.model_inputs(data)

    def forward(self, *hidden: Tensor) -> Tensor:
        for each in hidden:
            if each.requires_grad:
                each.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]  # gloo requires it of messages
        self._wrap_output = _return_whole
        args: tuple[Any, ...] = hidden if self._inputs is None else self._inputs
        if self._inputs is None and self.chunks is not None:
            args = tuple(self.chunks.wrap(each, SEQUENCE) for each in hidden)
        self._inputs = None
        output: Tensor
        with autocast(self._device, self._precision):
            for place, layer in enumerate(self.layers, self._first):
                args = (self._run_layer(place, layer, args),)
        (output,) = args
        if not output.is_contiguous() and self.streams is not None and self.streams.by_layer:
            raise ConfigError(
                f"the output of layer {place} in Recipe.layers is not contiguous, so the next layer could round "
                "differently in another stage. Return output.contiguous() from the layer, or set strategy.pipeline=1."
            )
        if isinstance(output, Chunks):
            output = output.join(SEQUENCE)
        if isinstance(output, TokenShard):
            if self.is_last:
                self._wrap_output = partial(TokenShard, split=output.token_split, is_flat=output.is_flat)
                return output.own
            output = output.gather_all()
        return output.contiguous()

    def _run_layer(self, place: int, layer: nn.Module, args: tuple[Any, ...]) -> Tensor:
        """Run the layer at ``place``.

        Raises:
            ConfigError: the layer draws random numbers, but does not have a separate random stream.
        """
        assert self.streams is not None
        self.streams.expect(place)
        if place not in self.streams.unseen:
            output: Tensor = layer(*args)
            return output
        before = get_generator_state(self._device)
        output = layer(*args)
        if not torch.equal(before, get_generator_state(self._device)):
            raise ConfigError(
                f"layer {place} in Recipe.layers, {type(layer).__name__}, draws random numbers, but neither it nor "
                "the layer before it is a module of the model, so the numbers would depend on strategy.pipeline. "
                "Make the layer a module of the model, or set strategy.pipeline=1."
            )
        return output

    def compute_loss(self, output: Tensor, number: Tensor) -> Loss:
        """Return the loss of micro-batch ``number``, a scalar, from the last stage's ``output``."""
        batch = self._batches[int(number)]
        assert self.streams is not None
        self.streams.begin(batch.seed)  # as before the first stage, then as after the model
        with autocast(self._device, self._precision):
            model = self.create_model(output)
            if self.chunks is None:
                return self._recipe.micro_batch_loss(model, batch)
            return self.chunks.compute_loss(self._recipe, model, batch)

    def create_model(self, output: Tensor) -> KnownOutput:
        """Return a stand-in for the model that returns ``output``, for loss and evaluation."""
        assert self.streams is not None
        known = self._wrap_output(output) if self.chunks is None else self.chunks.wrap(output, SEQUENCE)
        return KnownOutput(known, self.streams.enter_loss)

    @contextmanager
    def trying(self, chunks: ChunkLayout | None) -> Iterator[None]:
        """Compute in float32, with batches cut as in ``chunks`` (None: whole sequences)."""
        kept = self.chunks, self._precision
        self.chunks, self._precision, self._is_trial = chunks, "fp32", True
        try:
            yield
        finally:
            (self.chunks, self._precision), self._is_trial = kept, False

    def evaluate(self, output: Tensor, data: Batch) -> Mapping[str, tuple[Tensor | float, ...]]:
        """Return a batch's metrics, as ``Recipe.evaluate`` does, from the last stage's output."""
        model = self.create_model(output)
        if self.chunks is None:
            return self._recipe.evaluate(model, data)
        return self.chunks.evaluate(self._recipe, model, data)


@final
class TimedStage(PipelineStage):
    """A pipeline stage that times its passes as computation, apart from the schedule's waits.

    Each pass is recorded in the sums of ``stage``. ``edges``: for messages whose waits must end with the membership.
    """

    def __init__(self, stage: Stage, *args: Any, edges: Edges | None, **kwargs: Any) -> None:
        super().__init__(stage, *args, **kwargs)
        assert stage.sums is not None
        self._sums, self._edges, self._at = stage.sums, edges, stage.at
        self._deferred: dict[int, DeferredWeights] = {}  # by micro-batch

    def _to_tensor(self, arg: Any) -> Tensor:
        """Return the input of torch's shape-inference pass: zeros instead of uninitialized memory."""
        tensor = super()._to_tensor(arg)
        if not isinstance(arg, Tensor):
            tensor.detach().zero_()
        return tensor

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if fwd_chunk_id == 0:
            self._sums.begin_passes()
        self._at("step:forward")
        with measure_phase("compute"):
            with _refusals_shown():
                output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            self._sums.record_forward(fwd_chunk_id)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._at("step:backward")
        with measure_phase("compute"), ExitStack() as deferring:
            if not full_backward:
                self._deferred[bwd_chunk_id] = deferring.enter_context(deferring_weights())
            with _refusals_shown():
                super().backward_one_chunk(bwd_chunk_id, loss, last_backward=last_backward)
                if not full_backward and self._sums.by_micro_batch:
                    self._deferred[bwd_chunk_id].hold_gradients(self.submod)
        if full_backward:
            self._end_backward(is_passed_on=False)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with measure_phase("compute"):
            self._deferred.pop(bwd_chunk_id).add_gradients()
        self._end_backward(is_passed_on=True)

    def _end_backward(self, *, is_passed_on: bool) -> None:
        with measure_phase("compute"):
            self._sums.record_backward(is_passed_on=is_passed_on)
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
        raise refusal  # raised outside the handler, so that its __context__ is not overwritten
