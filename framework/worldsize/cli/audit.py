"""``worldsize audit RUN [OVERRIDE ...]``: train random parts of a run again, and compare the bits with its record."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from worldsize.checkpoint.format import complete, parse_step, read_checkpoint, verify_checkpoint
from worldsize.checkpoint.load import find_differing_tensor, find_differing_value
from worldsize.cli import exit_process, run_folder
from worldsize.cli.compare import show_on_error
from worldsize.config.arguments import build_integer_parser, parse_override_key
from worldsize.config.recorded import read_launcher
from worldsize.core.limits import Range
from worldsize.errors import CheckpointError, WorldsizeError
from worldsize.launch.reproduction import Reproduction
from worldsize.messages import report_error
from worldsize.observe.summary import audit_table
from worldsize.record.attestation import check_attestation
from worldsize.record.chain_check import (
    AuditReport,
    ChainDifference,
    Coverage,
    check_record,
    choose_intervals,
    compare_chains,
    is_sealed,
)
from worldsize.record.json_lines import wrap_read_errors
from worldsize.record.level import read_recorded_level
from worldsize.record.run_directory import RunDirectory, is_locked
from worldsize.record.run_record import RunView, read_run
from worldsize.strict_json import sanitize_json
from worldsize.world.processes import PREEMPTED
from worldsize.world.scratch import temporary_folder

_EXIT_CODES = {"nothing found": 0, "altered": 4}
_OPTIONS = ("logger=none", "faults=[]", "profile.steps=null", "checkpoint.every=0", "checkpoint.at_end=true")
_SHAPES = ("cluster", "strategy")  # with another shape, steps may not be audited as recorded


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize audit", description=__doc__)
    parser.add_argument("run", type=run_folder, metavar="RUN", help="a run folder, its run_manifest.json, or last")
    parser.add_argument(
        "overrides", nargs="*", help="overrides that the reproducibility level allows, e.g. cluster.processes=1"
    )
    parser.add_argument(
        "--samples",
        type=build_integer_parser(Range(least=0)),
        default=20,
        metavar="N",
        help="number of intervals between two saves to train again (20); 0: only check the record",
    )
    parser.add_argument(
        "--longest",
        type=build_integer_parser(Range(least=1)),
        metavar="STEPS",
        help="maximum number of steps to train again for one interval (as many as the longest interval has)",
    )
    parser.add_argument("--seed", type=int, help="seed of the random choice; shown in the report (a new one)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="public key of the run's author, attestation.pub")
    parser.add_argument("--yes", action="store_true", help="run another user's code without asking")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.epilog = "Exit code: 0 nothing found, 4 altered, 2 error."
    options = parser.parse_intermixed_args()
    try:
        report = audit(
            read_run(options.run),
            options.overrides,
            samples=options.samples,
            longest=options.longest,
            seed=secrets.randbits(32) if options.seed is None else options.seed,
            key=options.key,
            yes=options.yes,
        )
    except WorldsizeError as error:
        sys.exit(report_error(error))
    if options.json:
        print(json.dumps(sanitize_json(report.describe()), indent=2))
    else:
        Console().print(audit_table(report))
    exit_process(_EXIT_CODES[report.verdict])


def audit(
    run: RunView,
    overrides: Sequence[str],
    *,
    samples: int,
    longest: int | None,
    seed: int,
    key: Path | None,
    yes: bool,
) -> AuditReport:
    """Check the record of ``run``, and train at most ``samples`` of its intervals again.

    Args:
        run: The run.
        overrides: Options typed now, such as another number of processes.
        samples: Number of intervals.
        longest: Maximum number of steps to train again for an interval; None: as many as the longest interval has.
        seed: Seed of the random choice.
        key: File with the public key of the run's author; None: the user's own.
        yes: Whether to run another user's code without asking.

    Raises:
        WorldsizeError: the run does not guarantee bits or has no chain, or training failed.
    """
    level = read_recorded_level(run.manifest)
    if level.level not in ("bitwise", "same-topology bitwise"):
        remedy = "" if run.manifest.get("resumed") else " Train with reproducibility=elastic or deterministic."
        raise WorldsizeError(
            f"only runs with bitwise reproducibility can be audited, but {run.directory.id} has the level "
            f"{level.level!r}: {level.why}.{remedy}"
        )
    if is_locked(run.directory.path):
        raise WorldsizeError(f"the run {run.directory.path} is being trained. Audit it when it has ended.")
    with wrap_read_errors(run.directory.path):
        problems, remark = check_attestation(run.directory, key)
    problems += check_record(run)
    remarks = [remark] if remark else []
    if not is_sealed(run):
        remarks.append(
            "the manifest does not contain the end of the chain, since the last attempt was killed or did not start; "
            "lines removed from the end are not detected"
        )
    if problems:
        return AuditReport(problems, None, (), seed, remarks)
    coverage = choose_intervals(run, samples=samples, longest=longest, seed=seed)
    differences = _train_again(run, overrides, coverage, yes=yes) if coverage.chosen else []
    return AuditReport((), coverage, differences, seed, remarks)


def _train_again(run: RunView, overrides: Sequence[str], coverage: Coverage, *, yes: bool) -> list[ChainDifference]:
    """Train the chosen intervals again; return the first difference of each stretch of steps, if any."""
    typed = {parse_override_key(word) for word in overrides}
    options = [word for word in _OPTIONS if parse_override_key(word) not in typed]
    if any(key.split(".")[0] in _SHAPES for key in typed):
        options += [f"{key}=0" for key in ("integrity.audit", "integrity.replicas") if key not in typed]
    found: list[ChainDifference] = []
    kept = {parse_step(path): path for path in complete(run.directory.checkpoints)}
    with temporary_folder() as scratch, show_on_error(scratch / "log") as log:
        words, runs = [*overrides, *options], scratch / "runs"
        with Reproduction(run, words, drop="logger", runs=runs, yes=yes, output=log).prepare() as checkout:
            repeated = checkout.write("run.strict=true")
            if read_launcher(read_run(repeated.path)) is not None:
                raise WorldsizeError(
                    "an audit cannot wait for a scheduler's job. Pass a cluster that starts processes itself, e.g. "
                    "cluster=laptop; nothing was trained."
                )
            for first, last in coverage.list_stretches():
                if damage := _find_damage(kept.get(first)):
                    found.append(damage)
                    continue
                print(f"training steps {first + 1} to {last} again", file=sys.stderr, flush=True)
                code = checkout.resume(repeated, kept.get(first), f"run.stop_after={last}")
                if code not in (0, PREEMPTED):
                    raise WorldsizeError(
                        f"training steps {first + 1} to {last} again failed with exit code {code}; see above."
                    )
                with wrap_read_errors(repeated.path):
                    if difference := _find_difference(run, repeated, kept, first, last):
                        found.append(difference)
    return found


def _find_difference(
    run: RunView, repeated: RunDirectory, kept: Mapping[int, Path], first: int, last: int
) -> ChainDifference | None:
    """Return the first difference in the steps after ``first`` up to ``last``, or in the state after them, if any."""
    difference = compare_chains(run.directory.chain, repeated.chain, first=first, last=last)
    return difference or _compare_states(run, repeated, kept.get(last), last)


def _compare_states(run: RunView, repeated: RunDirectory, checkpoint: Path | None, last: int) -> ChainDifference | None:
    """Compare the state after step ``last`` with the run's kept checkpoint, and with its result."""
    if damage := _find_damage(checkpoint):
        return damage
    if checkpoint is not None:
        states = (read_checkpoint(checkpoint), read_checkpoint(repeated.checkpoints / checkpoint.name))
        name = find_differing_tensor(*states) or find_differing_value(*states)
        if name is not None:
            return ChainDifference(last, f"checkpoint: {name}", None, None)
    results = read_run(repeated.path).results
    then, now = (each.get("state_digest") for each in (run.results, results))
    if None not in (then, now) and run.results["steps"] == results["steps"] and then != now:
        return ChainDifference(last, "state_digest", str(then), str(now))
    return None


def _find_damage(checkpoint: Path | None) -> ChainDifference | None:
    """Return a difference if a file of the checkpoint is not the recorded one."""
    if checkpoint is None:
        return None
    try:
        verify_checkpoint(read_checkpoint(checkpoint))
    except CheckpointError as error:
        return ChainDifference(parse_step(checkpoint), "checkpoint", str(error), None)
    return None
