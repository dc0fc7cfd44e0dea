"""A 64-bit digest of a tensor's bits, computed on its device, to compare tensors of different processes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_ROW = 1024  # words per row
_BLOCK = 1024  # rows converted to int64 at once, which limits memory to about 8 MiB


def digest_bits(tensor: Tensor) -> Tensor:
    """Return a digest of the bits of ``tensor`` (any shape and dtype): int64, a scalar on the same device.

    A change of a single bit always changes it in tensors of up to 4 kB. Other differences are missed with a probability
    of about 2^-32 or less. It does not depend on shape or dtype, ignores zeros at the end, and is not cryptographic. A
    tensor of zeros has digest 0.
    """
    if tensor.layout is not torch.strided:
        sparse = (tensor if tensor.layout is torch.sparse_coo else tensor.detach().to_sparse()).coalesce()
        return digest_bits(sparse.values()) + 31 * digest_bits(sparse.indices())
    words = _view_as_words(tensor.detach().resolve_conj().resolve_neg())
    while True:  # rows are digested to int64, and these again, as a tree
        sums = _digest_rows(words)
        if sums.numel() == 1:
            return sums[0]
        words = sums.view(torch.int32)


def _view_as_words(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor`` as int32 (n,), padded with zeros."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if rest := flat.numel() % 4:
        flat = torch.nn.functional.pad(flat, (0, 4 - rest))
    elif flat.numel() == 0:
        flat = flat.new_zeros(4)
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


def _digest_rows(words: Tensor) -> Tensor:
    """Return the digest of each row of 1,024 of ``words`` (n,): the sum of word × factor, modulo 2^64."""
    factors, count = _get_factors(words.device), words.numel()
    if count <= _ROW:
        return (words.long() * factors[:count]).sum().reshape(1)
    whole = count // _ROW
    rows = words[: whole * _ROW].view(whole, _ROW)
    sums = [(block.long() * factors).sum(1) for block in torch.split(rows, _BLOCK)]
    if rest := count - whole * _ROW:
        sums.append((words[-rest:].long() * factors[:rest]).sum().reshape(1))
    return torch.cat(sums)


@cache
def _get_factors(device: torch.device) -> Tensor:
    """Return random odd factors, the same in all processes: a word times an odd factor is 0 only for the word 0."""
    generator = torch.Generator().manual_seed(20_261_201)
    factors = torch.randint(-(2**62), 2**62, (_ROW,), generator=generator, dtype=torch.int64)
    return (2 * factors + 1).to(device)
