"""Check that a model gives the same results for chunks as for whole sequences.

The check runs before the first step. Attention without ``scaled_dot_product_attention`` would silently see one chunk,
and ``torch.arange`` would number its positions from 0. Therefore, the first and the last tokens of a batch run through
the model twice, in float32 and without dropout. The inputs and outputs of modules with parameters are compared by
projections, one number per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldsize.collectives.group import start_collective
from worldsize.core import ConfigError, Loss, LossOutput, MicroBatch, Recipe
from worldsize.seeds import keep_generators
from worldsize.strategies.chunk_tensor import ChunkLayout, Chunks
from worldsize.strategies.model_replica import evaluating

_LENGTH = 8  # tokens of each chunk in the trial
_TOLERANCE = 1e-2  # relative to an output's norm; rounding errors are far smaller, even with TF32
_SUMS = {"cpu": 1e-4}  # relative tolerance of losses and metrics, by device; on others 2e-3

Passes: TypeAlias = "Callable[[MicroBatch, bool], tuple[Loss | None, Mapping[str, Any]]]"
"""Computes the loss and the metrics of a micro-batch whose sequences are already cut, with the model or its stages.

Its second argument is whether sequences are in chunks. The loss is None on a rank without the last stage.
"""


def try_chunks(
    recipe: Recipe, modules: Sequence[nn.Module], batch: MicroBatch, layout: ChunkLayout, run: Passes
) -> None:
    """Check that ``modules`` and the loss give the same results on chunks as on whole sequences.

    Only some tokens of ``batch`` are used. All ranks that share the model must call it together.

    Raises:
        ConfigError: the results differ; the message names the first module with a different input or output.
    """
    device = next(parameter.device for each in modules for parameter in each.parameters() if not parameter.is_meta)
    if _is_rehearsed(modules):
        return  # collectives return no values
    with torch.no_grad(), evaluating(modules), torch.autocast(device.type, enabled=False), keep_generators(device):
        for from_end in (False, True):
            shorten, whole, parts = _Shortening(layout, from_end), _Tensors(), _Tensors()
            with whole.recording(modules):
                expected = run(replace(batch, data=recipe.cut_sequences(batch.data, shorten.take)), False)
            with parts.recording(modules):
                found = run(replace(batch, data=recipe.cut_sequences(batch.data, shorten.cut)), True)
            _compare_tensors(whole, parts, layout, shorten.length)
            if expected[0] is not None and found[0] is not None:
                _compare_results(expected, (found[0], found[1]), layout, _SUMS.get(device.type, 2e-3))
            if shorten.takes_all:
                return


def _is_rehearsed(modules: Sequence[nn.Module]) -> bool:
    is_fake = any(type(each).__name__ == "FakeTensor" for module in modules for each in module.parameters())
    return is_fake or (dist.is_initialized() and dist.get_backend() == "fake")


@final
@dataclass
class _Shortening:
    """Takes ``length`` tokens of each sequence, the first or the last ones."""

    layout: ChunkLayout
    from_end: bool
    length: int = 0
    takes_all: bool = True

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return the first or the last ``length`` tokens along dimension ``dim``."""
        size, chunks = whole.shape[dim], self.layout.chunks
        if size % chunks:
            return self.layout.cut(whole, dim)  # raises
        self.length = min(size, _LENGTH * chunks)
        self.takes_all = self.takes_all and self.length == size
        return whole.narrow(dim, size - self.length if self.from_end else 0, self.length)

    def cut(self, whole: Tensor, dim: int) -> Chunks:
        """Return the same tokens in chunks."""
        return self.layout.cut(self.take(whole, dim), dim)


@final
@dataclass
class _Tensors:
    """Projections of the inputs and outputs of modules with parameters, by name and call."""

    rows: dict[str, Tensor] = field(default_factory=dict)

    def recording(self, modules: Sequence[nn.Module]) -> ExitStack:
        """Return a context that records calls of submodules of ``modules``."""
        stack = ExitStack()
        for name, module in (pair for each in modules for pair in each.named_modules()):
            if any(True for _ in module.parameters(recurse=False)):
                hook = partial(self._record, name, count())
                stack.callback(module.register_forward_hook(hook).remove)
        return stack

    def _record(self, name: str, calls: count[int], _: nn.Module, args: Any, output: Any) -> None:
        call = next(calls)
        what = f"of {name or 'the model'}{f' in call {call + 1}' if call else ''}"
        for kind, each in (("input", args[0] if args else None), ("output", output)):
            if isinstance(each, Tensor) and each.ndim:
                self.rows[f"the {kind} {what}"] = _project(each)


