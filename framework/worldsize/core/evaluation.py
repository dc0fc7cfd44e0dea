"""Splits of the data, the batches of an evaluation, and metric names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

from worldsize.core.recipe import EvaluationBatch

TEST = "test"  # metrics of this split have no prefix
_AVERAGE = "ema/"  # prefix of metrics of the averaged weights


@final
@dataclass(frozen=True)
class EvaluationBatches(Iterable[EvaluationBatch]):
    """This process's batches of one evaluation; can be iterated over more than once.

    Attributes:
        load: Starts loading the batches.
        split: Name of the split, as passed to :meth:`Recipe.data`.
        step: Number of the last step before this evaluation; selects the samples if only a subset is evaluated.
    """

    load: Callable[[], Iterator[EvaluationBatch]]
    split: str = TEST
    step: int = 0

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return self.load()


def metric_key(split: str, name: str) -> str:
    """Return a unique name for a metric, such as ``accuracy`` or ``validation/accuracy``.

    Metrics of the split "test" have no prefix, unless their name contains a slash and would look like another split's.
    Metrics of the averaged weights have the additional prefix ``ema/``.
    """
    average, own = _split_average_prefix(name)
    return average + (own if split == TEST and "/" not in own else f"{split}/{own}")


def parse_metric_key(key: str) -> tuple[str, str]:
    """Return the split and the metric name of a ``key``: the inverse of :func:`metric_key`."""
    average, own = _split_average_prefix(key)
    split, _, name = own.partition("/")
    return (split, average + name) if name and is_split(split) else (TEST, key)


def is_loss(name: str) -> bool:
    """Return whether ``name``, a metric key or logger name, is a loss (lower is better)."""
    return name.rpartition("/")[2] == "loss"


def _split_average_prefix(name: str) -> tuple[str, str]:
    """Split a name into its ``ema/`` prefix (empty if absent) and the rest."""
    return (_AVERAGE, name.removeprefix(_AVERAGE)) if name.startswith(_AVERAGE) else ("", name)


def is_split(name: str) -> bool:
    """Return whether ``name`` is a valid split name: one word."""
    return re.fullmatch(r"\w[\w.-]*", name) is not None and f"{name}/" != _AVERAGE


def format_logger_name(key: str) -> str:
    """Return the metric's name in loggers: ``test/accuracy``, ``validation/accuracy``.

    A metric evaluated on the training data is ``evaluation/train/accuracy``, since ``train/...`` is for step metrics.
    """
    split, name = parse_metric_key(key)
    return f"evaluation/train/{name}" if split == "train" else f"{split}/{name}"


def format_display_name(key: str) -> str:
    """Return the metric's name in tables: ``test accuracy``, ``validation accuracy``."""
    split, name = parse_metric_key(key)
    return f"evaluation train {name}" if split == "train" else f"{split} {name}"
