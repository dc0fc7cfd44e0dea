"""``worldsize resume RUN [OVERRIDE ...]``: resume a run from its newest undamaged checkpoint, or an earlier one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from omegaconf import DictConfig

from worldsize.checkpoint.format import HYPERPARAMETERS, PARTS, complete, parse_step
from worldsize.cli import RUN, call_composed, exit_process, run_and_overrides
from worldsize.config.compose import compose_only, resolve_config
from worldsize.errors import WorldsizeError
from worldsize.launch.recorded_run import build_run_options, check_before_start, enter_project
from worldsize.messages import report_error
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunRecord, open_record


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize resume", description=__doc__)
    help = f"{RUN}; overrides, such as cluster.processes=2 or steps=2000"
    parser.add_argument("words", nargs="*", metavar="RUN | OVERRIDE", help=help)
    parser.add_argument("--yes", action="store_true", help="resume another user's run without asking")
    parser.add_argument(
        "--allow-older", action="store_true", help="fall back to an older checkpoint if the newest is damaged"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PART",
        help="accept changes of a configuration key (e.g. lr, recipe) or of the data files ('data'), or skip a part "
        "of the saved state (optimizer, schedule, hyperparameters, streams); may be given more than once",
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=int,
        metavar="STEP",
        help="go back to the checkpoint of this step, or to the start (0); later checkpoints and metrics are moved to "
        "the folder rewound of the run",
    )
    parser.add_argument(
        "--skip-samples",
        dest="skip",
        action="append",
        default=[],
        metavar="FIRST:END",
        help="leave out the samples at the positions FIRST to END - 1, counted from 0 over all epochs; may be given "
        "more than once",
    )
    options = parser.parse_intermixed_args()
    try:
        run, overrides = run_and_overrides(options.words)
        with open_record(RunDirectory(run)) as record:
            code = resume(
                record,
                overrides,
                options.ignore,
                allow_older=options.allow_older,
                yes=options.yes,
                start=options.start,
                skip=options.skip,
            )
    except WorldsizeError as error:
        code = report_error(error)
    exit_process(code)


def resume(
    record: RunRecord,
    overrides: Sequence[str],
    ignore: Sequence[str],
    *,
    allow_older: bool,
    yes: bool = False,
    start: int | None = None,
    skip: Sequence[str] = (),
) -> int:
    """Resume the run with ``overrides``; return the same exit codes as ``worldsize train``.

    Args:
        record: The record of the run.
        overrides: Options that replace recorded ones.
        ignore: Keys that may differ from the record, and parts of the state that are not loaded.
        allow_older: Whether to fall back to an older checkpoint if the newest is damaged.
        yes: Resume another user's run without asking.
        start: Step of the checkpoint to go back to; 0: the start. None: the newest checkpoint.
        skip: Samples to skip in addition, such as "12000:12064".

    Raises:
        WorldsizeError: the run is complete, its record was not written by worldsize, or the user did not agree to
            resume another user's run.
    """
    run, manifest, own = record.directory, record.manifest, record.is_own
    if record.is_complete and not overrides and start is None:
        raise WorldsizeError(
            f"the run {run.path} is complete. To train further, set steps to a larger number, or go "
            "back to an earlier checkpoint with --from STEP."
        )
    words = enter_project(record, overrides, yes=yes)
    arguments = [
        *words,
        *build_run_options(record),
        f"checkpoint.allow_older={allow_older}",
        *_format_ignored_parts(record, ignore),
    ]

    def resume_with_config(cfg: DictConfig) -> int:
        from worldsize.launch.execute import resume_run

        return resume_run(cfg, record, words, ignore, start=start, skip=skip)

    if own:
        return call_composed(resume_with_config, arguments)
    cfg = compose_only(arguments)
    check_before_start(manifest, resolve_config(cfg), overrides, yes=yes)
    record.adopt()
    return resume_with_config(cfg)


def _format_ignored_parts(record: RunRecord, ignore: Sequence[str]) -> list[str]:
    """Return the overrides that make the run ignore parts of its newest checkpoint."""
    parts = [part for part in ignore if part in (*PARTS, HYPERPARAMETERS)]
    if record.manifest.get("resumed") or any(key not in (*parts, "data") for key in ignore):
        parts.append(HYPERPARAMETERS)  # the changed configuration overrides the checkpoint's
    saved = complete(record.directory.checkpoints)
    until = [f"checkpoint.ignore_until={parse_step(saved[-1])}"] if saved else []
    return [*until, f"checkpoint.ignore={parts}".replace(" ", "")]
