"""``worldsize compare RUN_A RUN_B``: show where two runs differ, and by how much.

With ``--operations``, both runs are trained again up to the first step that differs, to find the operation in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO, final

from rich.console import Console

from worldsize.checkpoint.format import complete, parse_step, read_checkpoint
from worldsize.checkpoint.load import find_differing_tensor
from worldsize.cli import exit_process, run_folder
from worldsize.config.arguments import build_number_parser
from worldsize.config.compose import format_override
from worldsize.core.limits import Range
from worldsize.errors import WorldsizeError
from worldsize.launch.reproduction import Checkout, Reproduction
from worldsize.messages import report_error
from worldsize.observe.summary import comparison_table, operations_table
from worldsize.record.compare import Comparison, compare_runs
from worldsize.record.first_difference import FirstDifference, find_first_difference, find_first_step
from worldsize.record.json_lines import wrap_read_errors
from worldsize.record.metrics import last_step
from worldsize.record.operations import list_streams, read_states
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunView, read_run
from worldsize.strict_json import sanitize_json
from worldsize.world.processes import PREEMPTED
from worldsize.world.scratch import temporary_folder

EXIT_CODES = {"bitwise identical": 0, "within tolerance": 3, "different": 4, "not reproduced": 4}
TOLERANCE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize compare", description=__doc__)
    parser.add_argument(
        "runs", nargs=2, type=run_folder, metavar="RUN", help="a run folder, its run_manifest.json, or last"
    )
    parser.add_argument(
        "--operations", action="store_true", help="train both runs again, and name the first operation that differs"
    )
    parser.add_argument("--yes", action="store_true", help="with --operations, run another user's code without asking")
    add_report_options(parser)
    parser.epilog = f"{parser.epilog} With --operations, 4 also if training again gives equal results."
    parser.set_defaults(tolerance=None)
    options = parser.parse_args()
    if options.operations and options.tolerance is not None:
        parser.error("--tolerance is not supported with --operations, which compares bits. Remove --tolerance.")
    if options.yes and not options.operations:
        parser.error("--yes requires --operations: without it, no code is run. Remove --yes.")
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    try:
        first, second = (read_run(path) for path in options.runs)
        comparison = compare_runs(first.directory.path, second.directory.path, tolerance=tolerance)
        if options.operations:
            report = compare_operations(first, second, comparison, yes=options.yes)
            show_report(report, as_json=options.json)
            exit_process(EXIT_CODES[report.verdict])
    except WorldsizeError as error:
        sys.exit(report_error(error))
    show_comparison(comparison, as_json=options.json)
    sys.exit(EXIT_CODES[comparison.verdict])


def add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--tolerance",
        type=build_number_parser(Range(least=0)),
        default=TOLERANCE,
        help="relative tolerance for each value",
    )
    parser.epilog = "Exit code: 0 bitwise identical, 3 within tolerance, 4 different, 2 error."


def show_comparison(comparison: Comparison, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(sanitize_json(comparison.describe()), indent=2))
    else:
        Console().print(comparison_table(comparison))


@final
@dataclass(frozen=True)
class OperationsReport:
    """The first operation that differs, if any.

    Attributes:
        verdict: "not reproduced" if the records differ or are incomplete, but training again gave equal results.
        difference: The operation in both runs.
        remarks: Remarks on the repeated runs.
    """

    verdict: Literal["bitwise identical", "different", "not reproduced"]
    difference: FirstDifference | None = None
    remarks: Sequence[str] = ()


def show_report(report: OperationsReport, *, as_json: bool) -> None:
    if as_json:
        difference = report.difference.describe() if report.difference else None
        plain = {"verdict": report.verdict, "difference": difference, "remarks": list(report.remarks)}
        print(json.dumps(sanitize_json(plain), indent=2))
    else:
        Console().print(operations_table(report.difference, report.remarks, verdict=report.verdict))


def compare_operations(first: RunView, second: RunView, comparison: Comparison, *, yes: bool) -> OperationsReport:
    """Train both runs again up to the first step that differs, and compare its operations.

    Raises:
        WorldsizeError: a record is damaged or not allowed to run, its operations cannot be recorded, or training
            failed.
    """
    if comparison.verdict == "bitwise identical":
        return OperationsReport(
            "bitwise identical", remarks=["the recorded runs are bitwise identical; nothing was trained"]
        )
    until = _find_differing_step(first, second, comparison)
    shared = _find_shared_checkpoint(first, second, before=until)
    same_processes = _count_processes(first) == _count_processes(second)
    with temporary_folder() as scratch, show_on_error(scratch / "log") as log, ExitStack() as stack:
        replays = [
            Replay(stack.enter_context(_prepare(run, scratch / name, log, yes=yes)), checkpoint)
            for run, name, checkpoint in zip((first, second), ("a", "b"), shared or (None, None), strict=True)
        ]
        one, other = (replay.record(until) for replay in replays)
        step = find_first_step(one, other, until=until)
        if step < until:
            one, other = (replay.record(step) for replay in replays)
        found = find_first_difference(one, other, step=step, same_processes=same_processes)
        pairs = zip(replays, (one, other), strict=True)
        remarks = [remark for replay, folder in pairs for remark in replay.list_deviations(folder, until=step)]
        if found is not None and found.has_size and found.first and found.second:
            numbers = (found.first.number, found.second.number)
            one, other = (
                replay.record(step, saved=f"{found.stream}/{number}")
                for replay, number in zip(replays, numbers, strict=True)
            )
            found = found.measure(one, other)
    if found is None:
        return OperationsReport("not reproduced", remarks=[*remarks, *_explain_equal_results(comparison)])
    return OperationsReport("different", found, remarks)


def _explain_equal_results(comparison: Comparison) -> Iterator[str]:
    """Yield remarks on runs whose repetitions are equal."""
    if comparison.missing and all(each.is_equal for each in (*comparison.metrics, *comparison.tensors)):
        yield "the values in both records are equal, and training again gave equal results"
        yield from (f"not compared: {text}" for text in comparison.missing)
    else:
        yield "the recorded runs differ, but training again gave equal results"


@contextmanager
def show_on_error(path: Path) -> Iterator[TextIO]:
    """Yield a new file for the output of repeated runs; print it if one fails."""
    with path.open("w+", errors="replace") as log:
        try:
            yield log
        except WorldsizeError:
            log.seek(0)
            print(log.read(), end="", file=sys.stderr)
            raise


def _find_differing_step(first: RunView, second: RunView, comparison: Comparison) -> int:
    """Return the first step that differs in the records; it may have been preceded by others that were not logged.

    Raises:
        WorldsizeError: a run lacks logged steps.
    """
    last = min(last_step(run.directory.metrics) for run in (first, second))
    if not last:
        raise WorldsizeError("a run without a logged step cannot be compared by operations. Train it further.")
    steps = [each.first_step for each in (*comparison.metrics, *comparison.tensors) if each.first_step]
    return min([last, *steps])


def _find_shared_checkpoint(first: RunView, second: RunView, *, before: int) -> tuple[Path, Path] | None:
    """Return both runs' newest checkpoints of one step with the same state, if there are any ``before`` a step."""
    runs = [{parse_step(path): path for path in complete(run.directory.checkpoints)} for run in (first, second)]
    for step in sorted(runs[0].keys() & runs[1].keys(), reverse=True):
        one, other = runs[0][step], runs[1][step]
        if step < before and find_differing_tensor(read_checkpoint(one), read_checkpoint(other)) is None:
            return one, other
    return None


