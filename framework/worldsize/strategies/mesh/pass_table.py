"""A pipeline schedule that the user lists as CSV.

A row is one rank, and a cell is one pass, such as ``0F2``. A pass has the index of a stage, its kind, and the index of
a micro-batch. F is a forward pass, B a backward pass, and I and W are its two parts, for the gradients of inputs and of
weights. Empty cells are ignored. torchtitan reads the same format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

from worldsize.core import ConfigError

_KEY = "strategy.schedule_csv"
_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS = "F", "B", "I", "W"
_SECONDS = {_FORWARD: 1, _BACKWARD: 2, _INPUTS: 1, _WEIGHTS: 1}  # relative duration of passes


class ListedPass(NamedTuple):
    """One pass: indices of its stage and micro-batch, and its kind (F, B, I or W)."""

    stage: int
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.number}"


@final
@dataclass(frozen=True)
class PassTable:
    """The passes of each pipeline rank, in order.

    Raises:
        ConfigError: passes are missing, repeated, out of order, or wait for each other.
    """

    rows: Sequence[Sequence[ListedPass]]

    def __post_init__(self) -> None:
        self._check_stages()
        self._check_passes()
        _ = self._seconds  # raises if passes wait for each other

    @classmethod
    def from_csv(cls, text: str, ranks: int) -> PassTable:
        """Parse the table of a pipeline with ``ranks`` ranks.

        Raises:
            ConfigError: a cell is not a pass, or the table cannot run.
        """
        if re.fullmatch(r".+\.csv", text.strip(), re.IGNORECASE):
            raise ConfigError(
                f"{_KEY}={text}: expected the table itself, not a path, because the run records its text. Pass "
                f"\"{_KEY}='$(cat {text})'\"."
            )
        rows = (line.split(",") for line in text.splitlines())
        lines = [row for row in rows if any(cell.strip() for cell in row)]
        if len(lines) != ranks:
            remedy = (
                f"Set strategy.pipeline={len(lines)}, or change the rows." if len(lines) > 1 else "Change the rows."
            )
            raise ConfigError(
                f"{_KEY} has {len(lines)} rows, but strategy.pipeline={ranks} requires one for each rank. {remedy}"
            )
        return cls([[*_parse_row(number, row)] for number, row in enumerate(lines, 1)])

    @cached_property
    def rank_of_stage(self) -> Sequence[int]:
        """The pipeline rank of each stage."""
        ranks = {each.stage: rank for rank, row in enumerate(self.rows) for each in row}
        return [ranks[stage] for stage in sorted(ranks)]

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches per step of a data-parallel part."""
        return 1 + max(each.number for row in self.rows for each in row)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward passes compute input and weight gradients separately."""
        return any(each.kind == _INPUTS for row in self.rows for each in row)

    @property
    def idle_share(self) -> float:
        """Average idle fraction of a rank, if backward takes twice as long as forward."""
        busy = sum(_SECONDS[each.kind] for row in self.rows for each in row)
        return 1 - busy / (len(self.rows) * self._seconds)

    def count_kept(self) -> float:
        """Return a rank's peak number of micro-batches with stored activations.

        Each stage counts as its fraction of the rank.
        """
        most = 0
        for row in self.rows:
            kept = 0
            for each in row:
                kept += (each.kind == _FORWARD) - (each.kind in (_BACKWARD, _WEIGHTS))
                most = max(most, kept)
        return most * len(self.rows) / len(self.rank_of_stage)

    def _check_stages(self) -> None:
        ranks: dict[int, set[int]] = {}
        for rank, row in enumerate(self.rows):
            for each in row:
                ranks.setdefault(each.stage, set()).add(rank)
        for stage, found in ranks.items():
            if len(found) > 1:
                raise ConfigError(f"{_KEY} has stage {stage} in several rows. Assign it to one rank.")
        if sorted(ranks) != [*range(len(ranks))]:
            raise ConfigError(
                f"{_KEY} has the stages {', '.join(map(str, sorted(ranks)))}. Number them from 0 without gaps."
            )

    def _check_passes(self) -> None:
        """Raise ConfigError unless each stage has each micro-batch once, in order."""
        numbers = range(self.micro_batches)
        for row in self.rows:
            for stage in {each.stage for each in row}:
                mine = [each for each in row if each.stage == stage]
                backward = [each.number for each in mine if each.kind in (_BACKWARD, _INPUTS)]
                parts = {kind: [each.number for each in mine if each.kind == kind] for kind in _SECONDS}
                self._check_order(stage, "forward", parts[_FORWARD])
                self._check_order(stage, "backward", backward)
                if parts[_WEIGHTS] != parts[_INPUTS]:
                    raise ConfigError(
                        f"{_KEY}: stage {stage} needs a W pass for each I pass, in the same order. Use B for a "
                        "backward pass in one part."
                    )
                self._check_order(stage, "last backward", [each.number for each in mine if each.kind in "BW"])
                for number in numbers:
                    own = [each.kind for each in mine if each.number == number]
                    if own not in ([_FORWARD, _BACKWARD], [_FORWARD, _INPUTS, _WEIGHTS]):
                        raise ConfigError(
                            f"{_KEY}: stage {stage} has the passes {', '.join(own)} for "
                            f"micro-batch {number}; expected F, B or F, I, W, in that order."
                        )

    def _check_order(self, stage: int, kind: str, found: Sequence[int]) -> None:
        if list(found) == [*range(self.micro_batches)]:
            return
        repeated = [number for number, count in Counter(found).items() if count > 1]
        missing = sorted({*range(self.micro_batches)} - {*found})
        fact = "are not in the order of micro-batches"
        if missing or repeated:
            number, fact = (missing[0], "miss") if missing else (repeated[0], "repeat")
            fact += f" micro-batch {number}"
        raise ConfigError(
            f"{_KEY}: the {kind} passes of stage {stage} {fact}. List each of the {self.micro_batches} micro-batches "
            "once, in order."
        )

    @cached_property
    def _seconds(self) -> int:
        """Duration of a step, in forward passes of a stage.

        Raises:
            ConfigError: passes wait for each other.
        """
        left, clocks = [list(row) for row in self.rows], [0] * len(self.rows)
        ended: dict[tuple[bool, int, int], int] = {}  # whether forward, stage, micro-batch
        while any(left):
            has_moved = False
            for rank, row in enumerate(left):
                while row and (begin := self._find_start(row[0], ended)) is not None:
                    each, has_moved = row.pop(0), True
                    clocks[rank] = max(clocks[rank], begin) + _SECONDS[each.kind]
                    if each.kind != _WEIGHTS:
                        ended[each.kind == _FORWARD, each.stage, each.number] = clocks[rank]
            if not has_moved:
                waiting = ", ".join(f"{row[0]} on rank {rank}" for rank, row in enumerate(left) if row)
                raise ConfigError(f"{_KEY}: passes wait for each other: {waiting}. Change their order.")
        return max(clocks)

    def _find_start(self, action: ListedPass, ended: dict[tuple[bool, int, int], int]) -> int | None:
        """Return the time at which the inputs of a pass are available; None if not yet known."""
        stage, kind, last = action.stage, action.kind, len(self.rank_of_stage) - 1
        if kind == _WEIGHTS:
            return 0  # after the first part, on the same rank
        needed = [(True, stage - 1)] if kind == _FORWARD else [(True, stage), (False, stage + 1)]
        times = [ended.get((*each, action.number)) for each in needed if 0 <= each[1] <= last]
        return None if None in times else max((time for time in times if time is not None), default=0)


def _parse_row(number: int, row: Sequence[str]) -> Iterator[ListedPass]:
    for column, cell in enumerate(row, 1):
        if not (word := cell.strip()):
            continue
        match = re.fullmatch(r"([0-9]{1,4})([FBIW])([0-9]{1,6})", word)
        if match is None:
            raise ConfigError(
                f"{_KEY}, row {number}, column {column}: {word[:40]!r} is not a pass. Write a stage, F, B, I or W, and "
                "a micro-batch, such as 0F2."
            )
        yield ListedPass(int(match[1]), match[2], int(match[3]))
