"""Reads data that have no index: whatever can only be iterated over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

from worldsize.core import Batch, ConfigError
from worldsize.data.fetch import Collate
from worldsize.data.order import Order


def streamed(dataset: Iterable[Any], order: Order, first: int, collate: Collate) -> Iterator[Batch]:
    """Read the whole stream in every process, again and again, and yield what is of its logical ranks."""
    endless = chain.from_iterable(map(_nonempty, repeat(dataset)))
    samples = islice(endless, first * order.batch_size, None)
    while True:
        whole = list(islice(samples, order.batch_size))
        for rank in order.mine:
            begin = rank * order.micro_batch_size
            yield collate(whole[begin : begin + order.micro_batch_size])


def _nonempty(dataset: Iterable[Any]) -> Iterator[Any]:
    empty = True
    for sample in dataset:
        empty = False
        yield sample
    if empty:
        raise ConfigError("the training stream is empty. Check the data path of the recipe.")