def _count_processes(run: RunView) -> int:
    return int(run.manifest["cluster"]["processes"])


def _prepare(run: RunView, runs: Path, log: TextIO, *, yes: bool) -> AbstractContextManager[Checkout]:
    """Prepare to train a run again without its loggers, faults and audits."""
    options = ["logger=none", "faults=[]", "profile.steps=null", "integrity.audit=0", "integrity.replicas=0"]
    return Reproduction(run, options, drop="logger", runs=runs, yes=yes, output=log).prepare()


@final
@dataclass(frozen=True)
class Replay:
    """Trains a run again from ``checkpoint``, or from the start, in a checkout of its code."""

    checkout: Checkout
    checkpoint: Path | None

    def record(self, step: int, *, saved: str | None = None) -> Path:
        """Train up to ``step``, and return the folder with its operations; ``saved``: the one to save."""
        print(f"training {self.checkout.original.id} again up to step {step}", file=sys.stderr, flush=True)
        options = [f"profile.operations={step}", format_override("profile.saved_operation", saved)]
        if self.checkpoint is None:  # one start instead of two
            run, code = self.checkout.train(*options)
        else:
            run = self.checkout.write(*options)
            code = self.checkout.resume(run, self.checkpoint)
        if code not in (0, PREEMPTED):
            raise WorldsizeError(f"repeating {self.checkout.original.id} failed with exit code {code}; see above.")
        self._check_complete(run, step)
        return run.operations

    def _check_complete(self, run: RunDirectory, step: int) -> None:
        """Raise WorldsizeError unless the operations of ``step`` were recorded for every logical rank."""
        last = max(read_states(run.operations), default=0)
        if last != step:
            raise WorldsizeError(
                f"repeating {self.checkout.original.id} ended after step {last}, not {step}; see above. If it was "
                "interrupted, compare the runs again."
            )
        with wrap_read_errors(run.path):
            logical_ranks = int(read_run(run.path).manifest["determinism"]["logical_ranks"])
        wanted = {f"rank_{rank:05d}" for rank in range(logical_ranks)}
        if missing := sorted(wanted - set(list_streams(run.operations))):
            raise WorldsizeError(
                f"repeating {self.checkout.original.id} recorded no operations of {missing[0]}. Compare the logged "
                "metrics and weights instead, without --operations."
            )

    def list_deviations(self, operations: Path, *, until: int) -> list[str]:
        """Return a remark if the values logged up to step ``until`` differ from the recorded ones."""
        original = self.checkout.original
        comparison = compare_runs(original.path, operations.parent, tolerance=0)
        return [
            f"{original.id}: repeating it gave a different {each.name} at step {each.first_step} than recorded"
            for each in comparison.metrics
            if each.first_step and each.first_step <= until
        ]
