"""Packs documents into samples of one length, and says what a packed sample lets a model see and predict."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
"""The target that ``cross_entropy`` leaves out."""

Numbers = NDArray[numpy.int64]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put pieces into bins, the longest first, each into the fullest bin that has room for it.

    It is the best-fit decreasing rule (Johnson, Demers, Ullman, Garey and Graham, SIAM Journal on Computing 3, 1974),
    which needs at most 11/9 of the fewest bins and 4 more.

    Args:
        lengths: lengths of the pieces, each at most ``capacity``.
        capacity: what the pieces of a bin may add up to.

    Returns:
        The pieces of each bin, by number.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    for piece in sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece)):
        place = bisect.bisect_left(rooms, (lengths[piece], -1))
        if place < len(rooms):
            room, chosen = rooms.pop(place)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(piece)
        bisect.insort(rooms, (room - lengths[piece], chosen))
    return bins


class Pieces(NamedTuple):
    """Parts of documents: where each begins and how long it is, in tokens, int64 [pieces]."""

    starts: Numbers
    lengths: Numbers


def pieces_of(bounds: Numbers, longest: int) -> Pieces:
    """Cut documents into pieces of at most ``longest`` tokens; a piece begins with the last token of the one before.

    So each token of a document but its first is predicted in exactly one piece.

    Args:
        bounds: where documents begin, and where the last one ends: int64 [documents + 1].
        longest: largest length of a piece in tokens, at least 2.
    """
    lengths = numpy.diff(bounds)
    counts = numpy.maximum(1, -(-(lengths - 1) // (longest - 1)))
    counts[lengths == 0] = 0
    documents = numpy.repeat(numpy.arange(len(lengths)), counts)
    numbers = numpy.arange(len(documents)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    starts = bounds[documents] + numbers * (longest - 1)
    return Pieces(starts, numpy.minimum(longest, bounds[documents + 1] - starts))


def next_tokens(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and targets of a language model, made of a batch of packed samples.

    Args:
        batch: ``tokens`` and ``documents``, each int64 [batch, length + 1].

    Returns:
        Inputs, targets and positions, each int64 [batch, length]. A target in another document than its input, or in
        none, is ``IGNORED``. Positions begin at 0 with each document: a model of transformers that is given them as
        ``position_ids``, and no mask, attends within documents only.
    """
    tokens, documents = batch["tokens"], batch["documents"]
    inputs, within = tokens[:, :-1], documents[:, :-1]
    counted = (within == documents[:, 1:]) & (within >= 0)
    places = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    begins = torch.ones_like(within, dtype=torch.bool)
    begins[:, 1:] = within[:, 1:] != within[:, :-1]
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return inputs, tokens[:, 1:].masked_fill(~counted, IGNORED), places - first


def packed(bounds: Numbers, longest: int) -> tuple[Pieces, list[int]]:
    """Pack documents into samples of at most ``longest`` tokens.

    Args:
        bounds: where documents begin, and where the last one ends: int64 [documents + 1].

    Returns:
        Their pieces, those of a sample one after the other, and how many pieces each sample has.
    """
    pieces = pieces_of(bounds, longest)
    bins = best_fit(pieces.lengths.tolist(), longest)
    order = numpy.array([piece for chosen in bins for piece in sorted(chosen)], dtype=numpy.int64)
    return Pieces(pieces.starts[order], pieces.lengths[order]), [len(chosen) for chosen in bins]
