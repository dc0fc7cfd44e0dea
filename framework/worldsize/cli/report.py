"""``worldsize report RUN ...``: write an HTML report of a run, several runs, or a scaling study."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path

from worldsize.cli import run_folder
from worldsize.errors import WorldsizeError
from worldsize.files import replace_file
from worldsize.messages import report_error
from worldsize.observe.report.page import render_page
from worldsize.record.run_directory import find_run

NAME = "report.html"


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize report", description=__doc__)
    help = (
        "a run folder (default: the newest), several runs or a folder of runs to compare, or a folder with scaling.json"
    )
    parser.add_argument("folders", nargs="*", type=run_folder, metavar="RUN", help=help)
    parser.add_argument("--output", "-o", type=Path, help=f"output file (default: {NAME} in the common parent folder)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    options = parser.parse_args()
    try:
        path = write_report(options.folders or [find_run("last").path], options.output)
    except WorldsizeError as error:
        sys.exit(report_error(error))
    print(path)
    if options.open:
        webbrowser.open(path.as_uri())


def write_report(folders: list[Path], output: Path | None) -> Path:
    """Write the report page of ``folders``; return its path.

    Raises:
        WorldsizeError: there is nothing to report, or the page cannot be written.
    """
    text = render_page(folders)
    path = (output or Path(os.path.commonpath(folders)) / NAME).absolute()
    data = text.encode(errors="replace")
    try:
        if output:  # may be a pipe or a device
            path.write_bytes(data)
        else:
            replace_file(path, data)
    except OSError as error:
        raise WorldsizeError(f"failed to write {path}: {error.strerror}. Pass a different --output.") from None
    return path
