"""Pipeline plan: layers per stage, stages per rank, and the schedule of passes.

Unlike torch's, the looped schedules (interleaved, zero_bubble) support any number of micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, zip_longest
from typing import Any, Literal, final, get_args

from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from worldsize.collectives.cost import bubble_share
from worldsize.core import ConfigError, FeatureRecipe, Recipe, saves_state
from worldsize.strategies.mesh.pass_table import PassTable

Kind = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
KINDS: Sequence[Kind] = get_args(Kind)
_ONE_STAGE, _IN_V = ("gpipe", "1f1b"), ("zbv", "dualpipev")


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
    csv: str | None = None

    def __post_init__(self) -> None:
        if self.csv is not None and self.ranks == 1:
            raise ConfigError(
                "strategy.schedule_csv requires a pipeline. Set strategy.pipeline to its number of rows, or "
                "strategy.schedule_csv=null."
            )
        _ = self.table  # raises for an invalid table
        if self.csv is not None and self.stages_per_rank is not None:
            raise ConfigError(
                "strategy.schedule_csv determines the stages of each rank. Set strategy.stages_per_rank=null."
            )
        if self.kind not in KINDS:
            raise ConfigError(f"unknown strategy.schedule={self.kind!r}; available: {', '.join(KINDS)}.")
        if self.stages_per_rank not in (None, 1) and self.kind in _ONE_STAGE:
            raise ConfigError(
                f"strategy.schedule={self.kind} supports one stage per rank, got "
                f"strategy.stages_per_rank={self.stages_per_rank}. Set strategy.schedule=interleaved or zero_bubble."
            )
        if self.stages_per_rank not in (None, 2) and self.kind in _IN_V:
            raise ConfigError(
                f"strategy.schedule={self.kind} requires two stages per rank, got "
                f"strategy.stages_per_rank={self.stages_per_rank}. Set strategy.stages_per_rank=null, or "
                "strategy.schedule=zero_bubble."
            )
        starts = [0, *(self.split or [])]
        if self.split is not None and (len(starts) != self.stages or sorted({*starts}) != starts):
            raise ConfigError(
                f"strategy.split={list(self.split)} must contain {self.stages - 1} layer indices in ascending order, "
                "one for the first layer of each stage after the first."
            )

    @cached_property
    def table(self) -> PassTable | None:
        """The passes that the user lists, if any."""
        return None if self.csv is None else PassTable.from_csv(self.csv, self.ranks)

    @property
    def stages(self) -> int:
        """Number of stages over all ranks of the pipeline."""
        if self.table is not None:
            return len(self.table.rank_of_stage)
        each = self.stages_per_rank or (1 if self.kind in _ONE_STAGE else 2)
        return self.ranks * each if self.ranks > 1 else 1

    @property
    def rank_of_stage(self) -> Sequence[int]:
        """The pipeline rank of each stage: as listed, in a V (0, 1, ..., 1, 0), or round-robin."""
        if self.table is not None:
            return self.table.rank_of_stage
        if self.kind in _IN_V and self.ranks > 1:
            return [*range(self.ranks), *reversed(range(self.ranks))]
        return [stage % self.ranks for stage in range(self.stages)]

    @property
    def is_looped(self) -> bool:
        """Whether ranks may have several stages; a sharded stage is then gathered for each pass."""
        return self.stages > self.ranks or self.kind not in _ONE_STAGE

    @property
    def is_ring(self) -> bool:
        """Whether the last rank also sends to the first one."""
        return self.stages > self.ranks and self.kind not in _IN_V

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients come after sending the input gradient, to fill the bubble."""
        if self.table is not None:
            return self.table.splits_backward
        return self.ranks > 1 and self.kind in ("zero_bubble", *_IN_V)

    def estimate_idle_share(self, micro_batches: int) -> float:
        """Return a rank's idle fraction of a step, if backward takes twice as long as forward."""
        if self.table is not None:
            return self.table.idle_share
        stages = self.stages // self.ranks
        return bubble_share(self.ranks, micro_batches, stages, splits_backward=self.splits_backward)

    def count_kept(self, micro_batches: int) -> float:
        """Return a rank's peak number of micro-batches with stored activations.

        Each stage counts as its fraction of the rank.
        """
        if self.table is not None:
            return self.table.count_kept()
        if self.ranks == 1:
            return min(micro_batches, 1)
        if self.kind == "gpipe":
            return micro_batches
        extra = {"interleaved": (self.ranks - 1) * self.ranks / self.stages, "dualpipev": 0.5}.get(self.kind, 0.0)
        return min(micro_batches, self.ranks + extra)

    def check_micro_batches(self, count: int) -> None:
        """Raise ConfigError if a data-parallel part cannot have ``count`` micro-batches per step."""
        if self.table is not None:
            if count != self.table.micro_batches:
                raise ConfigError(
                    f"strategy.schedule_csv has {self.table.micro_batches} micro-batches per data-parallel rank, but "
                    f"the run has {count}. Set logical_ranks to {self.table.micro_batches} × strategy.data."
                )
            return
        if self.ranks > 1 and self.kind == "1f1b" and count < self.ranks:
            raise ConfigError(
                f"strategy.schedule=1f1b with strategy.pipeline={self.ranks} requires at least {self.ranks} "
                f"micro-batches per data-parallel rank, got {count}. Set logical_ranks to at least {self.ranks} × "
                "strategy.data, or strategy.schedule=gpipe."
            )
        if self.ranks > 1 and self.kind == "dualpipev" and count < self.stages:
            raise ConfigError(
                f"strategy.schedule=dualpipev with strategy.pipeline={self.ranks} requires at least {self.stages} "
                f"micro-batches per data-parallel rank, got {count}. Set logical_ranks to at least {self.stages} × "
                "strategy.data, or strategy.schedule=zbv."
            )


