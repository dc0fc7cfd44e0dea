"""Endless reading of an iterable, with a position that can be saved and restored.

States of third-party iterables and of recipes are stored as JSON, without pickle. Values of types that JSON does not
support are tagged.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, final, runtime_checkable

import numpy
import torch
from torch import Tensor

from worldsize.checkpoint.safetensors import DTYPES
from worldsize.core import ConfigError, StatefulStream
from worldsize.errors import CheckpointError
from worldsize.strict_json import parse_strict_json


@runtime_checkable
class _StatefulIterator(Protocol):
    """An iterator with a state that can be saved, such as Grain's ``DatasetIterator``."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@final
class EndlessReader:
    """Reader of an iterable that starts a new pass whenever one ends.

    Args:
        begin: Takes the number of a pass, from 0, and returns the iterable for it. It also seeds the random generators,
            since the iterable may use them at the start of a pass, for example to shuffle.
    """

    def __init__(self, begin: Callable[[int], Iterable[Any]]) -> None:
        self._begin = begin
        self._current: tuple[Iterable[Any], Iterator[Any]] | None = None
        self._passes = 0  # completed passes
        self._taken = 0  # samples read in the current pass

    def take_samples(self, count: int) -> list[Any]:
        """Return the next ``count`` samples."""
        samples: list[Any] = []
        while len(samples) < count:
            if self._current is None:
                iterable = self._begin(self._passes)
                self._current = iterable, iter(iterable)
            before = len(samples)
            samples.extend(islice(self._current[1], count - before))
            self._taken += len(samples) - before
            if len(samples) < count:
                self._end_pass()
        return samples

    def _end_pass(self) -> None:
        if self._taken == 0 and self._passes == 0:
            raise ConfigError("the training stream is empty. Check the data path of the recipe.")
        if self._taken == 0:
            raise ConfigError(
                "the training stream cannot be restarted: it is empty after its first pass. "
                "Return an object whose __iter__ starts a new pass on each call, instead of a generator."
            )
        self._current, self._taken = None, 0
        self._passes += 1

    @property
    def passes(self) -> int:
        """Number of completed passes."""
        return self._passes

    @property
    def has_state(self) -> bool:
        """Whether the iterable has a state that can be saved; False before the first sample."""
        return self._current is not None and _state_holder(*self._current) is not None

    def state(self) -> bytes:
        """Return the position after the last sample that was read, as bytes for :meth:`restore`.

        Raises:
            ConfigError: the iterable's state contains a value that cannot be saved.
        """
        assert self._current is not None
        holder = _state_holder(*self._current)
        state = holder.get_state() if isinstance(holder, _StatefulIterator) else holder and holder.state_dict()
        return encode_state({"passes": self._passes, "samples": self._taken, "state": state})

    def restore(self, data: bytes) -> None:
        """Resume at the position saved by :meth:`state`, possibly in a new process.

        Raises:
            ConfigError: the iterable cannot load the state.
        """
        saved = decode_state(data)
        self._passes, self._taken = saved["passes"], saved["samples"]
        iterable = self._begin(self._passes)
        try:
            self._current = iterable, _resume_iterator(iterable, saved["state"])
        except Exception as error:  # any error of the iterable; the remedy is the same
            raise ConfigError(
                f"the training stream failed to load its state from the checkpoint ({type(error).__name__}: {error}). "
                "Resume with the original stream, or use --ignore streams to read the stream from the start."
            ) from error


def _state_holder(iterable: Iterable[Any], iterator: Iterator[Any]) -> StatefulStream | _StatefulIterator | None:
    for each in (iterable, iterator):
        if isinstance(each, StatefulStream):
            return each
    return iterator if isinstance(iterator, _StatefulIterator) else None


def _resume_iterator(iterable: Iterable[Any], state: Any) -> Iterator[Any]:
    if isinstance(iterable, StatefulStream):
        iterable.load_state_dict(state)
        return iter(iterable)
    iterator = iter(iterable)
    match _state_holder(iterable, iterator):
        case StatefulStream() as holder:
            holder.load_state_dict(state)
        case _StatefulIterator() as holder:
            holder.set_state(state)
        case _:
            raise TypeError(f"{type(iterable).__name__} does not define load_state_dict")
    return iterator


_STREAM = "the training stream"
_DEEPEST = 100  # maximum nesting of a state
_LARGEST = 1 << 30  # maximum size of an encoded state in bytes
_KINDS = "biufcSUmM"  # supported NumPy dtype kinds; no objects (O) or structured types (V)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HELD = (
    "Supported types: None, bool, int, float, str, bytes, tensors, NumPy arrays and scalars, and dicts, lists, tuples "
    "and sets of these."
)


