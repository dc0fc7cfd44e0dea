"""A checkpoint holds plain values, and converts NumPy scalars to them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from worldsize.checkpoint.manifest_tree import join_tensors, split_tensors
from worldsize.errors import CheckpointError

NUMBERS: list[tuple[Any, bool | int | float | str]] = [
    (np.bool_(True), True),
    (np.int64(-(2**62)), -(2**62)),
    (np.uint8(7), 7),
    (np.float16(0.1), float(np.float16(0.1))),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.float64(0.1), 0.1),
    (np.float32("inf"), float("inf")),
    (np.str_("a"), "a"),
]


@pytest.mark.parametrize(("number", "expected"), NUMBERS, ids=[type(number).__name__ for number, _ in NUMBERS])
def test_a_number_of_numpy_comes_back_as_one_of_python(number: Any, expected: Any) -> None:
    tensors, values = split_tensors({"best": number, "all": [number, (number,)], "x": torch.ones(2)})
    read = join_tensors(json.loads(json.dumps(values)), tensors)
    assert (read["best"], read["all"]) == (expected, [expected, (expected,)])
    assert type(read["best"]) is type(expected)


def test_numbers_of_numpy_may_be_keys() -> None:
    tensors, values = split_tensors({np.int64(3): 1.0, "b": 2.0})
    assert join_tensors(json.loads(json.dumps(values)), tensors) == {3: 1.0, "b": 2.0}


@pytest.mark.parametrize("value", [np.complex64(1j), np.datetime64("2020-01-01"), np.ones(2), 1j, object(), {1, 2}])
def test_any_other_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"optimizer/best is a .*; checkpoints do not support this type\. Use only tensors",
    ):
        split_tensors({"optimizer": {"best": value}})
