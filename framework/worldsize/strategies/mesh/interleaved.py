"""The interleaved schedule of a pipeline for any number of micro-batches; torch's takes only some numbers."""

from __future__ import annotations

import logging
from itertools import zip_longest
from typing import Any, final

from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

_LOGGER = logging.getLogger(_PipelineScheduleRuntime.__module__)


def interleaved(stages: list[PipelineStage], micro_batches: int, **options: Any) -> _PipelineScheduleRuntime:
    """Return the schedule of a step; ``stages``: those of this rank; ``options``: those of torch's schedules.

    It does not log an error that ends the step, which torch does with all passes of all ranks; the error is raised.
    """
    _LOGGER.setLevel(logging.CRITICAL)
    if len({*rounds(micro_batches, stages[0].group_size)}) == 1:
        return ScheduleInterleaved1F1B(stages, micro_batches, **options)  # type: ignore[arg-type]
    return _Uneven(stages, micro_batches, **options)


def rounds(micro_batches: int, ranks: int) -> list[int]:
    """Return the number of micro-batches of each round, in which a rank computes them stage by stage.

    Each has ``ranks`` or more of them, so that a rank need not wait for another one; the first rounds may have one more
    than the others.
    """
    count = max(1, micro_batches // ranks)
    least, more = divmod(micro_batches, count)
    return [least + 1] * more + [least] * (count - more)


def passes(rank: int, ranks: int, *, stages: int, micro_batches: int) -> list[_Action]:
    """Return the passes of a rank that has ``stages`` stages: forward ones, then one of each, then backward ones."""
    mine = range(rank, ranks * stages, ranks)
    forward, backward, first = list[_Action](), list[_Action](), 0
    sizes = rounds(micro_batches, ranks)
    for size in sizes:
        numbers, first = range(first, first + size), first + size
        forward += [_Action(stage, _ComputationType.FORWARD, number) for stage in mine for number in numbers]
        kind = _ComputationType.FULL_BACKWARD
        backward += [_Action(stage, kind, number) for stage in reversed(mine) for number in numbers]
    # until the last rank has the first output, and that output's gradient has come back
    ahead = min((stages - 1) * sizes[0] + 2 * (ranks - 1 - rank), len(forward))
    pairs = zip_longest(forward[ahead:], backward)
    return [*forward[:ahead], *(each for pair in pairs for each in pair if each is not None)]


@final
class _Uneven(_PipelineScheduleRuntime):
    """Runs :func:`passes` in rounds of different sizes."""

    def __init__(self, stages: list[PipelineStage], micro_batches: int, **options: Any) -> None:
        super().__init__(stages, micro_batches, **options)  # type: ignore[no-untyped-call]
        ranks = stages[0].group_size
        self.pipeline_order = {
            rank: [*passes(rank, ranks, stages=len(stages), micro_batches=micro_batches)] for rank in range(ranks)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
