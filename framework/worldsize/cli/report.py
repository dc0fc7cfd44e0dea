"""``worldsize report RUN ...``: one HTML page of a run, of several runs, or of a scaling study."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path

from worldsize.errors import WorldsizeError
from worldsize.files import replace_file
from worldsize.messages import refuse
from worldsize.observe.report.page import page

NAME = "report.html"


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize report", description=__doc__)
    help = "a run folder; several, or a folder of runs or a sweep's, to compare; a folder with scaling.json"
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help=help)
    parser.add_argument("--output", "-o", type=Path, help=f"default: {NAME} in the folder that holds all that is shown")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    options = parser.parse_args()
    try:
        path = write([folder.resolve() for folder in options.folders], options.output)
    except WorldsizeError as error:
        sys.exit(refuse(error))
    print(path)
    if options.open:
        webbrowser.open(path.as_uri())


def write(folders: list[Path], output: Path | None) -> Path:
    """Write the report page of ``folders``; return its path.

    Raises:
        WorldsizeError: there is nothing to report, or it cannot be written.
    """
    text = page(folders)
    path = (output or Path(os.path.commonpath(folders)) / NAME).absolute()
    data = text.encode(errors="replace")
    try:
        if output:  # it may be a pipe or a device
            path.write_bytes(data)
        else:
            replace_file(path, data)
    except OSError as error:
        raise WorldsizeError(f"{path} cannot be written: {error.strerror}. Name another file with --output.") from None
    return path
