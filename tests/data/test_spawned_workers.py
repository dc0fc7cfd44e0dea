"""Data workers may be spawned: their data source can be pickled, or is refused with a message."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.data.formats import FORMATS, opened
from worldsize.data.loader import _Fetcher, micro_batches
from worldsize.data.mixture import Mixture, Part
from worldsize.data.order import Order
from worldsize.data.source import Source, Transformed
from worldsize.data.sources.documents import DocumentWindows, PackedDocuments
from worldsize.data.sources.tokens import TokenWindows
from worldsize.data.splits import HeldOut
from worldsize.data.storage.cache import Cache
from worldsize.data.worker_process import worker_context
from worldsize.errors import ConfigError

pytestmark = pytest.mark.heavy

TOKENS: dict[str, Callable[..., Any]] = {
    "tokens": TokenWindows,
    "documents": DocumentWindows,
    "packed": PackedDocuments,
}
WRAPPED: dict[str, Callable[[Source], Source]] = {
    "transformed": lambda source: Transformed(source, str),
    "held out": lambda source: HeldOut(source, share=0.5, held_out=False),
    "mixture": lambda source: Mixture({"one": Part(source, weight=1.0), "two": Part(source, weight=2.0)}),
}
ORDER = Order(0, 4, 2, (0, 1))
CPU = torch.device("cpu")


def _source(kind: str, tmp_path: Path) -> Any:
    folder = tmp_path / "files"
    folder.mkdir()
    if kind in FORMATS:
        FORMATS[kind].write(folder)
        return opened(kind, folder, tmp_path / "cache")
    numpy.save(folder / "tokens_00000.npy", numpy.arange(200, dtype=numpy.uint8))
    numpy.save(folder / "documents_00000.npy", numpy.array([0, 90, 200]))
    if kind in TOKENS:
        return TOKENS[kind](str(folder), length=4, cache=Cache(str(tmp_path / "cache")))
    return WRAPPED[kind](TokenWindows(str(folder), length=4, cache=Cache(str(tmp_path / "cache"))))


@pytest.mark.parametrize("kind", [*FORMATS, *TOKENS, *WRAPPED])
def test_each_kind_of_data_can_be_sent_to_a_worker(kind: str, tmp_path: Path) -> None:
    source = _source(kind, tmp_path)
    fetcher = _Fetcher(source, ORDER, list)
    expected = str(fetcher.__getitems__((3, 1)))  # everything is open by now
    sent = pickle.loads(pickle.dumps(fetcher))
    if kind not in ("images",):  # Pillow shows an image by its address
        assert str(sent.__getitems__((3, 1))) == expected


class Lengths(Source):
    """Numbers that report their length."""

    lengths = torch.arange(1000) % 37

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index

    def fingerprint(self) -> Any:
        return {}


def test_balanced_batches_can_be_sent_to_a_worker() -> None:
    fetcher = _Fetcher(Lengths(), Order(0, 4, 2, (0, 1), balanced=True), list)
    expected = fetcher.__getitems__((3, 1))
    assert pickle.loads(pickle.dumps(fetcher)).__getitems__((3, 1)) == expected


_RUN = """
import multiprocessing
import sys

from tests.data.test_spawned_workers import Lengths, Stream, steps

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    for data, balanced in ((Lengths(), False), (Lengths(), True), (Stream(), False)):
        assert steps(data, balanced, workers=1) == steps(data, balanced, workers=0)
    try:
        steps(Lengths(), False, workers=1, collate=lambda samples: samples)
    except Exception as error:
        print(type(error).__name__, error)
"""


class Stream(torch.utils.data.IterableDataset[int]):
    """Numbers without an index."""

    def __iter__(self) -> Any:
        return iter(range(1000))


def steps(data: Any, balanced: bool, *, workers: int, collate: Any = list) -> list[list[Any]]:
    """Return the data of the first steps."""
    loaded = micro_batches(data, Order(0, 4, 2, (0, 1), balanced=balanced), CPU, workers=workers, collate=collate)
    taken = [[each.data for each in step] for step in islice(loaded, 3)]
    loaded.close()
    return taken


def test_spawned_workers_load_what_the_process_itself_would_or_say_why_not(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(_RUN)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, script], env={"PYTHONPATH": root, "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ConfigError spawned data workers require picklable data")
    assert "set data_workers=0" in done.stdout


@pytest.mark.parametrize(("method", "context"), [(None, "fork"), ("fork", "fork"), ("spawn", "spawn")])
def test_workers_are_forked_unless_the_program_says_otherwise(
    method: str | None, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", partial(_method, method))
    assert worker_context() == context


def test_a_server_of_forks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", partial(_method, "forkserver"))
    with pytest.raises(ConfigError, match="would outlive the training process"):
        next(micro_batches(Lengths(), ORDER, CPU, workers=1))


def _method(method: str | None, allow_none: bool = False) -> str | None:
    assert allow_none
    return method
