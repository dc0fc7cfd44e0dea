"""Bytes are counted as tensors are created and freed, and attributed to their eventual use."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from worldsize.plan.rehearsal.memory import MemoryRecorder

KILO = 250  # float32 numbers that take 1,000 bytes


def test_what_is_there_at_once_is_counted_once() -> None:
    recorder = MemoryRecorder()
    with recorder.recording():
        first = torch.zeros(KILO)
        view, second = first[:10], torch.ones(2 * KILO)
        del second
        third = torch.zeros(KILO)
        third.add_(view.sum())
    assert recorder.log.compute_training_peak().nbytes == 3000


def test_a_storage_that_shrinks_and_grows_again_counts_what_it_has() -> None:
    recorder = MemoryRecorder()
    with recorder.recording():
        unit = torch.zeros(4 * KILO)
        unit.untyped_storage().resize_(0)
        other = torch.zeros(3 * KILO)
        assert recorder.log.compute_training_peak().nbytes == 4000
        unit.untyped_storage().resize_(4000)
        assert recorder.log.compute_training_peak().nbytes == 7000
        del other
    assert recorder.log.compute_training_peak().nbytes == 7000


def test_parts_are_those_of_a_plain_training_loop() -> None:
    """The peak is in the second update, with gradients, momenta and Adam's temporary numbers."""
    recorder = MemoryRecorder()
    with recorder.recording():
        model = nn.Linear(100, 50, bias=False)
        model.register_buffer("seen", torch.zeros(KILO))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        recorder.log.begin_training()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
        recorder.log.begin_evaluation()
        model(torch.ones(1000, 100))
        recorder.label_state({"model": model.state_dict(keep_vars=True)})
    parts = recorder.log.compute_training_peak().parts
    assert {name: parts[name] for name in ("parameters", "gradients", "optimizer", "buffers")} == {
        "parameters": 20_000,
        "gradients": 20_000,
        "optimizer": 20_000,
        "buffers": 1_000,
    }
    evaluation = recorder.log.evaluation_peak()
    assert evaluation is not None
    assert evaluation.parts["activations"] == 4 * (1000 * 100 + 1000 * 50)


def test_a_batch_is_counted_and_not_the_data_set_of_which_it_is_a_view() -> None:
    """A batch not created by torch, such as numpy's, counts too once a step uses it."""
    data_set, recorder = torch.zeros(1000 * KILO), MemoryRecorder()
    with recorder.recording():
        window = data_set[: 2 * KILO]
        batch = torch.stack([window, window])
        assert recorder.log.compute_training_peak().nbytes == 4000
        recorder.track_tensors([batch, window, torch.from_numpy(np.zeros(KILO, dtype=np.float32))])
        del batch, window
    assert recorder.log.compute_training_peak().nbytes == 5000


def test_what_torch_makes_of_numbers_is_counted() -> None:
    recorder = MemoryRecorder()
    with recorder.recording():
        kept = torch.tensor([0.0] * KILO)
    assert recorder.log.compute_training_peak().nbytes == kept.nbytes


def test_a_frozen_parameter_is_no_buffer() -> None:
    recorder = MemoryRecorder()
    with recorder.recording():
        model = nn.Sequential(nn.Linear(100, 50, bias=False).requires_grad_(False), nn.BatchNorm1d(50, affine=False))
        recorder.label_state({"model": model.state_dict()})
    parts = recorder.log.compute_training_peak().parts
    assert (parts["parameters"], parts["buffers"]) == (20_000, 2 * 4 * 50 + 8)


def test_what_building_takes_is_apart_from_training() -> None:
    recorder = MemoryRecorder()
    with recorder.recording():
        whole = torch.zeros(8 * KILO)
        shard = whole[:KILO].clone()
        del whole
        recorder.log.begin_training()
        shard.add_(1)
        result = shard * 2
    assert recorder.log.building_peak().nbytes == 9000
    assert recorder.log.compute_training_peak().nbytes == shard.nbytes + result.nbytes
