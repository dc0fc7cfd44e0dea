"""Samples that a run skips, as ranges of positions in its endless sequence of samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

from worldsize.core.limits import Form
from worldsize.errors import ConfigError

SKIP_FORM = Form(
    r"\d{1,18}:\d{1,18}",
    hint="must have the form FIRST:END, two positions in the sequence of samples, in quotes in YAML: '12000:12064'",
)


@final
@dataclass(frozen=True)
class SkippedSamples:
    """Positions that no step uses; the steps use the remaining positions in order.

    Attributes:
        ranges: Half-open ranges [first, end) of positions, counted from 0 over all epochs: sorted, neither empty nor
            touching.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def from_ranges(ranges: Iterable[tuple[int, int]]) -> SkippedSamples:
        """Sort half-open ranges, and join those that overlap or touch."""
        joined = list[tuple[int, int]]()
        for first, end in sorted(ranges):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((first, end))
        return SkippedSamples(tuple(joined))

    @staticmethod
    def from_words(words: Iterable[str], *, key: str = "skip_samples") -> SkippedSamples:
        """Parse ranges such as "12000:12064".

        ``key``: name of the option, for errors.

        Raises:
            ConfigError: a range has a different form, or is empty.
        """
        ranges = []
        for word in words:
            if (violation := SKIP_FORM.describe_violation(word)) is not None:
                raise ConfigError(f"{key}={word!r} {violation}")
            first, end = map(int, word.split(":"))
            if first >= end:
                raise ConfigError(f"{key}={word!r} is empty. Set an end above {first}, e.g. '{first}:{first + 64}'.")
            ranges.append((first, end))
        return SkippedSamples.from_ranges(ranges)

    @property
    def words(self) -> list[str]:
        """The ranges as text, such as "12000:12064"."""
        return [f"{first}:{end}" for first, end in self.ranges]

    def add_ranges(self, ranges: Iterable[tuple[int, int]]) -> SkippedSamples:
        """Return these positions together with half-open ``ranges`` of positions."""
        return SkippedSamples.from_ranges([*self.ranges, *ranges])

    @cached_property
    def _shifts(self) -> Sequence[int]:
        """Total length of the first n ranges, for each n from 0."""
        return list(accumulate((end - first for first, end in self.ranges), initial=0))

    @cached_property
    def _starts(self) -> Sequence[int]:
        """Number of positions that steps use before each range."""
        return [first - shift for (first, _), shift in zip(self.ranges, self._shifts, strict=False)]

    def find_position(self, place: int) -> int:
        """Return the position of the sample that is the ``place``-th to be used, counted from 0."""
        return place + self._shifts[bisect_right(self._starts, place)] if self.ranges else place

    def find_positions(self, places: range) -> list[range]:
        """Return the positions of the samples that are used at ``places``, as ranges in order.

        ``places``: consecutive places in the sequence of used samples.
        """
        if not self.ranges:
            return [places]
        begun, ended = bisect_right(self._starts, places.start), bisect_right(self._starts, places.stop - 1)
        bounds = [places.start, *self._starts[begun:ended], places.stop]
        return [
            range(first + shift, end + shift)
            for first, end, shift in zip(bounds, bounds[1:], self._shifts[begun:], strict=False)
        ]

    def is_same_before(self, other: SkippedSamples, places: int) -> bool:
        """Return whether the first ``places`` samples that are used are the same with ``other``."""
        return not places or self.find_positions(range(places)) == other.find_positions(range(places))


NOTHING_SKIPPED = SkippedSamples()
