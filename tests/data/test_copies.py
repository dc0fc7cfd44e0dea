"""Batches of the next step are copied to the device before a step gets its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from torch.utils.data import TensorDataset

from worldsize.core import MicroBatch
from worldsize.data import loader
from worldsize.data.batches import SideStream, prefetch_copies
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies on a side stream need a GPU")


def test_each_copy_begins_a_step_ahead_and_is_waited_for_when_its_step_comes() -> None:
    log: list[str] = []

    def steps() -> Iterator[int]:
        for step in (1, 2, 3):
            log.append(f"load {step}")
            yield step

    def begin(step: int) -> Callable[[], int]:
        def finish() -> int:
            log.append(f"wait for {step}")
            return step

        log.append(f"copy {step}")
        return finish

    for step in prefetch_copies(steps(), begin):
        log.append(f"compute {step}")
    assert log == [
        *("load 1", "copy 1", "load 2", "copy 2", "wait for 1", "compute 1"),
        *("load 3", "copy 3", "wait for 2", "compute 2"),
        *("wait for 3", "compute 3"),
    ]
    assert list(prefetch_copies(iter(()), begin)) == []


def test_on_the_cpu_no_batch_is_loaded_before_its_step_and_none_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "SideStream", None)
    loaded: list[int] = []

    class Rows(TensorDataset):
        def load_batch(self, indices: torch.Tensor) -> torch.Tensor:
            loaded.append(len(indices))
            return self.tensors[0]

    rows = Rows(torch.arange(8))
    steps = micro_batches(rows, Order(0, 4, 2, (0, 1)), torch.device("cpu"))
    first = next(steps)
    assert loaded == [2, 2]
    assert all(batch.data is rows.tensors[0] for batch in first)


def _occupy(cycles: int) -> None:
    """Keep the current stream busy for this many cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@needs_cuda
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_on_the_gpu_have_the_values_of_those_on_the_cpu(workers: int) -> None:
    """Many steps are queued at once, so that memory reused too early by a copy would have different values."""
    rows, device = TensorDataset(torch.arange(4096.0).view(64, 64).repeat(16, 64)), torch.device("cuda", 0)
    order, sums = Order(0, 256, 2, (0, 1)), []
    for step in islice(micro_batches(rows, order, device, workers=workers), 50):
        _occupy(1_000_000)  # the device falls behind
        sums.append(torch.stack([batch.data[0].double().sum() for batch in step]))
    here = islice(micro_batches(rows, order, torch.device("cpu")), 50)
    expected = [[float(batch.data[0].double().sum()) for batch in step] for step in here]
    assert torch.stack(sums).tolist() == expected


@needs_cuda
def test_a_copy_runs_on_a_stream_of_its_own_and_the_current_one_waits_for_it() -> None:
    device = torch.device("cuda", 0)
    copies = SideStream(device)
    _occupy(100_000_000)
    current = torch.cuda.current_stream(device).record_event()
    finish = copies([MicroBatch({"x": torch.arange(1000)}, 0)])
    copies._side.synchronize()
    assert not current.query(), "the copy did not wait for what the current stream does"
    (batch,) = finish()
    assert batch.data["x"].tolist() == list(range(1000))
