"""Checks a run's chain against its record, and against a repetition of some of its steps."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal, final

from worldsize.checkpoint.format import complete, parse_step, read_digest
from worldsize.errors import CheckpointError, WorldsizeError
from worldsize.record.chain import BrokenChainError, ChainLink, Kind, read_chain
from worldsize.record.json_lines import Row, complete_lines, wrap_read_errors
from worldsize.record.metrics import extract_computed, metric_rows
from worldsize.record.run_record import RunView
from worldsize.strict_json import sanitize_json

ALTERED = (0.01, 0.05, 0.2)  # shares of a run; a report gives the probability of passing if they are altered
_REPEATED: tuple[Kind, ...] = ("logged", "evaluated", "audited")  # lines that a repetition of the run must have, too


def check_record(run: RunView) -> list[str]:
    """Compare the chain of ``run`` with its manifest, metrics and checkpoints; return the contradictions.

    Raises:
        WorldsizeError: the run has no chain, or a file cannot be read.
    """
    path = run.directory.chain
    with wrap_read_errors(run.directory.path):
        if next(complete_lines(path), None) is None:
            raise WorldsizeError(f"{path} is missing or empty. Audit a run of this version of worldsize.")
        saved, head = dict[int, str](), dict[str, Any]()
        try:
            for number, link in enumerate(read_chain(path), 1):
                head = {"head": link.digest, "lines": number}
                if link.kind == "checkpoint":
                    saved[link.step] = link.row["checkpoint"]
        except BrokenChainError as error:
            return [f"{error}."]
        return [
            *_check_head(run, next(read_chain(path)), head),
            *_check_metrics(run, path),
            *_check_results(run, path),
            *_check_checkpoints(run, saved),
        ]


def is_sealed(run: RunView) -> bool:
    """Return whether the manifest contains the end of the chain: the last attempt has ended, and was not killed."""
    return "chain" in run.results and run.exit_reason not in ("running", "killed")


def _check_head(run: RunView, first: ChainLink, head: Mapping[str, Any]) -> Iterator[str]:
    if first.row["run"] != run.manifest["run_id"]:
        yield f"the chain is of the run {first.row['run']}."
    if is_sealed(run) and (recorded := run.results["chain"]) != head:
        yield (
            f"the chain has {head['lines']} lines and ends with {head['head'][:16]}; the manifest lists "
            f"{recorded['lines']} lines and {recorded['head'][:16]}."
        )


def _check_metrics(run: RunView, path: Path) -> Iterator[str]:
    kinds: tuple[tuple[Kind, str, Callable[[Row], Any]], ...] = (
        ("logged", "step", extract_computed),
        ("evaluated", "evaluation", lambda row: row["metrics"]),
    )
    for kind, event, get_values in kinds:
        rows = (row for row in metric_rows(run.directory.metrics) if row["event"] == event)
        links = (link for link in read_chain(path) if link.kind == kind)
        for row, link in zip_longest(rows, links):
            if row is None and not is_sealed(run):  # the process was killed between the two writes
                break
            if row is None or link is None or (row["step"], get_values(row)) != (link.step, link.row[kind]):
                step = min(([row["step"]] if row else []) + ([link.step] if link else []))
                yield f"metrics.jsonl differs from the chain at step {step} ({event})."
                break


def _check_results(run: RunView, path: Path) -> Iterator[str]:
    last = None
    for link in read_chain(path):
        last = link.row["evaluated"] if link.kind == "evaluated" else last
    metrics = run.results.get("metrics")
    if metrics and last is not None and sanitize_json(dict(metrics)) != last:
        yield "the final metrics in the manifest differ from those in the chain."


def _check_checkpoints(run: RunView, saved: Mapping[int, str]) -> Iterator[str]:
    kept = complete(run.directory.checkpoints)
    for path in kept:
        try:
            digest = read_digest(path)
        except CheckpointError as error:
            yield str(error)
            continue
        expected = saved.get(parse_step(path))
        if expected is None and path == kept[-1] and not is_sealed(run):
            continue  # the process was killed before it could add the line
        if expected != digest:
            fact = "is not in the chain" if expected is None else "differs from the one in the chain"
            yield f"the checkpoint {path.name} {fact}."


@final
@dataclass(frozen=True)
class Interval:
    """The steps between two saves of a run.

    Attributes:
        first: Step of the first save, which is not part of the interval; 0 for the start of the run.
        last: Step of the second save, or the run's last step.
        start: Step of the newest kept checkpoint up to ``first``; 0 for the initial weights.
    """

    first: int
    last: int
    start: int

    @property
    def cost(self) -> int:
        """Number of steps to train again."""
        return self.last - self.start


@final
@dataclass(frozen=True)
class Coverage:
    """How much of a run is audited.

    Attributes:
        intervals: All intervals between two saves, in order.
        reached: Intervals that cost at most the longest allowed number of steps.
        chosen: Those chosen at random to be repeated.
    """

    intervals: Sequence[Interval]
    reached: Sequence[Interval]
    chosen: Sequence[Interval]

    @property
    def unreached_share(self) -> float:
        """Fraction of the steps in intervals too far from a kept checkpoint."""
        return 1 - _count_steps(self.reached) / _count_steps(self.intervals)

    @property
    def audited_share(self) -> float:
        """Fraction of the steps in the chosen intervals."""
        return _count_steps(self.chosen) / _count_steps(self.intervals)

    def compute_pass_probability(self, share: float) -> float:
        """Return the probability that none of the chosen intervals is among a ``share`` of altered ones.

        The altered intervals are assumed to be spread at random over the run (hypergeometric distribution).
        """
        total, chosen = len(self.intervals), len(self.chosen)
        altered = min(total, math.ceil(share * total))
        return math.comb(total - altered, chosen) / math.comb(total, chosen)

    def list_stretches(self) -> list[tuple[int, int]]:
        """Return (checkpoint to start from, last step) of the steps to train again for the chosen intervals."""
        ends: dict[int, int] = {}
        for each in self.chosen:
            ends[each.start] = max(each.last, ends.get(each.start, 0))
        return sorted(ends.items())


def choose_intervals(run: RunView, *, samples: int, longest: int | None, seed: int) -> Coverage:
    """Choose at most ``samples`` intervals of ``run`` at random.

    Args:
        run: The run, whose chain must be valid.
        samples: Number of intervals.
        longest: Maximum number of steps to train again for an interval; None: as many as its longest interval has.
        seed: Seed of the choice.

    Raises:
        WorldsizeError: no step has been logged.
    """
    saved, last = {0}, 0
    for link in read_chain(run.directory.chain):
        last = max(last, link.step)
        if link.kind == "checkpoint":
            saved.add(link.step)
    if not last:
        raise WorldsizeError("the run has no logged step. Train it further.")
    kept = sorted({0, *map(parse_step, complete(run.directory.checkpoints))})
    bounds = list(pairwise(sorted({*saved, last})))
    if longest is None:
        longest = max(end - first for first, end in bounds)
    intervals = list(_find_intervals(bounds, kept))
    reached = [each for each in intervals if each.cost <= longest]
    chosen = random.Random(seed).sample(reached, min(samples, len(reached)))
    return Coverage(intervals, reached, sorted(chosen, key=lambda each: each.first))


def _find_intervals(bounds: Iterable[tuple[int, int]], kept: Sequence[int]) -> Iterator[Interval]:
    index = 0
    for first, last in bounds:
        while index + 1 < len(kept) and kept[index + 1] <= first:
            index += 1
        yield Interval(first, last, kept[index])


def _count_steps(intervals: Iterable[Interval]) -> int:
    return sum(each.last - each.first for each in intervals)


@final
@dataclass(frozen=True)
class ChainDifference:
    """A value that differs between a run and its repetition.

    Attributes:
        step: The step.
        what: The value, such as "losses" or "checkpoint: model/weight".
        recorded: The value in the record, as text; None if it is not recorded.
        repeated: The value of the repetition, as text; None if it has none.
    """

    step: int
    what: str
    recorded: str | None
    repeated: str | None

    def describe(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)


def compare_chains(recorded: Path, repeated: Path, *, first: int, last: int) -> ChainDifference | None:
    """Return the first difference between two chains in the steps after ``first`` up to ``last``.

    Digests of audited gradients are only compared if both chains have them. The first logged loss is ignored if it is
    NaN or infinite: it may come from a step before ``first``.

    Raises:
        WorldsizeError: the repetition ended before step ``last``.
    """
    one, other = (_collect_values(path, first, last) for path in (recorded, repeated))
    if one and max(one)[0] > max(other, default=(first, ""))[0]:
        raise WorldsizeError(
            f"the repetition ended before step {max(one)[0]}. Audit the run again; if it is stopped by a time limit, "
            "audit it on another cluster, e.g. with cluster=laptop."
        )
    keys = sorted(one.keys() | other.keys())
    first_log = next((key for key in keys if key[1] == "logged"), None)
    for key in keys:
        (step, kind), then, now = key, one.get(key), other.get(key)
        if key == first_log and then and now:
            then, now = _drop_nonfinite_loss(then, now)
        if then == now or (kind == "audited" and None in (then, now)):
            continue
        name, *values = _find_value(then, now)
        return ChainDifference(step, name or kind, *(None if each is None else json.dumps(each) for each in values))
    return None


def _find_value(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any]:
    """Return the dotted name of the first value that differs, and both values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        key = next(key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key))
        return _find_value(one.get(key), other.get(key), f"{path}.{key}" if path else key)
    return path, one, other


