"""Compressed gradients keep their codec's promise, and send their error later (error feedback)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugins.parameter_server.gradients import Compression, Feedback, GradientCodec, HalfBytes, OneBit, TopK

CODECS: dict[str, GradientCodec] = {"bf16": HalfBytes(), "onebit": OneBit(), "topk": TopK(0.05)}
SIZES = {"bf16": 2.0, "onebit": 0.13, "topk": 0.41}  # bytes per number, for 1001 numbers


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", [1, 7, 8, 1001])
def test_a_payload_is_as_long_as_announced_and_comes_back_in_shape(name: str, numel: int) -> None:
    codec, gradient_n = CODECS[name], torch.randn(numel)
    payload = codec.encode(gradient_n.clone())
    assert payload.dtype == codec.dtype
    assert len(payload) == codec.compute_length(numel)
    assert codec.decode(payload, numel).shape == (numel,)
    if numel == 1001:
        assert payload.nbytes / numel == pytest.approx(SIZES[name], rel=0.05)


def test_one_bit_keeps_signs_and_the_mean_of_each_side() -> None:
    gradient_n = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0])
    decoded = OneBit().decode(OneBit().encode(gradient_n), 5)
    torch.testing.assert_close(decoded, torch.tensor([4 / 3, -3.0, 4 / 3, -3.0, 4 / 3]))


def test_top_k_keeps_the_largest_as_they_are() -> None:
    gradient_n = torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3])
    codec = TopK(0.4)
    assert torch.equal(codec.decode(codec.encode(gradient_n), 5), torch.tensor([0.0, -5.0, 0.0, 3.0, 0.0]))


@pytest.mark.parametrize("name", CODECS)
def test_a_compression_error_is_added_to_later_gradients(name: str) -> None:
    torch.manual_seed(0)
    feedback, sent_n, whole_n = Feedback(CODECS[name]), torch.zeros(200), torch.zeros(200)
    for _ in range(300):
        gradient_n = torch.randn(200) + 0.5
        sent_n += CODECS[name].decode(feedback.encode("bucket", gradient_n.clone()), 200)
        whole_n += gradient_n
    assert (sent_n - whole_n).norm() / whole_n.norm() < 0.15


@pytest.mark.parametrize("compression", ["bf16", "onebit", "topk"])
def test_training_with_compressed_gradients_reaches_the_accuracy(train: Any, compression: Compression) -> None:
    options = ("recipe=digits", "steps=120", "cluster.threads=1", "strategy=parameter_server", "cluster.processes=3")
    run = train(*options, f"strategy.compression={compression}", "strategy.top_share=0.05")
    assert run.code == 0, run.error
    assert run.json("result.json")["metrics"]["accuracy"] > 0.90  # depends on the order of workers
    last = run.steps()[-1]["facts"]["servers"][0]
    assert last["bytes_in"] / last["pushes"] < 0.6 * last["bytes_out"] / last["pulls"]