_LOGGER = logging.getLogger(_PipelineScheduleRuntime.__module__)


def create_schedule(
    kind: Kind, stages: Sequence[PipelineStage], micro_batches: int, *, table: PassTable | None = None, **options: Any
) -> Any:
    """Return the schedule of a step.

    ``stages``: this rank's stages. ``table``: listed passes, which replace ``kind``. Any number of micro-batches is
    supported, since a data-parallel part may have fewer after others have joined. ``options`` are passed to torch's
    schedules. Errors in a step are raised without torch's log of all passes.
    """
    _LOGGER.setLevel(logging.CRITICAL)
    given: Any = [*stages]
    if table is not None:
        listed = [[_Action(each.stage, _ComputationType(each.kind), each.number) for each in row] for row in table.rows]
        return _Listed(given, micro_batches, listed, **options)
    is_full = micro_batches >= stages[0].num_stages
    if kind in _ONE_STAGE:
        schedule = Schedule1F1B if kind == "1f1b" and is_full else ScheduleGPipe
        return schedule(stages[0], micro_batches, **options)
    if kind in _IN_V:
        in_v = ScheduleDualPipeV if kind == "dualpipev" and is_full else ScheduleZBVZeroBubble
        return in_v(given, micro_batches, **options)
    ranks, splits = stages[0].group_size, kind == "zero_bubble"
    rows = [
        plan_passes(rank, ranks, stages=len(stages), micro_batches=micro_batches, splits=splits)
        for rank in range(ranks)
    ]
    return _Listed(given, micro_batches, rows, **options)


