"""States of streams are restored unchanged, or refused by name; nothing is pickled."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from worldsize.data.stream_state import decode_state, encode_state
from worldsize.errors import CheckpointError, ConfigError

keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()), st.just("$x")
)
leaves = st.one_of(keys, st.floats(allow_nan=False), st.frozensets(st.integers()), st.sets(st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner), st.dictionaries(st.text(), inner)
    ),
    max_leaves=30,
)


def typed(node: Any) -> Any:
    """Return ``node`` with the type of each part, since True == 1 == 1.0."""
    if isinstance(node, list | tuple):
        return type(node), [typed(child) for child in node]
    if isinstance(node, dict):
        return dict, [(typed(key), typed(child)) for key, child in node.items()]
    return type(node), node


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(trees)
def test_plain_states_come_back_with_their_types_and_the_order_of_their_keys(tree: Any) -> None:
    assert typed(decode_state(encode_state(tree))) == typed(tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = decode_state(encode_state({"t": tensor.requires_grad_(dtype.is_floating_point)}))["t"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor.detach())


def test_a_part_of_a_tensor_is_saved_without_the_rest() -> None:
    part = torch.arange(100_000).view(100, 1000)[::50, 3]
    assert len(encode_state(part)) < 200
    assert decode_state(encode_state(part)).tolist() == [3, 50_003]


@pytest.mark.parametrize("dtype", ["int16", "float32", "complex128", "bool", "U5", "S3", "datetime64[s]", ">i4"])
def test_arrays_and_scalars_of_numpy_come_back(dtype: str) -> None:
    array = numpy.zeros((2, 3), dtype)
    array[1, 2] = 1
    back = decode_state(encode_state([array, array[1, 2], array[:, :0], numpy.asfortranarray(array)]))
    assert [each.dtype for each in back] == [array.dtype, array[1, 2].dtype, array.dtype, array.dtype]
    assert numpy.array_equal(back[0], array)
    assert back[1] == array[1, 2]
    assert back[2].shape == (2, 0)
    assert numpy.array_equal(back[3], array)
    assert back[0].flags.writeable


def test_generators_go_on_where_they_were() -> None:
    numbers, python = numpy.random.default_rng(3), random.Random(4)
    tensors = torch.Generator().manual_seed(5)
    states = decode_state(encode_state((numbers.bit_generator.state, python.getstate(), tensors.get_state())))
    expected = numbers.random(), python.random(), torch.rand((), generator=tensors).item()
    numbers.bit_generator.state = states[0]
    python.setstate(states[1])
    tensors.set_state(states[2])
    assert (numbers.random(), python.random(), torch.rand((), generator=tensors).item()) == expected


def test_numbers_that_json_lacks_come_back() -> None:
    back = decode_state(encode_state([math.inf, -math.inf, math.nan, -0.0, 1 << 127, bytearray(b"x")]))
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert math.copysign(1, back[3]) == -1
    assert back[4:] == [1 << 127, bytearray(b"x")]


class Pair(NamedTuple):
    first: int


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0, (1, object())]}, r"state\['a'\]\[1\]\[1\] is a builtins.object"),
        ({3: {Pair(1): 2}}, r"a key of state\[3\] is a .*Pair"),
        ({"pair": Pair(1)}, r"state\['pair'\] is a .*Pair"),
        ({"colour": Colour.RED}, r"state\['colour'\] is a .*Colour"),
        ({"counts": collections.Counter("ab")}, r"state\['counts'\] is a collections.Counter"),
        ({"f": print}, r"state\['f'\] is a builtins.builtin_function_or_method"),
        ({"x": numpy.array([object()])}, r"state\['x'\] is a numpy.ndarray"),
        ({"t": torch.eye(2).to_sparse()}, r"state\['t'\] is a torch.Tensor"),
        ({frozenset({object()}): 1}, r"a key of state\{...\} is a builtins.object"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_with_its_place_and_type(state: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode_state(state)


def test_a_state_without_end_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(ConfigError, match="nested more than 100 levels deep"):
        encode_state(state)


@pytest.mark.parametrize(
    "value",
    [
        {"$what": 1},
        {"$tensor": ["float32", [3], "AAAA"]},
        {"$tensor": ["object", [1], "AAAA"]},
        {"$array": ["|O", [1], "AAAAAAAAAAA="]},
        {"$array": ["i4,O", [1], "AAAAAAAAAAA="]},
        {"$scalar": ["<i4", "AAA"]},
        {"$bytes": "not base64!"},
        {"$items": [[1]]},
        {"$float": "1e5"},
        {"$set": [{"$items": []}]},
    ],
)
def test_bytes_that_are_no_state_are_damage(value: Any) -> None:
    with pytest.raises(CheckpointError, match="state of the training stream is damaged"):
        decode_state(json.dumps(value).encode())
    with pytest.raises(CheckpointError, match="damaged"):
        decode_state(b'{"a": ')
