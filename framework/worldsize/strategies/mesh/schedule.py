"""The schedule of a pipeline: its kind, its stages, and the allowed numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from worldsize.core import ConfigError

Kind = Literal["gpipe", "1f1b", "interleaved"]


@final
@dataclass(frozen=True)
class PipelineSchedule:
    """The pipeline options of :class:`~worldsize.strategies.mesh.strategy.Mesh`.

    Raises:
        ConfigError: the options are incompatible.
    """

    ranks: int
    kind: Kind
    stages_per_rank: int | None
    split: Sequence[int] | None

    def __post_init__(self) -> None:
        if self.kind not in ("gpipe", "1f1b", "interleaved"):
            raise ConfigError(f"strategy.schedule={self.kind!r} is unknown. Known: gpipe, 1f1b, interleaved.")
        if self.stages_per_rank not in (None, 1) and self.kind != "interleaved":
            raise ConfigError(
                f"strategy.schedule={self.kind} runs one stage a rank, not {self.stages_per_rank}. "
                "Set strategy.schedule=interleaved."
            )
        starts = [0, *(self.split or [])]
        if self.split is not None and (len(starts) != self.stages or sorted({*starts}) != starts):
            raise ConfigError(
                f"strategy.split={list(self.split)} must name {self.stages - 1} layers in ascending order, "
                f"at which the stages after the first begin."
            )

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline, over all of its ranks."""
        each = self.stages_per_rank or (2 if self.kind == "interleaved" else 1)
        return self.ranks * each if self.ranks > 1 else 1

    def check_micro_batches(self, count: int) -> None:
        """Raise ConfigError if a step of ``count`` micro-batches in each part of the data cannot be computed."""
        if self.ranks > 1 and self.kind == "1f1b" and count < self.ranks:
            raise ConfigError(
                f"{count} micro-batches a data part are fewer than strategy.pipeline={self.ranks}. "
                f"Set logical_ranks to {self.ranks} × strategy.data or more, or strategy.schedule=gpipe."
            )
