"""A small decoder-only transformer over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldsize.core import ConfigError
from worldsize.strategies.sequence_chunks import sequence_positions

VOCABULARY = 256


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model. The head size ``width / heads`` must be even for rotary embedding."""

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width={self.width} must be a multiple of {2 * self.heads} with heads={self.heads}, for an even head "
                "size. Set a different width, or use fewer heads."
            )


class GPT(nn.Module):
    """Map bytes int64 (batch, time) to logits (batch, time, 256), with tied embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.RMSNorm(sizes.width)
        self.apply(_initialise)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Return logits (batch, time, 256) of the next byte for each of ``tokens_bt`` (batch, time)."""
        hidden_btw = self.embedding(tokens_bt)
        for block in self.blocks:
            hidden_btw = block(hidden_btw)
        return F.linear(self.norm(hidden_btw), self.embedding.weight)


class Logits(nn.Module):
    """The final norm and output projection of a :class:`GPT` as a separate layer."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm, self.embedding = gpt.norm, gpt.embedding

    def forward(self, hidden_btw: Tensor) -> Tensor:
        return F.linear(self.norm(hidden_btw), self.embedding.weight)


class Block(nn.Module):
    """Pre-norm attention and a GELU MLP of four times the width, with residual connections.

    The query-key-value projection orders its outputs by head, so that a contiguous shard contains whole heads.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_size, self.dropout = sizes.width // sizes.heads, sizes.dropout
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.query_key_value = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.attention_out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.mlp_norm = nn.RMSNorm(sizes.width)
        self.mlp_in = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.mlp_out = nn.Linear(4 * sizes.width, sizes.width, bias=False)
        cosine, sine = rotations(sizes.context, self.head_size)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, hidden_btw: Tensor) -> Tensor:
        hidden_btw = hidden_btw + self._apply_dropout(self._compute_attention(self.attention_norm(hidden_btw)))
        return hidden_btw + self._apply_dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden_btw)))))

    def _compute_attention(self, hidden_btw: Tensor) -> Tensor:
        """Compute attention over this rank's heads, which are a subset under tensor parallelism."""
        batch, time, _ = hidden_btw.shape
        positions_t = sequence_positions(hidden_btw)
        rotation = (self.get_buffer("cosine")[positions_t], self.get_buffer("sine")[positions_t])
        projected = self.query_key_value(hidden_btw).view(batch, time, -1, 3, self.head_size)
        query_bhtd, key_bhtd, value_bhtd = projected.permute(3, 0, 2, 1, 4)
        mixed_bhtd = F.scaled_dot_product_attention(
            rotate_pairs(query_bhtd, rotation), rotate_pairs(key_bhtd, rotation), value_bhtd, is_causal=True
        )
        attended_btw: Tensor = self.attention_out(mixed_bhtd.transpose(1, 2).flatten(2))
        return attended_btw

    def _apply_dropout(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.dropout, self.training)


def rotations(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Return rotary cosine and sine, float32 (context, size / 2) (arXiv 2104.09864, eq. 34)."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angle_tf = torch.outer(torch.arange(context), frequency)
    return angle_tf.cos(), angle_tf.sin()


def rotate_pairs(x_bhtd: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + d/2) of the last axis by their position's angle, in float32."""
    cosine_tf, sine_tf = rotation
    first, second = x_bhtd.chunk(2, dim=-1)
    turned = torch.cat((first * cosine_tf - second * sine_tf, second * cosine_tf + first * sine_tf), dim=-1)
    return turned.to(x_bhtd.dtype)


def _initialise(module: nn.Module) -> None:
    """Initialize linear layers to preserve the variance of their input.

    With the usual standard deviation of 0.02, attention in a narrow model stays uniform.
    """
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