def split_rounds(micro_batches: int, ranks: int) -> list[int]:
    """Return the number of micro-batches in each round, which a rank computes stage by stage.

    Each round has at least ``ranks`` micro-batches if possible, so that ranks do not wait for each other. The first
    rounds may have one more than the others.
    """
    count = max(1, micro_batches // ranks)
    least, more = divmod(micro_batches, count)
    return [least + 1] * more + [least] * (count - more)


def plan_passes(rank: int, ranks: int, *, stages: int, micro_batches: int, splits: bool = False) -> list[_Action]:
    """Return the passes of a rank with ``stages`` stages: warm-up, alternating, cool-down.

    With ``splits``, weight gradients come ``rank`` backward passes after input gradients, so that all ranks end at the
    same time (ZB-H1, Qi et al. 2024, arXiv 2401.10241).
    """
    mine = range(rank, ranks * stages, ranks)
    forward, backward, first = list[_Action](), list[_Action](), 0
    sizes = split_rounds(micro_batches, ranks)
    kind = _ComputationType.BACKWARD_INPUT if splits else _ComputationType.FULL_BACKWARD
    for size in sizes:
        numbers, first = range(first, first + size), first + size
        forward += [_Action(stage, _ComputationType.FORWARD, number) for stage in mine for number in numbers]
        backward += [_Action(stage, kind, number) for stage in reversed(mine) for number in numbers]
    # warm-up passes, until the gradient of the first output has come back
    ahead = min((stages - 1) * sizes[0] + (1 if splits else 2) * (ranks - 1 - rank), len(forward))
    later = _ComputationType.BACKWARD_WEIGHT
    weights = [_Action(each.stage_index, later, each.microbatch_index) for each in backward] if splits else []
    delayed = [None] * rank + weights
    rounds = zip_longest(forward[ahead:], backward, delayed)
    return [*forward[:ahead], *(each for passes in rounds for each in passes if each is not None)]


@final
class _Listed(_PipelineScheduleRuntime):
    """A schedule given explicitly: ``rows[rank]`` lists the passes of each pipeline rank, in order."""

    def __init__(
        self, stages: list[PipelineStage], micro_batches: int, rows: Sequence[Sequence[_Action]], **options: Any
    ) -> None:
        super().__init__(stages, micro_batches, **options)  # type: ignore[no-untyped-call]
        self.pipeline_order = {rank: [*row] for rank, row in enumerate(rows)}
        self._prepare_schedule_with_comms(self.pipeline_order)


Cost = tuple[int, int]  # weight of the heaviest stage, then the sum of squares as a tie-breaker


def balance_layers(weights: Sequence[int], stages: int) -> list[range]:
    """Split ``weights`` into contiguous, nonempty parts with the smallest maximum sum."""

    @cache
    def find_best_split(start: int, left: int) -> tuple[Cost, tuple[int, ...]]:
        """Split the layers from ``start`` on into ``left`` stages; return their cost and ends."""
        if left == 1:
            return (total := sum(weights[start:]), total**2), (len(weights),)
        options = []
        for end in range(start + 1, len(weights) - left + 2):
            own, ((heaviest, squares), ends) = sum(weights[start:end]), find_best_split(end, left - 1)
            options.append(((max(own, heaviest), own**2 + squares), (end, *ends)))
        return min(options)

    return [range(*ends) for ends in pairwise((0, *find_best_split(0, stages)[1]))]


def check_pipelines(recipe: Recipe) -> None:
    """Raise ConfigError if ``recipe`` does not support a pipeline."""
    if isinstance(recipe, FeatureRecipe):
        raise ConfigError(
            f"a pipeline does not support {type(recipe).__name__}: its loss requires the features of all logical "
            "ranks, but only the last stage has features. Set strategy.pipeline=1."
        )
    for method, misses in (
        ("layers", "does not define the layers of its model"),
        ("model_inputs", "does not define the inputs of its model"),
    ):
        if getattr(type(recipe), method) is getattr(Recipe, method):
            raise ConfigError(f"{type(recipe).__name__} {misses}. Define Recipe.{method}, or set strategy.pipeline=1.")
    if recipe.remembers or saves_state(recipe):
        raise ConfigError(
            f"a pipeline does not support {type(recipe).__name__}, which keeps state between steps: only the last "
            "stage computes the loss. Set strategy.pipeline=1."
        )


def split_stages(recipe: Recipe, model: nn.Module, stages: int, split: Sequence[int] | None) -> list[list[nn.Module]]:
    """Return the layers of each stage, balanced by parameter count, or split at ``split``.

    Raises:
        ConfigError: the recipe does not support a pipeline, has too few layers, or ``split`` leaves a stage empty.
    """
    check_pipelines(recipe)
    chain = list(recipe.layers(model))
    if len(chain) < stages:
        raise ConfigError(
            f"{type(recipe).__name__} has {len(chain)} layers, too few for {stages} stages. Set a smaller "
            "strategy.pipeline or strategy.stages_per_rank, or add layers to the model."
        )
    if split is None:
        parts = balance_layers([sum(own.numel() for own in layer.parameters()) for layer in chain], stages)
    else:
        parts = [range(*ends) for ends in pairwise((0, *split, len(chain)))]
        if not all(parts):
            raise ConfigError(
                f"strategy.split={list(split)} leaves a stage empty: the model has {len(chain)} layers. Set layer "
                f"indices from 1 to {len(chain) - 1}."
            )
    return [[chain[place] for place in part] for part in parts]
