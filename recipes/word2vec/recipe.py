"""Learn word vectors by skip-gram with negative sampling (Mikolov et al. 2013, arXiv 1310.4546)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, final

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from recipes.word2vec.prose import find_library, pair_words, read_texts, split_words, vocabulary
from worldsize.core import Range, Recipe, RowValues

_TEST = 20  # holds out one in 20 texts
_FREQUENT = 1e-3  # more frequent words are subsampled (equation 5 of the paper)
_SHOWN = ("class", "return", "string", "file", "error", "first")

Triple = tuple[Tensor, Tensor, Tensor]


def _row_values(dim: int) -> dict[str, RowValues]:
    """Return the initial values of vectors of length ``dim``, by embedding name."""
    return {"inner": RowValues("uniform", 0.5 / dim), "outer": RowValues("uniform", 0.0)}


@final
class SkipGram(nn.Module):
    """Two vectors per word: ``inner`` as the center, ``outer`` as a neighbor."""

    def __init__(self, words: int, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self.inner = nn.Embedding(words, dim, sparse=sparse)
        self.outer = nn.Embedding(words, dim, sparse=sparse)
        values = _row_values(dim)
        values["inner"].fill_embedding(self.inner)
        values["outer"].fill_embedding(self.outer)

    def forward(self, center_b: Tensor, others_bk: Tensor) -> Tensor:
        """Return scores (b, k) of each center word with its k candidate words."""
        scores: Tensor = torch.einsum("bd,bkd->bk", self.inner(center_b), self.outer(others_bk))
        return scores


@final
class Pairs(Dataset[Triple]):
    """Co-occurring word pairs, int32 (n, 2), with negatives sampled by frequency^0.75."""

    def __init__(self, pairs: Tensor, counts: Tensor, negatives: int) -> None:
        self.pairs, self.negatives = pairs, negatives
        self.weights = counts.double().pow(0.75).cumsum(0)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Triple:
        center, context, negatives = self.load_batch(torch.tensor([index]))
        return center[0], context[0], negatives[0]

    def load_batch(self, indices: Tensor) -> Triple:
        """Return centers (b,), contexts (b,) and negatives (b, negatives), int64."""
        center_b, context_b = self.pairs[indices].long().unbind(1)
        drawn_bk = torch.rand(len(indices), self.negatives, dtype=torch.float64) * self.weights[-1]
        return center_b, context_b, torch.searchsorted(self.weights, drawn_bk)


@final
@dataclass(frozen=True)
class Word2Vec(Recipe):
    """Learn vectors for the words of the Python documentation.

    Args:
        dim: length of a vector.
        window: largest distance between two words of a pair.
        negatives: negative samples per pair.
        min_count: rarer words are dropped.
        sparse: whether the tables have sparse gradients.
    """

    dim: Annotated[int, Range(least=1)]
    window: Annotated[int, Range(least=1)]
    negatives: Annotated[int, Range(least=1)]
    min_count: Annotated[int, Range(least=1)]
    sparse: bool
    make_optimizer: Callable[..., Optimizer]
    make_schedule: Callable[[Optimizer], LRScheduler] | None = None

    @cached_property
    def _pages(self) -> list[list[str]]:
        return [split_words(text) for text in read_texts()]

    @cached_property
    def counts(self) -> dict[str, int]:
        """Count of each word of the vocabulary, in order of word ids."""
        return vocabulary(self._pages, self.min_count)

    def model(self) -> nn.Module:
        return SkipGram(len(self.counts), self.dim, sparse=self.sparse)

    def row_values(self, model: nn.Module) -> Mapping[str, RowValues]:
        return _row_values(self.dim)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model.parameters())

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.make_schedule(optimizer) if self.make_schedule else None

    def data(self, split: str) -> Pairs:
        """Return word pairs with negatives; one in 20 texts belongs to the test split."""
        counts = torch.tensor(list(self.counts.values()))
        chosen = [page for number, page in enumerate(self._pages) if (number % _TEST == 0) == (split == "test")]
        paired = torch.from_numpy(pair_words(self._convert_to_ids(chosen), self.window, seed=0))
        return Pairs(paired, counts, self.negatives)

    def _convert_to_ids(self, pages: list[list[str]]) -> list[Any]:
        """Convert texts to word ids, randomly dropping frequent words (equation 5 of the paper)."""
        ids = {word: number for number, word in enumerate(self.counts)}
        shares = numpy.array(list(self.counts.values())) / sum(self.counts.values())
        kept = numpy.minimum(1.0, numpy.sqrt(_FREQUENT / shares))
        chance = numpy.random.RandomState(1)
        arrays = (numpy.array([ids[word] for word in page if word in ids], dtype=numpy.int32) for page in pages)
        return [array[chance.random_sample(len(array)) < kept[array]] for array in arrays]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        center_b, context_b, negatives_bk = batch
        scores = model(center_b, torch.cat([context_b[:, None], negatives_bk], dim=1))
        return -(F.logsigmoid(scores[:, 0]) + F.logsigmoid(-scores[:, 1:]).sum(1)).mean()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return how often a true neighbor outscores a word of similar frequency, as (sum, count)."""
        center_b, context_b, _ = batch
        rival_b = context_b ^ 1
        rival_b = torch.where(rival_b < len(self.counts), rival_b, context_b - 1)
        scores = model(center_b, torch.stack([context_b, rival_b], dim=1))
        ahead = (scores[:, 0] > scores[:, 1]).double() + 0.5 * (scores[:, 0] == scores[:, 1]).double()
        return {"accuracy": (ahead.sum(), torch.tensor(len(center_b)))}

    def remarks(self, model: Mapping[str, Tensor]) -> list[str]:
        """List the five nearest words of some words, by cosine of embeddings (words, dim)."""
        vectors_wd = F.normalize(model["inner.weight"].float(), dim=1)
        names = list(self.counts)
        ids = {word: number for number, word in enumerate(names)}
        shown = [word for word in _SHOWN if word in ids]
        nearest = (vectors_wd[[ids[word] for word in shown]] @ vectors_wd.T).topk(6).indices[:, 1:]
        return [
            f"{word}: {', '.join(names[i] for i in row)}" for word, row in zip(shown, nearest.tolist(), strict=True)
        ]

    def files(self) -> Mapping[str, Path]:
        return {"topics.py": find_library() / "pydoc_data" / "topics.py"}
