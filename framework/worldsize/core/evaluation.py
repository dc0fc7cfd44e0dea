"""Splits of the data, the batches of one evaluation, and the names of its metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

from worldsize.core.recipe import EvaluationBatch

TEST = "test"  # the split whose metrics have no prefix
_AVERAGE = "ema/"  # before the names of metrics of averaged weights


@final
@dataclass(frozen=True)
class EvaluationBatches(Iterable[EvaluationBatch]):
    """This process's batches of one evaluation; can be iterated over more than once.

    Attributes:
        load: Starts loading the batches.
        split: Name of the split, as :meth:`Recipe.data` takes it.
        step: Number of the step after which they are evaluated; selects the samples if only some are evaluated.
    """

    load: Callable[[], Iterator[EvaluationBatch]]
    split: str = TEST
    step: int = 0

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return self.load()


def metric_key(split: str, name: str) -> str:
    """Return the name of a metric of ``split`` among those of all splits: ``accuracy``, ``validation/accuracy``.

    Metrics of the split "test" have no prefix, unless their name could be taken for another split's. Metrics of
    averaged weights have the prefix ``ema/`` before the name that they have for the weights themselves.
    """
    average, own = _without_average(name)
    return average + (own if split == TEST and "/" not in own else f"{split}/{own}")


def split_of(key: str) -> tuple[str, str]:
    """Return the split and the metric name from which :func:`metric_key` made ``key``."""
    average, own = _without_average(key)
    split, _, name = own.partition("/")
    return (split, average + name) if name and is_split(split) else (TEST, key)


def _without_average(name: str) -> tuple[str, str]:
    """Split a name into the prefix of averaged weights (empty if it has none) and the rest."""
    return (_AVERAGE, name.removeprefix(_AVERAGE)) if name.startswith(_AVERAGE) else ("", name)


def is_split(name: str) -> bool:
    """Return whether ``name`` is a valid name of a split: one word."""
    return re.fullmatch(r"\w[\w.-]*", name) is not None and f"{name}/" != _AVERAGE


def logged_name(key: str) -> str:
    """Return the name under which loggers show the metric: ``test/accuracy``, ``validation/accuracy``.

    A metric evaluated on the training data is ``evaluation/train/accuracy``, since ``train/...`` describes steps.
    """
    split, name = split_of(key)
    return f"evaluation/train/{name}" if split == "train" else f"{split}/{name}"


def spoken_name(key: str) -> str:
    """Return the name of the metric in tables: ``test accuracy``, ``validation accuracy``."""
    split, name = split_of(key)
    return f"evaluation train {name}" if split == "train" else f"{split} {name}"
