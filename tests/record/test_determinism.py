"""Torch's flags under each mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from worldsize.record.determinism import Determinism


@pytest.fixture(autouse=True)
def _flags_kept() -> Iterator[None]:
    before = Determinism("before", cudnn_benchmark=torch.backends.cudnn.benchmark)
    yield
    before.apply("cpu")
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_the_same_bits_on_a_gpu_leave_flash_attention_and_fill_no_memory() -> None:
    """Torch has a deterministic backward pass for flash attention, but not for other fused kernels."""
    Determinism("deterministic", deterministic=True).apply("cuda")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_on_a_cpu_memory_is_filled_so_that_what_reads_it_early_shows() -> None:
    Determinism("deterministic", deterministic=True).apply("cpu")
    assert torch.empty(1 << 12).isnan().all()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