def _drop_nonfinite_loss(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if all(isinstance(each["logged"]["loss"], float | int) for each in (one, other)):
        return one, other
    first, second = ({**each, "logged": {**each["logged"], "loss": None}} for each in (one, other))
    return first, second


def _collect_values(path: Path, first: int, last: int) -> dict[tuple[int, str], Mapping[str, Any]]:
    return {
        (link.step, str(link.kind)): link.values
        for link in read_chain(path)
        if first < link.step <= last and link.kind in _REPEATED
    }


@final
@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        problems: Contradictions within the record; if there are any, nothing was trained.
        coverage: How much of the run was trained again; None if nothing was.
        differences: The first difference of each repeated stretch of steps.
        seed: Seed of the random choice.
        remarks: Remarks, such as on the signature.
    """

    problems: Sequence[str]
    coverage: Coverage | None
    differences: Sequence[ChainDifference]
    seed: int
    remarks: Sequence[str] = ()

    @property
    def verdict(self) -> Literal["nothing found", "altered"]:
        """Whether anything contradicts the record."""
        return "altered" if self.problems or self.differences else "nothing found"

    def list_pass_probabilities(self) -> dict[float, float]:
        """Return the probability that this audit finds nothing in an altered run, by the altered share of it."""
        return {each: self.coverage.compute_pass_probability(each) for each in ALTERED} if self.coverage else {}

    def describe(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        covered = (
            {
                "intervals": len(self.coverage.intervals),
                "reached": len(self.coverage.reached),
                "audited": [[each.first + 1, each.last] for each in self.coverage.chosen],
                "audited_share": self.coverage.audited_share,
                "unreached_share": self.coverage.unreached_share,
                "pass_probability": {str(share): each for share, each in self.list_pass_probabilities().items()},
            }
            if self.coverage
            else {}
        )
        return {
            "verdict": self.verdict,
            "problems": list(self.problems),
            "differences": [each.describe() for each in self.differences],
            **covered,
            "seed": self.seed,
            "remarks": list(self.remarks),
        }
