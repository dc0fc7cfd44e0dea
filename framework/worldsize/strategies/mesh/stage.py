"""One stage of a pipeline, and stand-ins with which a recipe that knows of no stages feeds and judges it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from worldsize.core import Batch, ConfigError, MicroBatch, Precision, Recipe
from worldsize.reproducibility.seeds import seed_generators, stream
from worldsize.strategies.synchronous import autocast

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Use = Callable[[nn.Module, Batch], Any]  # Recipe.loss or Recipe.evaluate


class _TakenError(Exception):
    """What the model was called with is known, and nothing after it matters."""


@final
class _Recorder(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.inputs: Inputs = (args, kwargs)
        raise _TakenError


@final
class Answer(nn.Module):
    """Stands for a model whose output is known already; of one pass, that of the batch."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output: Tensor | None = output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._output is None:
            raise ConfigError(
                "the recipe calls its model twice for a batch; a pipeline makes one pass. Set strategy.pipeline=1."
            )
        output, self._output = self._output, None
        return output


def inputs_of(use: Use, batch: Batch) -> Inputs:
    """What ``use`` would call a model with."""
    recorder = _Recorder()
    try:
        use(recorder, batch)
    except _TakenError:
        return recorder.inputs
    raise ConfigError("the recipe does not call its model. Set strategy.pipeline=1.")


@final
class Stage(nn.Module):
    """Consecutive layers. The first stage calls them with what the recipe would call its model with.

    Each stage draws from a stream of its own, or dropout would draw one mask for all; the first from that of the
    micro-batch, so that what the recipe draws before the model is what it is without a pipeline.
    """

    def __init__(
        self, recipe: Recipe, layers: Sequence[nn.Module], *, index: int, device: torch.device, precision: Precision
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.index = index
        self._recipe, self._device, self._precision = recipe, device, precision
        self._batches: Sequence[MicroBatch] = ()
        self._inputs: Inputs | None = None

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """The micro-batches of the step that the next passes belong to."""
        self._batches = batches

    def listen(self) -> None:
        """Take each pass's micro-batch number from its arguments; first of all hooks, while it is on the CPU."""
        self.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        if "number" not in kwargs:
            return None
        batch = self._batches[int(kwargs["number"])]
        seed_generators(stream(batch.seed, "stage", self.index) if self.index else batch.seed, self._device)
        if self.index > 0:
            return args, {}
        self.feed(self._recipe.loss, batch.data)
        return (), {}

    def feed(self, use: Use, batch: Batch) -> None:
        """On the first stage: the next pass computes with what ``use`` would call a model with."""
        self._inputs = inputs_of(use, batch)

    def forward(self, *hidden: Tensor) -> Tensor:
        args, kwargs = self._inputs or (hidden, {})
        self._inputs = None
        with autocast(self._device, self._precision):
            first, *others = self.layers
            output: Tensor = first(*args, **kwargs)
            for layer in others:
                output = layer(output)
        return output.contiguous()

    def loss(self, output: Tensor, number: Tensor) -> Tensor:
        """On the last stage: of micro-batch ``number``, whose ``output`` this is."""
        batch = self._batches[int(number)]
        seed_generators(batch.seed, self._device)  # the recipe draws what it drew on the first stage
        with autocast(self._device, self._precision):
            return self._recipe.loss(Answer(output), batch.data)