def encode_state(state: Any, what: str = _STREAM) -> bytes:
    """Serialize ``state`` for :func:`decode_state`; ``what`` is its owner, for messages.

    Raises:
        ConfigError: a value cannot be serialized; the message includes its location and type.
    """
    try:
        return json.dumps(_encode_node(state, "state", 0), allow_nan=False, separators=(",", ":")).encode()
    except _RefusedError as refused:
        raise ConfigError(f"{what}'s state {refused} {_HELD}") from None


def decode_state(data: bytes, what: str = _STREAM) -> Any:
    """Deserialize the result of :func:`encode_state`.

    ``what``: the state's owner, for messages.

    Raises:
        CheckpointError: the bytes are damaged or have a different format.
    """
    try:
        return _decode_node(parse_strict_json(data, at_most=_LARGEST, deepest=4 * _DEEPEST, finite=False))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, binascii.Error) as error:
        kind = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the state of {what} is damaged ({kind}).") from None


class _RefusedError(Exception):
    """A state contains a value that cannot be encoded."""


def _encode_node(node: Any, path: str, depth: int) -> Any:
    """Convert ``node`` to JSON types; refuse subclasses, since decoding would not restore them."""
    if depth > _DEEPEST:
        raise _RefusedError(f"is nested more than {_DEEPEST} levels deep at {path[:200]}.")
    kind = type(node)
    if node is None or kind in (bool, int, str):
        return node
    if kind is float:
        return node if math.isfinite(node) else {"$float": str(node)}
    if kind is list:
        return [_encode_node(child, f"{path}[{index}]", depth + 1) for index, child in enumerate(node)]
    if kind is dict:
        return _encode_mapping(node, path, depth + 1)
    if kind is tuple:
        return {"$tuple": [_encode_node(child, f"{path}[{index}]", depth + 1) for index, child in enumerate(node)]}
    if kind in (set, frozenset):
        children = [_encode_node(child, f"{path}{{...}}", depth + 1) for child in node]
        return {f"${kind.__name__}": sorted(children, key=json.dumps)}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": _encode_base64(node)}
    if isinstance(node, Tensor) and node.layout == torch.strided and node.dtype in _NAMES:
        return {"$tensor": [_NAMES[node.dtype], list(node.shape), _encode_base64(_get_tensor_bytes(node))]}
    if kind is numpy.ndarray and node.dtype.kind in _KINDS:
        return {"$array": [node.dtype.str, list(node.shape), _encode_base64(node.tobytes())]}
    if isinstance(node, numpy.generic) and node.dtype.kind in _KINDS:
        return {"$scalar": [node.dtype.str, _encode_base64(node.tobytes())]}
    raise _RefusedError(f"cannot be saved: {path} is a {kind.__module__}.{kind.__qualname__}.")


def _encode_mapping(node: Mapping[Any, Any], path: str, depth: int) -> Any:
    children = [(key, _encode_node(child, f"{path}[{key!r}]", depth)) for key, child in node.items()]
    if all(type(key) is str and not key.startswith("$") for key, _ in children):
        return dict(children)
    return {"$items": [[_encode_node(key, f"a key of {path}", depth), child] for key, child in children]}


def _decode_node(node: Any) -> Any:
    if isinstance(node, list):
        return [_decode_node(child) for child in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1 or not next(iter(node)).startswith("$"):
        return {key: _decode_node(child) for key, child in node.items()}
    ((tag, value),) = node.items()
    match tag, value:
        case "$float", "inf" | "-inf" | "nan":
            return float(value)
        case "$items", list():
            return {_decode_node(key): _decode_node(child) for key, child in value}
        case "$tuple" | "$set" | "$frozenset", list():
            return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](map(_decode_node, value))
        case "$bytes" | "$bytearray", str():
            return _decode_base64(value) if tag == "$bytes" else bytearray(_decode_base64(value))
        case "$tensor", [str(name), list(shape), str(text)]:
            flat = (
                torch.frombuffer(bytearray(_decode_base64(text)), dtype=torch.uint8) if text else torch.empty(0).byte()
            )
            return flat.view(DTYPES[name]).reshape(shape)
        case "$array", [str(name), list(shape), str(text)]:
            return numpy.frombuffer(bytearray(_decode_base64(text)), _parse_dtype(name)).reshape(shape)
        case "$scalar", [str(name), str(text)]:
            return numpy.frombuffer(_decode_base64(text), _parse_dtype(name))[0]
    raise ValueError(f"invalid value of {tag[:40]}: {str(value)[:40]}")


def _parse_dtype(name: str) -> numpy.dtype[Any]:
    dtype = numpy.dtype(name)
    if dtype.kind not in _KINDS:
        raise ValueError(f"unsupported dtype {name[:40]}")
    return dtype


def _get_tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _encode_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
