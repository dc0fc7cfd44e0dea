"""The place of each rank in a mesh: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

AXES = ("pipeline", "data", "tensor")


@final
@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. Rank (p · data + d) · tensor + t: ranks that share a layer's work are neighbours."""

    pipeline: int
    data: int
    tensor: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The axes' sizes: pipeline, data, tensor."""
        return self.pipeline, self.data, self.tensor

    @property
    def size(self) -> int:
        """Ranks of the whole mesh."""
        return self.pipeline * self.data * self.tensor

    def rank(self, p: int, d: int, t: int) -> int:
        """Return the rank at part ``p`` of the pipeline, ``d`` of the data and ``t`` of each layer."""
        return (p * self.data + d) * self.tensor + t

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinate (p, d, t) of ``rank``."""
        rest, t = divmod(rank, self.tensor)
        return *divmod(rest, self.data), t

    def groups(self) -> dict[str, list[list[int]]]:
        """Return the groups of ranks of each axis: those that differ in that coordinate alone, in its order."""
        ps, ds, ts = map(range, self.sizes)
        return {
            "pipeline": [self.across(ps, d, t) for d in ds for t in ts],
            "data": [[self.rank(p, d, t) for d in ds] for p in ps for t in ts],
            "tensor": [[self.rank(p, d, t) for t in ts] for p in ps for d in ds],
        }

    def across(self, ps: range | list[int], d: int, t: int) -> list[int]:
        """Return the ranks at (d, t) in the parts ``ps`` of the pipeline."""
        return [self.rank(p, d, t) for p in ps]
