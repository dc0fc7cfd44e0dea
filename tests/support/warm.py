"""Runs ``python ARGUMENTS`` in a child of the zygote, which has imported torch and worldsize.

:func:`interpreter` writes a program that launchers start instead of Python. It forwards signals to the child, kills
the child when it exits, and returns its exit code. It starts fast because it imports only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

ZYGOTE = "PYTEST_ZYGOTE"  # environment variable with the path of the zygote's socket


def ask(
    zygote: str,
    arguments: Sequence[str],
    *,
    cwd: str,
    environment: Mapping[str, str],
    streams: Sequence[int],
    executable: str,
) -> socket.socket:
    """Start ``python ARGUMENTS`` in the zygote; closing the returned connection kills the process."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(zygote)
    shown = [executable, *arguments]
    request = {"arguments": [*arguments], "cwd": cwd, "environment": dict(environment), "executable": executable}
    namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    socket.send_fds(line, [json.dumps({**request, "shown": shown}).encode()], [*streams, *namespaces])
    for namespace in namespaces:
        os.close(namespace)
    return line


def interpreter(folder: Path, zygote: str) -> Path:
    """Write a program to ``folder`` that behaves like Python, but starts in the zygote."""
    program = folder / "python"
    called = f"main({zygote!r}, {sys.executable!r})"
    program.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}\n\n{called}\n")
    program.chmod(0o755)
    return program


def main(zygote: str, python: str) -> NoReturn:
    line = ask(
        zygote,
        sys.argv[1:],
        cwd=os.getcwd(),
        environment=os.environ,
        streams=(0, 1, 2),
        executable=python,
    )

    def pass_on(number: int, _: FrameType | None) -> None:
        with suppress(OSError):  # the child has exited
            line.send(str(number).encode())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = int(line.recv(64) or 70)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
