"""``worldsize compare RUN_A RUN_B``: show where two runs differ, and by how much."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from worldsize.cli import run_folder
from worldsize.config.arguments import build_number_parser
from worldsize.core.limits import Range
from worldsize.errors import WorldsizeError
from worldsize.messages import report_error
from worldsize.observe.summary import comparison_table
from worldsize.record.compare import Comparison, compare_runs
from worldsize.record.run_record import read_run
from worldsize.strict_json import sanitize_json

EXIT_CODES = {"bitwise identical": 0, "within tolerance": 3, "different": 4}
TOLERANCE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize compare", description=__doc__)
    parser.add_argument(
        "runs", nargs=2, type=run_folder, metavar="RUN", help="a run folder, its run_manifest.json, or last"
    )
    add_report_options(parser)
    options = parser.parse_args()
    try:
        first, second = (read_run(path).directory for path in options.runs)
        comparison = compare_runs(first.path, second.path, tolerance=options.tolerance)
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
