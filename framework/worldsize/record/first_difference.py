"""Finds the first operation with a different result in the recorded steps of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, final

import torch

from worldsize.record.compare import tensor_ulps
from worldsize.record.operations import OperationRecord, list_streams, load_saved, read_operations, read_states

Kind = Literal["result", "input", "operand", "reduction", "operation", "state", "data", "new state"]
_EXPLANATIONS: Mapping[Kind, str] = {
    "result": "the inputs are equal, the results differ",
    "input": "the value of an input differs, but not the recorded results of the operation that computed it",
    "operand": "the operations read the results of different operations",
    "reduction": "the combined gradients differ; between different numbers of processes, their sums are not compared",
    "operation": "the runs perform different operations from here on",
    "state": "the state before the step differs",
    "data": "the data differ",
    "new state": "the state after the step differs, although all recorded results are equal",
}
_AT_ANY_SIZE = ("state", "optimizer", "new state")  # phases of a process that do not depend on the number of processes


@final
@dataclass(frozen=True)
class FirstDifference:
    """The first operation that differs between two runs.

    Attributes:
        step: The step.
        kind: Whether results differ, or only inputs, or the operations themselves; or the state or data of the step.
        stream: The logical rank or process, e.g. ``rank_00003``.
        tensor: Index of the first result (or input) that differs.
        first: The operation in the first run; None if its stream has ended.
        second: The operation in the second run.
        writer: For different inputs, the operation that wrote the input in the first run, if in this step.
        ulp: Largest distance of the results (or inputs), in units in the last place; None if not comparable.
    """

    step: int
    kind: Kind
    stream: str
    tensor: int
    first: OperationRecord | None
    second: OperationRecord | None
    writer: OperationRecord | None = None
    ulp: int | None = None

    @property
    def place(self) -> str:
        """The step, and the logical rank or process, in words."""
        kind, _, number = self.stream.partition("_")
        return f"step {self.step}, {'logical rank' if kind == 'rank' else kind} {int(number)}"

    @property
    def has_size(self) -> bool:
        """Whether the runs have a result (or input) of the same operation to compare."""
        return self.kind in ("result", "input", "operand", "reduction")

    @property
    def explanation(self) -> str:
        """The kind of the difference, in words."""
        return _EXPLANATIONS[self.kind]

    def describe(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {**asdict(self), "explanation": self.explanation}

    def measure(self, first: Path, second: Path) -> FirstDifference:
        """Return this difference with its size, from the tensors that both runs saved in these folders."""
        kind: Literal["inputs", "results"] = "results" if self.kind == "result" else "inputs"
        one, other = (load_saved(folder, kind, self.tensor) for folder in (first, second))
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            return self
        one, other = (torch.view_as_real(each) if each.is_complex() else each for each in (one, other))
        return replace(self, ulp=tensor_ulps(one, other))


def find_first_difference(
    first: Path, second: Path, *, step: int, same_processes: bool = True
) -> FirstDifference | None:
    """Compare the operations in two folders, stream by stream; return the first difference.

    ``same_processes``: whether the runs have the same number of processes. Otherwise, sums of gradients are skipped.
    """
    streams = sorted({*list_streams(first), *list_streams(second)})
    if not same_processes:
        streams = [stream for stream in streams if not stream.startswith("process_") or stream == "process_00000"]
    found = [
        difference
        for stream in streams
        if (difference := _compare_streams(first, second, stream, step=step, same_processes=same_processes))
    ]
    if not found:
        return None
    earliest = min(found, key=_get_numbers)
    return replace(earliest, writer=_find_writer(first, earliest)) if earliest.kind == "input" else earliest


def find_first_step(first: Path, second: Path, *, until: int) -> int:
    """Return the first step that results in different states in the two folders, at most ``until``.

    If the states before the first step already differ, this is the first step.

    Raises:
        WorldsizeError: a file is damaged.
    """
    one, other = (read_states(folder) for folder in (first, second))
    steps = sorted(one.keys() & other.keys())
    differing = next((step for step in steps if one[step] != other[step]), until)
    return min(steps[1] if differing == steps[0] else differing, until) if len(steps) > 1 else until


def _get_numbers(difference: FirstDifference) -> list[int]:
    """Return the positions of the operations in their runs, smallest first."""
    return sorted(each.number for each in (difference.first, difference.second) if each is not None)


def _compare_streams(
    first: Path, second: Path, stream: str, *, step: int, same_processes: bool
) -> FirstDifference | None:
    is_whole = same_processes or stream.startswith("rank_")
    streams = (
        (each for each in read_operations(folder, stream) if is_whole or each.phase in _AT_ANY_SIZE)
        for folder in (first, second)
    )
    for one, other in zip_longest(*streams):
        if (found := _compare_operations(one, other)) is not None:
            kind, tensor = found
            if not is_whole and kind in ("input", "operand"):
                kind = "reduction"
            return FirstDifference(step, kind, stream, tensor, one, other)
    return None


def _compare_operations(one: OperationRecord | None, other: OperationRecord | None) -> tuple[Kind, int] | None:
    """Return the kind of a difference, and the index of the first tensor that differs; None if there is none."""
    if one is None or other is None or (one.name, one.phase) != (other.name, other.phase):
        return "operation", 0
    input_index = _find_differing(one.inputs, other.inputs)
    index = _find_differing([*one.results, *one.tensors], [*other.results, *other.tensors])
    if one.phase in ("state", "data", "new state"):
        named = index if one.module == other.module else 0
        return None if named is None else (one.phase, 0)
    if input_index is not None:
        is_same = one.writers[input_index : input_index + 1] == other.writers[input_index : input_index + 1]
        return ("input" if is_same else "operand"), input_index
    return None if index is None else ("result", index % max(1, len(one.tensors)))


def _find_differing(one: Sequence[str], other: Sequence[str]) -> int | None:
    pairs = enumerate(zip_longest(one, other))
    return next((index for index, (first, second) in pairs if first != second), None)


def _find_writer(folder: Path, difference: FirstDifference) -> OperationRecord | None:
    """Return the operation of the same process that wrote the input, if it is in this step."""
    reader = difference.first
    writer = reader.writers[difference.tensor] if reader is not None and reader.writers else ""
    stream, _, number = writer.partition("/")
    return next((each for each in read_operations(folder, stream) if str(each.number) == number), None)
