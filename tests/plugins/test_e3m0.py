"""The four-bit format has the properties in its definition, over many magnitudes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plugins.streaming_diloco.e3m0 import BLOCK, count_bytes, decode_rows, encode_rows

CODES = torch.tensor([0.0, *(2.0**power for power in range(-6, 1))])


def there_and_back(rows: Tensor) -> Tensor:
    return decode_rows(encode_rows(rows), rows.shape[1])


def rows(scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 8 * BLOCK, generator=generator) * scale


def test_a_byte_holds_two_numbers_and_each_block_adds_one_byte() -> None:
    assert encode_rows(rows(1.0)).shape == (3, count_bytes(8 * BLOCK))
    assert 8 * count_bytes(8 * BLOCK) / (8 * BLOCK) == 4.25  # bits per number


@pytest.mark.parametrize("scale", [2.0**-120, 1e-20, 1e-3, 1.0, 7e4, 1e30])
def test_every_number_becomes_the_nearest_representable_one(scale: float) -> None:
    decoded, wanted = there_and_back(rows(scale)), rows(scale)
    for block, original in zip(decoded.view(-1, BLOCK), wanted.view(-1, BLOCK), strict=True):
        top = 2.0 ** torch.arange(-126.0, 127.0)
        top = top[(top - original.abs().max()).abs().argmin()]
        distances = (original.abs()[:, None] / top - CODES).abs()
        assert torch.equal((block.abs() / top - original.abs() / top).abs(), distances.amin(1))
        assert bool((block * original >= 0).all())


def test_representable_and_rounded_numbers_do_not_change() -> None:
    exact = torch.cat([CODES, -CODES, CODES, -CODES])[None] * 2.0**9
    assert torch.equal(there_and_back(exact), exact)
    once = there_and_back(rows(0.1))
    assert torch.equal(there_and_back(once), once)


def test_ties_go_to_the_even_code() -> None:
    """Means of two such numbers are often ties; always rounding them up or down would be biased."""
    middles = torch.cat([(CODES[1:] + CODES[:-1]) / 2, torch.ones(25)])[None]
    assert torch.equal(there_and_back(middles)[0, :7], CODES[[0, 2, 2, 4, 4, 6, 6]])


def test_errors_are_at_most_a_third_above_the_smallest_code_and_are_unbiased() -> None:
    wanted = rows(1.0, seed=4).abs()
    decoded = there_and_back(wanted)
    large = wanted > wanted.view(3, -1, BLOCK).amax(2).repeat_interleave(BLOCK, 1) / 64
    inside = large & (wanted < wanted.view(3, -1, BLOCK).amax(2).repeat_interleave(BLOCK, 1) / 2)
    assert float(((decoded - wanted) / wanted)[inside].abs().max()) <= 1 / 3 + 1e-6
    assert abs(float((decoded - wanted).mean() / wanted.mean())) < 0.05


def test_a_block_of_zeros_stays_zero_and_one_that_is_not_finite_becomes_nan() -> None:
    values = rows(1.0)
    values[0, :BLOCK] = 0
    values[1, 5], values[2, 7] = torch.inf, torch.nan
    decoded = there_and_back(values)
    assert bool((decoded[0, :BLOCK] == 0).all())
    assert bool(decoded[1, :BLOCK].isnan().all())
    assert bool(decoded[2, :BLOCK].isnan().all())
    assert bool(decoded[:, BLOCK:].isfinite().all())


def test_the_largest_and_the_smallest_floats_stay_finite() -> None:
    values = torch.full((1, BLOCK), torch.finfo(torch.float32).max)
    assert bool(there_and_back(values).isfinite().all())
    assert float(there_and_back(torch.full((1, BLOCK), 1e-45)).abs().max()) <= 2.0**-127
