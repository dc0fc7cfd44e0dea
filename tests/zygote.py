"""A process that has imported what a launch needs and forks one child a request: tests need not wait for imports.

Each line of standard input is a request: arguments, working directory, environment, and a folder in which the child
leaves ``stdout`` and ``stderr`` and this process the exit ``code``.
"""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import worldsize.app.execute
import worldsize.app.reproduce
import worldsize.app.resume
import worldsize.strategies.ddp
import worldsize.strategies.parameter_server.hybrid
import worldsize.strategies.parameter_server.strategy  # noqa: F401 - imported here, once
from worldsize.app import main
from worldsize.world.parent import die_with_parent

_POLL = 0.005  # seconds


def serve() -> None:
    children: dict[int, Path] = {}
    read, listening = b"", True
    while listening or children:
        if listening and select.select([0], [], [], _POLL)[0]:
            piece = os.read(0, 1 << 16)
            listening = bool(piece)
            *lines, read = (read + piece).split(b"\n")
            for request in map(json.loads, lines):
                children[_fork(request)] = Path(request["folder"])
        _bury(children)


def _fork(request: dict[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        _run(request)
    return pid


def _run(request: dict[str, Any]) -> NoReturn:
    """In the child: as if the command had been typed."""
    code = 70
    try:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(Path(request["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["worldsize", *request["arguments"]]
        code = _exit_code(main)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(function: Any) -> int:
    try:
        function()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _bury(children: dict[int, Path]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            folder = children.pop(pid)
            (folder / ".code").write_text(str(os.waitstatus_to_exitcode(status)))
            (folder / ".code").rename(folder / "code")


if __name__ == "__main__":
    serve()
