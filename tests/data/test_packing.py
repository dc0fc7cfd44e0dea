"""Packed documents keep every token, and a model sees and predicts only within a document."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from worldsize.data.sources.documents import IGNORED, best_fit, next_tokens, pack_documents, split_documents

lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def bounds_of(lengths: list[int]) -> Any:
    return numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int64)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 30), max_size=80))
def test_bins_hold_every_piece_once_and_never_too_much(lengths: list[int]) -> None:
    bins = best_fit(lengths, 30)
    assert sorted(piece for chosen in bins for piece in chosen) == list(range(len(lengths)))
    assert all(0 < sum(lengths[piece] for piece in chosen) <= 30 for chosen in bins)
    fewest = -(-sum(lengths) // 30)
    assert len(bins) <= 11 / 9 * max(fewest, sum(2 * length > 30 for length in lengths)) * 1.5 + 4


def test_bins_are_those_of_the_rule() -> None:
    """By hand: 7, 6 and 5 open bins of 10; 4 fits best beside 6, 3 beside 7, 2 beside 5, and 2 again."""
    lengths = [5, 3, 7, 4, 2, 6, 2]
    bins = [sorted(lengths[piece] for piece in chosen) for chosen in best_fit(lengths, 10)]
    assert bins == [[3, 7], [4, 6], [2, 2, 5]]


@settings(max_examples=200)
@given(lengths_of_documents, st.integers(2, 12))
def test_each_token_but_the_first_of_a_document_is_predicted_once(lengths: list[int], longest: int) -> None:
    bounds = bounds_of(lengths)
    pieces = split_documents(bounds, longest)
    predicted = Counter(
        token
        for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
        for token in range(start + 1, start + length)
    )
    expected = {token for first, last in itertools.pairwise(bounds) for token in range(first + 1, last)}
    assert predicted == Counter(expected)
    assert max(pieces.lengths.tolist(), default=0) <= longest
    assert min(pieces.lengths.tolist(), default=1) >= 1


def test_packing_wastes_little() -> None:
    lengths = numpy.random.default_rng(0).integers(1, 60, 1024).tolist()
    pieces, counts = pack_documents(bounds_of(lengths), 65)
    assert sum(counts) == len(pieces.lengths) == 1024
    assert sum(lengths) / (len(counts) * 65) > 0.97


def test_the_packing_stays_what_it_is() -> None:
    """A change gives a resumed run different samples: it needs a new version of the index's kind."""
    pieces, counts = pack_documents(bounds_of([5, 0, 12, 3, 1, 7, 4, 2]), 8)
    assert pieces.starts.tolist() == [5, 20, 21, 0, 17, 12, 32, 28]
    assert pieces.lengths.tolist() == [8, 1, 7, 5, 3, 5, 2, 4]
    assert counts == [1, 2, 2, 2, 1]


def test_targets_and_positions_of_a_packed_sample() -> None:
    batch = {
        "tokens": torch.tensor([[5, 6, 7, 8, 9, 0, 0]]),
        "documents": torch.tensor([[0, 0, 0, 1, 1, -1, -1]]),
    }
    inputs, targets, positions = next_tokens(batch)
    assert inputs.tolist() == [[5, 6, 7, 8, 9, 0]]
    assert targets.tolist() == [[6, 7, IGNORED, 9, IGNORED, IGNORED]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0]]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_packed_batch_has_the_loss_of_its_documents_alone(kind: str) -> None:
    """Each document by itself, in a batch of one, is the reference."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more: dict[str, dict[str, Any]] = {
        "llama": {"intermediate_size": 32, "num_key_value_heads": 2},
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes, **more[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    documents = [torch.randint(50, (length,)) for length in (9, 4, 6, 12)]
    alone = sum(
        F.cross_entropy(model(input_ids=each[None, :-1], use_cache=False).logits[0], each[1:], reduction="sum")
        for each in documents
    )
    tokens, numbers = torch.zeros(2, 18, dtype=torch.int64), torch.full((2, 18), -1)
    for row, chosen in enumerate([documents[:2], documents[2:]]):
        joined = torch.cat(chosen)
        tokens[row, : len(joined)] = joined
        owners = [torch.full((len(each),), number) for number, each in enumerate(chosen)]
        numbers[row, : len(joined)] = torch.cat(owners)
    inputs, targets, positions = next_tokens({"tokens": tokens, "documents": numbers})
    logits = model(input_ids=inputs, position_ids=positions, use_cache=False).logits.flatten(0, 1)
    together = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    assert torch.allclose(together, torch.as_tensor(alone), rtol=1e-12)
