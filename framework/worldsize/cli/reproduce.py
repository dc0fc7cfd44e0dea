"""``worldsize reproduce MANIFEST [OVERRIDE ...]``: reproduce a run, and report how closely it matches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from worldsize.cli import exit_process
from worldsize.cli.compare import EXIT_CODES, add_report_options, show_comparison
from worldsize.errors import WorldsizeError
from worldsize.launch.reproduction import Reproduction
from worldsize.messages import report_error
from worldsize.record.compare import compare_runs
from worldsize.record.container import ENGINES
from worldsize.record.level import read_recorded_level
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import read_run
from worldsize.strict_json import sanitize_json


@dataclass(frozen=True)
class Options:
    """Command-line options of ``worldsize reproduce``."""

    manifest: Path
    overrides: Sequence[str]
    yes: bool
    strict: bool
    approximate: bool
    rebuild: bool
    container: str | None
    base: str | None
    json: bool
    tolerance: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize reproduce", description=__doc__)
    parser.add_argument("manifest", type=Path, help="run_manifest.json, or its run folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="overrides, e.g. cluster.processes=4; some downgrade the reproducibility level",
    )
    parser.add_argument("--yes", action="store_true", help="run another user's manifest without asking")
    parser.add_argument("--strict", action="store_true", help="refuse to run if anything downgrades the level")
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="continue without the recorded uncommitted changes if they are missing",
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="rebuild the environment even if the current one is identical"
    )
    parser.add_argument(
        "--container",
        choices=("auto", *ENGINES),
        nargs="?",
        const="auto",
        help="run in the recorded image by digest, or in an image built from the recorded lock file",
    )
    parser.add_argument("--base", metavar="IMAGE", help="base image to build on (python:VERSION-slim)")
    add_report_options(parser)
    try:
        code = reproduce(Options(**vars(parser.parse_intermixed_args())))
    except WorldsizeError as error:
        code = report_error(error)
    exit_process(code)


def reproduce(options: Options) -> int:
    """Repeat the run; return the verdict's exit code (see ``worldsize compare``), or the run's if it did not complete.

    Raises:
        WorldsizeError: the record is damaged, incomplete or not allowed to run; nothing was started.
    """
    recorded = read_run(options.manifest)
    reproduction = Reproduction(
        recorded,
        options.overrides,
        yes=options.yes,
        approximate=options.approximate,
        rebuild=options.rebuild,
        container=options.container,
        base=options.base,
        output=sys.stderr if options.json else None,
    )
    with reproduction.prepare() as checkout:
        new, exit_code = checkout.train(f"run.strict={options.strict}")
    return exit_code or _report_comparison(options, recorded.directory, new)


def _report_comparison(options: Options, original: RunDirectory, new: RunDirectory) -> int:
    comparison = compare_runs(original.path, new.path, tolerance=options.tolerance)
    level = read_recorded_level(read_run(new.path).manifest)
    runs = {"original": str(original.path), "run": str(new.path), "reproducibility": asdict(level)}
    report = sanitize_json({**comparison.describe(), **runs})
    (new.path / "reproduction.json").write_text(json.dumps(report, indent=2) + "\n")
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show_comparison(comparison, as_json=False)
        text = f"reproducibility level: {level.level}: {level.why}"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return EXIT_CODES[comparison.verdict]
