"""``worldsize workers add|remove|list``: add, remove or list workers of a running job, if its strategy allows it."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from worldsize.cli import RUN, run_folder
from worldsize.config.arguments import build_integer_parser
from worldsize.core.limits import Range
from worldsize.errors import WorldsizeError
from worldsize.launch.control import MOST, ListedProcess, send_request
from worldsize.messages import printable, report_error
from worldsize.record.run_directory import RunDirectory


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize workers", description=__doc__)
    parser.add_argument("do", choices=("add", "remove", "list"))
    parser.add_argument(
        "count",
        type=build_integer_parser(Range(least=1, most=MOST)),
        nargs="?",
        default=1,
        help="number of workers (default: 1)",
    )
    parser.add_argument("--run", type=run_folder, default="last", help=RUN)
    given = parser.parse_args()
    sign = RunDirectory(given.run).control
    try:
        if given.do == "list":
            Console().print(_build_table(send_request(sign, do="list")))
        else:
            names = ", ".join(send_request(sign, do=given.do, count=given.count))
            print(f"{'started' if given.do == 'add' else 'removing'}: {names}")
    except WorldsizeError as error:
        sys.exit(report_error(error))


def _build_table(processes: list[ListedProcess]) -> Table:
    table = Table("role", "rank", "process", "step")
    for each in processes:
        step = "waiting" if each.get("waits") else str(each["step"] or "")
        table.add_row(Text(printable(str(each["role"]))), str(each["rank"]), str(each["pid"]), Text(printable(step)))
    return table
