"""Train a byte-level GPT on the source code of the Python standard library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recipes.stdlib_lm.corpus import Windows, find_modules, read_split
from recipes.stdlib_lm.gpt import GPT, Block, Logits, Sizes
from worldsize.core import Range, Recipe, TensorStyle
from worldsize.data.sources.documents import IGNORED


@dataclass(frozen=True)
class StdlibLM(Recipe):
    """Train a :class:`GPT` to predict the next byte.

    Args:
        width: size of the residual stream; ``width / heads`` must be even.
        depth: number of blocks.
        heads: attention heads per block.
        context: bytes per window.
        dropout: dropout probability after attention and after the MLP.
        test_bytes: maximum number of bytes to evaluate on. None for the whole test split, about 2 MB.
    """

    width: Annotated[int, Range(least=1)]
    depth: Annotated[int, Range(least=1)]
    heads: Annotated[int, Range(least=1)]
    context: Annotated[int, Range(least=1)]
    dropout: Annotated[float, Range(least=0, most=1)]
    test_bytes: Annotated[int | None, Range(least=2)]
    make_optimizer: Callable[..., Optimizer]
    make_schedule: Callable[[Optimizer], LRScheduler] | None = None

    def __post_init__(self) -> None:
        _ = self.sizes  # fail on invalid sizes here, before any process starts

    @property
    def sizes(self) -> Sizes:
        """Validated sizes of the model."""
        return Sizes(self.width, self.depth, self.heads, self.context, self.dropout)

    def model(self) -> nn.Module:
        return GPT(self.sizes)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model.parameters())

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.make_schedule(optimizer) if self.make_schedule else None

    def tokens_per_sample(self) -> int:
        return self.context

    def data(self, split: str) -> Windows:
        """Return windows of ``context`` bytes and the next byte of each, int64 (context,) each."""
        if split == "test":
            return Windows(read_split("test", self.test_bytes), self.context)
        text = read_split("train")
        return Windows(text[: len(text) // self.context * self.context], self.context)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the summed cross entropy in nats and the number of predicted bytes, two scalars.

        A batch of bytes has shape (batch, sequence), its logits (batch, sequence, 256).
        """
        _, targets_bt = batch
        logits = model(*self.model_inputs(batch)).flatten(0, 1)
        nats = F.cross_entropy(logits, targets_bt.flatten(), ignore_index=IGNORED, reduction="sum")
        return nats, (targets_bt != IGNORED).sum()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return bits per byte, the base-2 cross entropy of the predicted bytes, as (sum, count)."""
        _, targets_bt = batch
        logits = model(*self.model_inputs(batch)).float().flatten(0, 1)
        nats = F.cross_entropy(logits, targets_bt.flatten(), ignore_index=IGNORED, reduction="none").double().sum()
        return {"bits_per_byte": (nats / math.log(2), (targets_bt != IGNORED).sum())}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, GPT)
        return list(model.blocks)

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, GPT)
        return [model.embedding, *model.blocks, Logits(model)]

    def model_inputs(self, batch: Any) -> tuple[Tensor]:
        return (batch[0],)

    def cut_sequences(self, batch: Any, cut: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
        return cut(batch[0], 1), cut(batch[1], 1)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        """Shard attention by heads and the MLP by features."""
        styles: dict[str, TensorStyle] = {"query_key_value": "column", "attention_out": "row"}
        styles |= {"mlp_in": "column", "mlp_out": "row"}
        blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
        return {f"{block}.{name}": style for block in blocks for name, style in styles.items()}

    def tensor_units(self, model: nn.Module) -> Mapping[str, int]:
        return {"recipe.heads": self.heads}

    def files(self) -> Mapping[str, Path]:
        return find_modules()
