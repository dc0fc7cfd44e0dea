"""The commands, one module each, and shared helpers for composing configurations and exiting.

A command's module is imported only when the command is called.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from worldsize import __version__
from worldsize.errors import WorldsizeError, neighbours
from worldsize.messages import report_error, show_messages, until_output_closes
from worldsize.record.code import remove_worktree
from worldsize.record.run_directory import find_run
from worldsize.world.scratch import leftovers, short_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

COMMANDS = {
    "init": "create a project that trains and has a test",
    "new": "create a custom strategy, launcher, recipe or logger, with a test",
    "list": "list strategies, clusters, recipes, plugins, ..., with source and purpose",
    "prepare": "tokenize text once, into shards for training",
    "train": "train a recipe; the same as train.py",
    "doctor": "check whether a run would work on this cluster, and measure its links",
    "plan": "show the rank layout, and predict the cost of a step for each strategy, without starting a run",
    "rehearse": "show each rank's memory, messages and waits at any world size, without launching a run",
    "scale": "measure the step time at several numbers of processes, and compare it with the prediction of plan",
    "image": "write a Dockerfile for a project and its locked environment, and build the image",
    "resume": "resume a run from its newest checkpoint",
    "evaluate": "evaluate a checkpoint of a run, at any world size",
    "status": "list runs and how they ended, newest first",
    "logs": "show the logs of a run's processes, by rank; --follow shows them live",
    "cancel": "save a checkpoint and stop a run, with any launcher",
    "reproduce": "reproduce a run from its manifest, and report how closely it matches",
    "audit": "train random parts of a run again, and compare the bits with its record",
    "compare": "show where two runs differ, and by how much",
    "export": "export the weights of a checkpoint to safetensors, transformers or torch",
    "report": "write an HTML report of a run, a sweep or a scaling study",
    "watch": "follow a running job live, from any shell",
    "agent": "run one host's part of a run; started by launchers",
    "workers": "add, remove and list workers of a running job",
    "completion": "print completion code for bash, zsh or fish",
    "schema": "print a JSON Schema of the configuration, for editors",
}


VERSION = ("--version", "-V")  # handled here, since Hydra would print its own version

_OF_FILES = (  # commands that do not run user code in this process
    "init",
    "new",
    "list",
    "prepare",
    "image",
    "status",
    "logs",
    "cancel",
    "resume",
    "evaluate",
    "reproduce",
    "audit",
    "compare",
    "export",
    "report",
    "watch",
    "workers",
    "completion",
    "schema",
)


def main(result_fd: int | None = None) -> None:
    """Run the ``worldsize`` command line.

    ``result_fd``: file descriptor for the path of the result folder, written by ``train`` and ``evaluate``.
    """
    show_messages()
    check_working_directory()
    with until_output_closes():
        _run_command(result_fd)


def check_working_directory() -> None:
    """Exit with code 2 if the working directory was deleted."""
    try:
        Path.cwd()
    except OSError as error:
        text = f"the working directory is not accessible ({error.strerror}). Change to an existing directory."
        sys.exit(report_error(WorldsizeError(text)))


def _run_command(result_fd: int | None = None) -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_format_usage())
    elif name in VERSION:
        print_version()
    elif name in COMMANDS:
        del sys.argv[1]
        if name != "train":  # train() removes leftovers itself, since train.py calls it directly
            remove_leftovers()
        command = importlib.import_module(f"worldsize.cli.{name}").main
        try:
            command(*([] if result_fd is None else [result_fd]))
        except OSError as error:
            if name not in _OF_FILES or error.filename is None:  # without a file name, it may be a connection error
                raise
            sys.exit(report_error(WorldsizeError(f"failed to read or write {error.filename}: {error.strerror}.")))
    else:
        sys.exit(report_error(WorldsizeError(f"unknown command {name!r}{neighbours(name, COMMANDS)}")))


def print_version() -> None:
    print(f"worldsize {__version__}")


def _format_usage() -> str:
    rows = [f"  {name:10} {meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join(
        ["usage: worldsize COMMAND ...", "", *rows, "", "worldsize train --help lists groups and options."]
    )


def call_composed(task: Callable[[DictConfig], int], arguments: Sequence[str]) -> int:
    """Call ``task`` with each configuration composed from ``arguments``; return the largest exit code."""
    from worldsize.config.compose import compose_and_call  # imported here, since most commands do not need Hydra

    codes = [0]

    def call_guarded(cfg: DictConfig) -> None:
        try:
            codes.append(task(cfg))
        except WorldsizeError as error:  # caught here, since Hydra would print a traceback
            codes.append(report_error(error))

    try:
        compose_and_call(call_guarded, arguments)
    except WorldsizeError as error:
        codes.append(report_error(error))
    return max(codes)


RUN = "a run folder or its run_manifest.json; last (default): the newest run below runs/"


def run_folder(text: str) -> Path:
    """Convert a command-line argument to a run folder; "last" is the newest run in ``runs``."""
    try:
        return find_run(text).path
    except WorldsizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_and_overrides(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Split arguments into the run folder (default: the newest) and overrides such as ``steps=20``.

    Raises:
        WorldsizeError: ``runs`` does not contain a run.
    """
    has_run = bool(words) and ("=" not in words[0] or Path(words[0]).exists())
    return find_run(words[0] if has_run else "last").path, [*words[has_run:]]


def write_result_path(path: Path, result_fd: int | None) -> None:
    """Write the path of a command's result to the file descriptor, if any."""
    if result_fd is not None:
        os.write(result_fd, os.fsencode(path))


def remove_leftovers() -> None:
    """Remove the temporary folders of this user's killed processes, and the git worktrees in them."""
    elsewhere = short_folder()
    for folder in [*leftovers(), *(leftovers(elsewhere) if elsewhere else [])]:
        for entry in folder.glob("*/.git"):
            remove_worktree(entry.parent)
        shutil.rmtree(folder, ignore_errors=True)


def keep_operators() -> None:
    """Leave torch's operators registered at exit, since torch would unregister them one by one."""
    for finalizer in [*getattr(weakref.finalize, "_registry", ())]:  # not list(), which may be the command's module
        alive = finalizer.peek()
        if alive and getattr(alive[1], "__module__", None) == "torch.library":  # methods of built-ins lack __module__
            finalizer.atexit = False


def exit_process(code: int) -> NoReturn:
    """Exit without tearing down the imported modules, which takes 0.8 s with torch."""
    keep_operators()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
