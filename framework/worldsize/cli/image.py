"""``worldsize image [FOLDER]``: write a Dockerfile for a project and its locked environment, and build the image."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from pathlib import Path

from worldsize.errors import WorldsizeError
from worldsize.messages import report_error
from worldsize.record.container import BUILDERS, Dockerfile, build_image, find_engine, usual_base, version_of_uv


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize image", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(), help="project folder with a lock file (default: .)"
    )
    help = f"base image, preferably by digest: IMAGE@sha256:... ({usual_base()})"
    parser.add_argument("--base", default=usual_base(), metavar="IMAGE", help=help)
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME", help="extra to install; may be given more than once"
    )
    help = "build the image with this engine (default: the installed one)"
    parser.add_argument("--build", choices=("auto", *BUILDERS), nargs="?", const="auto", help=help)
    parser.add_argument("--tag", metavar="NAME", help="name of the built image (default: the name of the folder)")
    help = "option for the engine's build command, e.g. --option=--secret=id=netrc,src=$HOME/.netrc"
    parser.add_argument("--option", action="append", default=[], metavar="OPTION", help=help)
    options = parser.parse_args()
    try:
        image(options)
    except WorldsizeError as error:
        sys.exit(report_error(error))


def image(options: argparse.Namespace) -> None:
    """Write the Dockerfile and print its path; with ``--build``, build the image and print its name.

    Raises:
        WorldsizeError: the lock file cannot be used, or the engine is missing or fails.
    """
    engine = find_engine(options.build, BUILDERS) if options.build else None
    folder = options.folder.resolve()
    dockerfile = Dockerfile(
        folder, options.base, platform.python_version(), version_of_uv(), options.extra
    ).write_files()
    print(dockerfile)
    if "@sha256:" not in options.base:
        print(f"{options.base} may change at any time. Pin the image by digest with --base.", file=sys.stderr)
    if engine:
        made = build_image(engine, dockerfile, options.tag or image_name(folder.name), options=options.option)
        print(f"{made.name}@{made.digest}" if made.digest else made.name)


def image_name(folder: str) -> str:
    """Convert a folder's name to a valid image name: "My project!" becomes "my-project"."""
    return re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-") or "project"
