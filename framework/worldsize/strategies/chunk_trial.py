"""A check, before the first step, that a model computes the same on chunks of a sequence as on the whole.

Attention of another kind than ``scaled_dot_product_attention`` would silently see one chunk, and ``torch.arange`` would
number its positions from 0. So the first tokens of a batch run through the model twice, in float32 and without
dropout. The outputs of linear layers and embeddings are compared by projections: of each output, one number per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldsize.collectives.group import start_collective
from worldsize.core import ConfigError, Loss, LossOutput, MicroBatch, Recipe
from worldsize.seeds import keep_generators
from worldsize.strategies.model_replica import evaluating
from worldsize.strategies.sequence_chunks import ChunkLayout, Chunks

_LENGTH = 8  # tokens of each chunk in the trial
_TOLERANCE = 1e-2  # of an output's norm; rounding, also of TF32, stays far below it


def try_chunks(
    recipe: Recipe,
    model: nn.Module,
    batch: MicroBatch,
    layout: ChunkLayout,
    run: Callable[[Callable[[], Any]], Any],
) -> None:
    """Compare the model's outputs and the loss for chunks of the first tokens of ``batch`` with those for the whole.

    ``run`` calls a function that uses the model. All ranks that share the model must call it together.

    Raises:
        ConfigError: they differ; it names the first module with a different output.
    """
    device = next(model.parameters()).device
    data = recipe.cut_sequences(batch.data, partial(_shorten_sequence, layout))
    short = replace(batch, data=data)
    with torch.no_grad(), evaluating([model]), torch.autocast(device.type, enabled=False), keep_generators(device):
        whole, parts = _Outputs(layout), _Outputs(layout)
        with whole.recording(model):
            expected = run(partial(recipe.micro_batch_loss, model, short))
        with parts.recording(model):
            found = run(partial(layout.compute_loss, recipe, model, short))
    _compare_outputs(whole, parts, layout)
    _compare_losses(expected, found, layout)


def _shorten_sequence(layout: ChunkLayout, whole: Tensor, dim: int) -> Tensor:
    length = min(_LENGTH, whole.shape[dim] // layout.chunks)
    return whole.narrow(dim, 0, length * layout.chunks)


@final
@dataclass
class _Outputs:
    """Projections of module outputs, one number for each part of ``layout``, and their norms, in order of calls."""

    layout: ChunkLayout
    rows: list[tuple[str, Sequence[Tensor] | Tensor]] = field(default_factory=list)

    def recording(self, model: nn.Module) -> ExitStack:
        """Return a context that records outputs of linear layers and embeddings in ``model``."""
        stack = ExitStack()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                stack.callback(module.register_forward_hook(partial(self._record, name)).remove)
        return stack

    def _record(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim > 1 and output.is_floating_point():
            probe = torch.arange(output.shape[-1], device=output.device).cos()
            own: Tensor = output.float() @ probe
            self.rows.append((name, own.parts if isinstance(own, Chunks) else own))


def _compare_outputs(whole: _Outputs, parts: _Outputs, layout: ChunkLayout) -> None:
    for (name, expected), (other, found) in zip(whole.rows, parts.rows, strict=False):
        if name != other or isinstance(found, Tensor) or not isinstance(expected, Tensor):
            continue  # not an output of tokens, or modules run in another order
        for wanted, given in _pair_parts(expected, found, layout):
            if (wanted - given).norm() > _TOLERANCE * wanted.norm():
                raise ConfigError(
                    f"the output of {name} differs if the sequence is cut into chunks, so an operation before it "
                    "combines tokens, or numbers them. Use scaled_dot_product_attention for attention, and "
                    f"sequence_positions for positions, or set {layout.name_key()}=1."
                )


def _pair_parts(whole: Tensor, parts: Sequence[Tensor], layout: ChunkLayout) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of each part in ``whole`` and in the part, if the shapes differ only in their number."""
    for places, part in zip(layout.parts, parts, strict=True):
        if whole.ndim != part.ndim:
            return
        dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != part.shape[dim]]
        if len(dims) != 1 or whole.shape[dims[0]] * len(places) != part.shape[dims[0]] * layout.chunks:
            return
        pieces = whole.chunk(layout.chunks, dims[0])
        yield torch.cat([pieces[place] for place in places], dims[0]), part


def _compare_losses(expected: Loss, found: Loss, layout: ChunkLayout) -> None:
    wanted, given = (_convert_loss(each) for each in (expected, found))
    if not layout.is_complete:
        start_collective(dist.all_reduce, given, group=layout.group).wait()
        if len(given) == 1:
            given /= layout.size
    if not torch.allclose(given, wanted, rtol=_TOLERANCE / 10, atol=1e-6):
        one, other = (" / ".join(f"{number:g}" for number in each.tolist()) for each in (wanted, given))
        raise ConfigError(
            f"the loss of whole sequences is {one}, but that of their chunks {other}. Return the sum over the tokens "
            "of a chunk and their number, and shift targets in the data, not in the loss; or set "
            f"{layout.name_key()}=1."
        )


def _convert_loss(loss: Loss) -> Tensor:
    """Return the mean, or the sum and the weight, float64 (1,) or (2,)."""
    own = LossOutput.from_loss(loss).loss
    return torch.stack(
        [torch.as_tensor(each).double().detach() for each in (own if isinstance(own, tuple) else (own,))]
    )
