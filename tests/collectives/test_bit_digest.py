"""Digests of bits: equal for equal bits in each process, and different for a single changed bit."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from worldsize.collectives.bit_digest import digest_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_changed_bit_changes_the_digest_and_a_copy_does_not(dtype: torch.dtype) -> None:
    drawn = random.Random(1)
    for length in (1, 3, 1023, 1025, 50_001):
        tensor = (torch.randn(length, generator=torch.Generator().manual_seed(length)) * 3).to(dtype)
        digest = digest_bits(tensor)
        assert digest_bits(tensor.clone()) == digest
        for _ in range(20):
            changed = tensor.clone()
            bits = changed.view(torch.uint8)
            bits[drawn.randrange(len(bits))] ^= 1 << (0 if dtype is torch.bool else drawn.randrange(8))
            assert digest_bits(changed) != digest


def test_two_elements_in_the_other_order_have_another_digest() -> None:
    tensor = torch.arange(3000.0)
    assert digest_bits(tensor) != digest_bits(tensor.flip(0))
    rows = tensor[:2048].view(2, 1024)
    assert digest_bits(rows) != digest_bits(rows.flip(0))


def test_shape_and_strides_and_zeros_at_the_end_do_not_matter() -> None:
    tensor = torch.randn(30, 7)
    assert digest_bits(tensor) == digest_bits(tensor.flatten())
    assert digest_bits(tensor.t()) == digest_bits(tensor.t().contiguous())
    assert digest_bits(torch.cat([tensor.flatten(), torch.zeros(9)])) == digest_bits(tensor)
    assert digest_bits(tensor.bfloat16()[1:, 1:][1]) == digest_bits(tensor.bfloat16()[2, 1:].clone())
    assert digest_bits(torch.zeros(5000)) == digest_bits(torch.empty(0)) == 0


def test_the_digest_is_the_sum_of_words_times_odd_factors() -> None:
    """Compare with integers of Python: one-hot rows read the factors, which are odd, so that no bit can be lost."""
    factors = [int(digest_bits(row)) for row in torch.eye(64, dtype=torch.int32)]
    assert all(factor % 2 for factor in factors)
    assert len({*factors}) == 64
    words = torch.randint(-(2**31), 2**31 - 1, (64,), dtype=torch.int32)
    expected = sum(word * factor for word, factor in zip(words.tolist(), factors, strict=True)) % 2**64
    assert int(digest_bits(words)) % 2**64 == expected


def test_another_process_computes_the_same_digest() -> None:
    code = (
        "import torch; from worldsize.collectives.bit_digest import digest_bits; torch.manual_seed(9); "
        "print(int(digest_bits(torch.arange(5000.0))))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == digest_bits(torch.arange(5000.0))


def test_a_sparse_gradient_is_digested_by_its_rows_and_indices() -> None:
    def build(indices: list[int], rows: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([indices]), rows, (6, 2), check_invariants=True)

    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert digest_bits(build([4, 1], rows)) == digest_bits(build([1, 4], rows.flip(0)))
    assert digest_bits(build([4, 1], rows)) != digest_bits(build([4, 2], rows))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_compressed_and_conjugated_tensors_have_the_digest_of_their_values() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    indices, values = torch.tensor([[0, 1], [1, 0]]), torch.tensor([2.0, 3.0])
    sparse = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=True)
    assert digest_bits(dense.to_sparse_csr()) == digest_bits(sparse)
    complex_pair = torch.tensor([1.0 + 2.0j])
    assert digest_bits(complex_pair.conj()) == digest_bits(torch.tensor([1.0 - 2.0j]))