def _project(tensor: Tensor) -> Tensor:
    """Return one number per token of float ``tensor`` (..., features), others unchanged."""
    if not tensor.is_floating_point() or tensor.ndim == 1:
        return tensor.double()
    probe = torch.arange(tensor.shape[-1], device=tensor.device).cos()
    projected: Tensor = tensor.float() @ probe
    return projected


def _compare_tensors(whole: _Tensors, parts: _Tensors, layout: ChunkLayout, length: int) -> None:
    for what, found in parts.rows.items():
        expected = whole.rows.get(what)
        if not isinstance(found, Chunks) or expected is None:
            continue  # no tokens
        pairs = _pair_parts(expected, found, layout, length)
        if pairs is None:
            fact = "has no token dimension, or its tokens are selected by value"
        elif any((wanted - given).norm() > _TOLERANCE * wanted.norm() for wanted, given in pairs):
            fact = (
                "differs if the sequence is cut into chunks: an earlier operation combines tokens, or depends on "
                "their positions"
            )
        else:
            continue
        raise ConfigError(
            f"{what} {fact}. Use scaled_dot_product_attention for attention, and sequence_positions for positions, or "
            f"set {layout.name_key()}=1."
        )


def _pair_parts(
    whole: Tensor, parts: Chunks, layout: ChunkLayout, length: int
) -> Iterable[tuple[Tensor, Tensor]] | None:
    """Pair the tokens of each part with those of ``whole``, of ``length`` tokens.

    None if no dimension has tokens.
    """
    if whole.ndim != parts.ndim:
        return None
    own = length // layout.chunks * layout.chunks_per_part  # tokens of a part
    dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != parts.shape[dim]]
    if len(dims) != 1 or whole.shape[dims[0]] * own != parts.shape[dims[0]] * length:
        return None
    dim = dims[0]
    for tokens_last in (True, False):  # if a dimension merges batch and tokens: whether tokens vary faster
        inner = whole.shape[dim] // length
        shapes = [(inner, size) if tokens_last else (size, inner) for size in (length, own)]
        divided = torch.unflatten(whole, dim, shapes[0])
        pieces = divided.chunk(layout.chunks, dim + tokens_last)
        pairs = [
            (torch.cat([pieces[place] for place in places], dim + tokens_last), torch.unflatten(part, dim, shapes[1]))
            for places, part in zip(layout.parts, parts.parts, strict=True)
        ]
        if all((wanted - given).norm() <= _TOLERANCE * wanted.norm() for wanted, given in pairs):
            break
    return pairs


def _compare_results(
    expected: tuple[Loss | None, Mapping[str, Any]],
    found: tuple[Loss, Mapping[str, Any]],
    layout: ChunkLayout,
    tolerance: float,
) -> None:
    assert expected[0] is not None
    is_mean = isinstance(LossOutput.from_loss(expected[0]).loss, Tensor)
    losses = [LossOutput.from_loss(each).loss for each in (expected[0], layout.sum_loss(found[0]))]
    metrics = layout.sum_metrics(found[1])
    rows = {"loss": losses, **{f"metric {name}": [pair, metrics[name]] for name, pair in expected[1].items()}}
    for name, pair in rows.items():
        wanted, given = map(_convert_pair, pair)
        if not layout.is_complete:
            start_collective(dist.all_reduce, given, group=layout.group).wait()
            given /= layout.size if is_mean and name == "loss" else 1
        if not torch.allclose(given, wanted, rtol=tolerance, atol=1e-6):
            one, other = (" / ".join(f"{number:g}" for number in each.tolist()) for each in (wanted, given))
            raise ConfigError(
                f"the {name} of whole sequences is {one}, but {other} in chunks. Return the sum over the "
                "tokens of a chunk and their number, and shift targets in the data, not in the loss; or set "
                f"{layout.name_key()}=1."
            )


def _convert_pair(values: Any) -> Tensor:
    """Convert a mean, or a sum and its weight, to a float64 tensor (1,) or (2,)."""
    numbers = values if isinstance(values, tuple) else (values,)
    return torch.stack([torch.as_tensor(each).double().detach() for each in numbers])
