"""Reads an iterable again and again, and saves and restores its position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, final, runtime_checkable

from worldsize.core import ConfigError, StatefulStream
from worldsize.data.state_codec import decode, encode


@runtime_checkable
class _StatefulIterator(Protocol):
    """An iterator with a state, as Grain's ``DatasetIterator``."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@final
class EndlessReader:
    """The samples of an iterable, which begins again at its end.

    Args:
        begin: Returns the iterable for one more pass, given the number of the pass, from 0. It seeds the random numbers
            that the iterable draws when it begins, such as those for its order.
    """

    def __init__(self, begin: Callable[[int], Iterable[Any]]) -> None:
        self._begin = begin
        self._current: tuple[Iterable[Any], Iterator[Any]] | None = None
        self._passes = 0  # that have ended
        self._taken = 0  # samples of the pass at hand

    def take(self, count: int) -> list[Any]:
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
                "the training stream cannot begin again: it has no samples after its end. "
                "Return an object whose __iter__ begins anew each time, and no generator."
            )
        self._current, self._taken = None, 0
        self._passes += 1

    @property
    def passes(self) -> int:
        """Passes that have ended."""
        return self._passes

    @property
    def has_state(self) -> bool:
        """Whether the iterable has a state that can be saved; this is known once the first sample was taken."""
        return self._current is not None and _state_holder(*self._current) is not None

    def state(self) -> bytes:
        """Return the position after the last sample that was taken, as bytes for :meth:`restore`.

        Raises:
            ConfigError: the state of the iterable has something that cannot be saved.
        """
        assert self._current is not None
        holder = _state_holder(*self._current)
        state = holder.get_state() if isinstance(holder, _StatefulIterator) else holder and holder.state_dict()
        return encode({"passes": self._passes, "samples": self._taken, "state": state})

    def restore(self, data: bytes) -> None:
        """Continue after the sample at which :meth:`state` was called, perhaps in another process.

        Raises:
            ConfigError: the iterable cannot use the state.
        """
        saved = decode(data)
        self._passes, self._taken = saved["passes"], saved["samples"]
        iterable = self._begin(self._passes)
        try:
            self._current = iterable, _begun_at(iterable, saved["state"])
        except Exception as error:  # any: the library's own, for which the remedy is the same
            raise ConfigError(
                f"the training stream cannot go on where the checkpoint was saved ({type(error).__name__}: {error}). "
                "Resume with the stream of then, or read it again from its start with --ignore streams."
            ) from error


def _state_holder(iterable: Iterable[Any], iterator: Iterator[Any]) -> StatefulStream | _StatefulIterator | None:
    for each in (iterable, iterator):
        if isinstance(each, StatefulStream):
            return each
    return iterator if isinstance(iterator, _StatefulIterator) else None


def _begun_at(iterable: Iterable[Any], state: Any) -> Iterator[Any]:
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
            raise TypeError(f"{type(iterable).__name__} has no load_state_dict")
    return iterator
