"""What is evaluated: splits of the data, the batches of one evaluation, and the names of its metrics."""

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
    """This process's share of one evaluation, which can be iterated over as often as need be.

    Attributes:
        load: Begins to load the batches.
        split: Name of the data, as :meth:`Recipe.data` takes it.
        step: Number of the step after which they are evaluated; it decides which are drawn if not all are.
    """

    load: Callable[[], Iterator[EvaluationBatch]]
    split: str = TEST
    step: int = 0

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return self.load()


def metric_key(split: str, name: str) -> str:
    """Return the name of a metric of ``split`` among those of all splits: ``accuracy``, ``validation/accuracy``.

    Metrics of the split "test" have their own names, unless these look like another split's. Those of averaged weights
    are named like those of the weights themselves, after ``ema/``.
    """
    average, own = _without_average(name)
    return average + (own if split == TEST and "/" not in own else f"{split}/{own}")


def split_of(key: str) -> tuple[str, str]:
    """Return the split and the metric that :func:`metric_key` has named."""
    average, own = _without_average(key)
    split, _, name = own.partition("/")
    return (split, average + name) if name and is_split(split) else (TEST, key)


def _without_average(name: str) -> tuple[str, str]:
    """Take the prefix of averaged weights, or an empty one, off a name."""
    return (_AVERAGE, name.removeprefix(_AVERAGE)) if name.startswith(_AVERAGE) else ("", name)


def is_split(name: str) -> bool:
    """Tell whether a split may be called so: by a word."""
    return re.fullmatch(r"\w[\w.-]*", name) is not None and f"{name}/" != _AVERAGE


def logged_name(key: str) -> str:
    """Return the name under which loggers show the metric: ``test/accuracy``, ``validation/accuracy``.

    That of the training data is ``evaluation/train/accuracy``, since ``train/...`` are figures of steps.
    """
    split, name = split_of(key)
    return f"evaluation/train/{name}" if split == "train" else f"{split}/{name}"


def spoken_name(key: str) -> str:
    """Return the name under which tables show the metric: ``test accuracy``, ``validation accuracy``."""
    split, name = split_of(key)
    return f"evaluation train {name}" if split == "train" else f"{split} {name}"
