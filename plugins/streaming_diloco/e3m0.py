"""E3M0, a 4-bit float: one sign bit, three exponent bits, no mantissa, block scales.

The magnitudes are 0 and 2^-6, 2^-5, ..., 1 (codes 0 to 7), times the block's scale, a power of two. Code 0 is zero,
like the exponent field 0 of an IEEE 754 format without a mantissa. Blocks and scales follow the microscaling formats
(OCP Microscaling Formats v1.0, E8M0): 32 elements per block, one scale byte with bias 127 (255 if not finite).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from worldsize.devices import move_to_device

BLOCK = 32
_BIAS, _NAN = 127, 255
_MAGNITUDES = (0.0, *(2.0**power for power in range(-6, 1)))
# rounding bounds: a midpoint rounds to the even code, thus down if the lower code is even
_MIDDLES = torch.tensor([(low + high) / 2 for low, high in pairwise(_MAGNITUDES)])
_VALUES = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
_BOUNDS = torch.where(torch.arange(7) % 2 == 0, torch.nextafter(_MIDDLES, torch.tensor(1.0)), _MIDDLES)


def count_bytes(numel: int) -> int:
    """Return the encoded size of ``numel`` elements in bytes; ``numel`` is a multiple of BLOCK."""
    return numel // 2 + numel // BLOCK


def encode_rows(rows_rn: Tensor) -> Tensor:
    """Encode float32 (r, n), n a multiple of BLOCK, as uint8 (r, n / 2 + n / BLOCK).

    Each byte has two codes. Elements are rounded to the nearest representable value, ties to the even code. The scale
    is the power of two nearest to the block's largest magnitude.
    """
    blocks_rkb = rows_rn.view(len(rows_rn), -1, BLOCK)
    largest_rk1 = blocks_rkb.abs().amax(2, keepdim=True)
    fraction, exponent = torch.frexp(largest_rk1)
    top_rk1 = (exponent - (fraction < 0.75).int()).clamp(-_BIAS, _BIAS)
    scaled_rkb = torch.ldexp(blocks_rkb.abs(), -top_rk1)
    code_rkb = torch.bucketize(scaled_rkb, move_to_device(_BOUNDS, rows_rn.device), right=True).byte()
    code_rn = (code_rkb | (blocks_rkb < 0).byte() << 3).flatten(1)
    scale_rk = torch.where(largest_rk1.isfinite(), top_rk1 + _BIAS, _NAN).flatten(1).byte()
    return torch.cat([code_rn[:, ::2] | code_rn[:, 1::2] << 4, scale_rk], dim=1)


def decode_rows(payload_rp: Tensor, numel: int) -> Tensor:
    """Decode ``payload_rp`` from :func:`encode_rows` to float32 rows (r, numel)."""
    pair_rh, scale_rk = payload_rp[:, : numel // 2], payload_rp[:, numel // 2 :]
    code_rn = torch.stack([pair_rh & 15, pair_rh >> 4], dim=2).flatten(1)
    known = move_to_device(_VALUES, payload_rp.device)
    blocks_rkb = known[code_rn.long()].view(*scale_rk.shape, BLOCK)
    values_rkb = torch.ldexp(blocks_rkb, scale_rk.int()[:, :, None] - _BIAS)
    return torch.where(scale_rk[:, :, None] == _NAN, torch.nan, values_rkb).flatten(1)
