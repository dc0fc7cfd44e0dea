"""The commands, one file each, and what all of them share: composing configurations and exiting.

A command's file is imported only when that command is called.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from worldsize.errors import WorldsizeError, neighbours
from worldsize.messages import refuse, show_messages, until_output_closes
from worldsize.record.code import remove_worktree
from worldsize.world.scratch import leftovers, short_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

COMMANDS = {
    "init": "a project of one's own, in a new folder: it trains and has a test",
    "new": "a strategy, launcher, recipe or logger of one's own, with a test",
    "list": "strategies, clusters, recipes, plugins, ...: where each comes from, and what it does",
    "prepare": "token shards of text, made once, for runs to read",
    "train": "train a recipe; the same as train.py",
    "doctor": "whether a run would work on this cluster, and how fast its links are",
    "plan": "what a step costs under every strategy, and which rank does what; nothing is started",
    "rehearse": "what each rank of a world of any size would hold, send and wait for; nothing is launched",
    "scale": "measure how a step's time falls as processes are added, next to what plan predicts",
    "image": "a Dockerfile of a project and the environment of its lock, and the image of it",
    "resume": "go on with a run from its newest checkpoint",
    "evaluate": "evaluate a checkpoint of a run, at any world size",
    "status": "list runs and how they ended",
    "logs": "show what the processes of a run say, by rank; --follow it live",
    "cancel": "end a run, whatever launched it; it saves first",
    "reproduce": "re-create a run from its manifest, and say how exactly",
    "compare": "show where two runs differ, and by how much",
    "export": "write the weights of a checkpoint for other programs: safetensors, transformers, torch",
    "report": "one HTML page of a run, a sweep or a scaling study",
    "watch": "follow a running job live, from another shell",
    "agent": "play one host's part of a run; launchers start it",
    "workers": "add, remove and list workers of a running job",
}


_OF_FILES = (  # commands that run no code of the user in this process
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
    "compare",
    "export",
    "report",
    "watch",
    "workers",
)


def main() -> None:
    """Run the ``worldsize`` command line."""
    show_messages()
    check_working_directory()
    with until_output_closes():
        _call()


def check_working_directory() -> None:
    """Exit with code 2 if the working directory was deleted."""
    try:
        Path.cwd()
    except OSError as error:
        text = f"the working directory cannot be entered any more ({error.strerror}). Change to one that exists."
        sys.exit(refuse(WorldsizeError(text)))


def _call() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_usage())
    elif name in COMMANDS:
        del sys.argv[1]
        if name != "train":  # its main is also that of train.py, and removes them itself
            remove_leftovers()
        command = importlib.import_module(f"worldsize.cli.{name}").main
        try:
            command()
        except OSError as error:
            if name not in _OF_FILES or error.filename is None:  # without a name it may be about a connection
                raise
            sys.exit(refuse(WorldsizeError(f"{error.filename} cannot be read or written: {error.strerror}.")))
    else:
        sys.exit(refuse(WorldsizeError(f"no command {name!r}{neighbours(name, COMMANDS)}")))


def _usage() -> str:
    rows = [f"  {name:10} {meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join(
        ["usage: worldsize COMMAND ...", "", *rows, "", "worldsize train --help lists groups and options."]
    )


def call_composed(task: Callable[[DictConfig], int], arguments: Sequence[str]) -> int:
    """Call ``task`` with each configuration composed from ``arguments``; return the largest exit code."""
    from worldsize.config.compose import compose_and_call  # imports Hydra, which most commands do not need

    codes = [0]

    def guarded(cfg: DictConfig) -> None:
        try:
            codes.append(task(cfg))
        except WorldsizeError as error:  # Hydra would print where it was raised
            codes.append(refuse(error))

    try:
        compose_and_call(guarded, arguments)
    except WorldsizeError as error:
        codes.append(refuse(error))
    return max(codes)


def remove_leftovers() -> None:
    """Remove the temporary folders of this user's processes that were killed, and the git worktrees in them."""
    elsewhere = short_folder()
    for folder in [*leftovers(), *(leftovers(elsewhere) if elsewhere else [])]:
        for entry in folder.glob("*/.git"):
            remove_worktree(entry.parent)
        shutil.rmtree(folder, ignore_errors=True)


def keep_operators() -> None:
    """Let the exit leave torch's operators registered: torch would take them out one by one."""
    for finalizer in [*getattr(weakref.finalize, "_registry", ())]:  # not list(), the name of a command's module here
        alive = finalizer.peek()
        if alive and getattr(alive[1], "__module__", None) == "torch.library":  # methods of built-in types have none
            finalizer.atexit = False


def exit_process(code: int) -> NoReturn:
    """Exit without tearing down the imported modules, which takes 0.8 s once torch is imported."""
    keep_operators()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
