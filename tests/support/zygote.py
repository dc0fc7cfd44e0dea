"""Forks a child per request from a process that has imported everything, so that tests start fast.

``zygote.py SOCKET``: each connection is one request from :mod:`tests.support.warm`. The child gets the arguments,
working directory, environment, standard streams and namespaces of the client. Signal numbers sent over the connection
are delivered to the child, its exit code is sent back, and it is killed when the connection closes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from worldsize.world.processes import SIGNALS, die_with_parent
from worldsize.world.scratch import private_folder

PRELOADED = (
    "worldsize.launch.agent",
    "worldsize.launch.execute",
    "worldsize.cli.reproduce",
    "worldsize.cli.resume",
    "worldsize.cli.evaluate",
    "worldsize.strategies.ddp",
    "worldsize.strategies.fsdp",
    "worldsize.strategies.mesh.strategy",
    "worldsize.strategies.zero",
    "worldsize.worker.process",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
PROGRAMS = {
    "worldsize": "worldsize.cli",
    "train.py": "worldsize.cli.train",
    "worldsize.worker": "worldsize.worker.process",
}
FDS = 6  # standard streams and namespaces
_MADV_COLLAPSE = 25  # since Linux 6.1; no effect on earlier kernels
_HUGE_PAGE = 2 << 20  # bytes
_LIMIT = 1 << 20


@contextmanager
def run_zygote() -> Iterator[Path]:
    """Run a zygote in this block, and yield its socket; it imports nothing before its first request."""
    folder = private_folder()
    path = folder / "socket"
    spare = "-" * 4000  # its children write their own command lines there
    zygote = subprocess.Popen([sys.executable, __file__, str(path), spare])
    while not path.exists():
        assert zygote.poll() is None
        time.sleep(0.005)
    try:
        yield path
    finally:
        zygote.kill()
        zygote.wait()
        shutil.rmtree(folder)


class _Child:
    """A forked process and its connection to the client."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self.line, self.end = pid, line, os.pidfd_open(pid)

    def hear(self) -> None:
        number = self.line.recv(64)
        signal.pidfd_send_signal(self.end, int(number or signal.SIGKILL))
        if not number:
            self.bury()

    def bury(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        with suppress(OSError):
            self.line.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.line.close()
        os.close(self.end)


def serve(path: str) -> NoReturn:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    select.select([listener], [], [])  # import only at the first request, which may never come
    _prepare()
    children: list[_Child] = []
    while True:
        ready = select.select([listener, *(end for child in children for end in (child.line, child.end))], [], [])[0]
        for child in list(children):
            if child.end in ready:
                child.bury()
            elif child.line in ready:
                child.hear()
        children = [child for child in children if child.line.fileno() >= 0]
        if listener in ready:
            children.append(_forked(listener.accept()[0], children))


def _prepare() -> None:
    """Do the work common to all commands: imports, and Hydra's plugin discovery."""
    for name in PRELOADED:
        importlib.import_module(name)
    from hydra.core.plugins import Plugins

    from worldsize.config.command_line import register_schema
    from worldsize.record.environment import packages

    Plugins.instance()
    register_schema()
    packages()
    gc.collect()
    gc.freeze()  # otherwise a collection in a child would copy the pages of all imported modules
    collapse()


def collapse() -> None:
    """Move the private memory of this process into huge pages, if the kernel supports it.

    A fork copies one entry per page. With torch and the tests imported, there are 100,000 to 200,000 pages, and a fork
    takes 0.07 to 0.11 s of CPU time; with huge pages, it takes 0.015 s.
    """
    libc = _libc()
    libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            first, end = (int(each, 16) for each in addresses.split("-"))
            first, end = -(-first // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
            if first < end:
                libc.madvise(first, end - first, _MADV_COLLAPSE)


def _forked(line: socket.socket, others: Sequence[_Child]) -> _Child:
    message, fds, _, _ = socket.recv_fds(line, _LIMIT, FDS)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the child unblocks them once its program is known
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        for fd in (line.fileno(), *(fd for other in others for fd in (other.line.fileno(), other.end))):
            os.close(fd)
        _run(json.loads(message), fds, parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for fd in fds:
        os.close(fd)
    return _Child(pid, line)


def _run(request: dict[str, Any], fds: Sequence[int], parent: int) -> NoReturn:
    """Run the request in the child, with the client's environment, and exit with its code."""
    die_with_parent(parent)
    code = 70
    try:
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        _enter(fds[3:])
        for fd in fds:
            os.close(fd)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # from TMPDIR
        _show(request["shown"])
        sys.executable = request["executable"]
        code = _exit_code(lambda: _play(request["arguments"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(namespaces: Sequence[int]) -> None:
    for fd, kind in zip(namespaces, ("net", "uts", "mnt"), strict=True):
        if os.fstat(fd).st_ino != Path("/proc/self/ns", kind).stat().st_ino and _libc().setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"the {kind} namespace cannot be entered")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _show(words: Sequence[str]) -> None:
    """Set the command line of this process in ``/proc``, as shown by ps, to ``words``."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _play(words: Sequence[str]) -> None:
    """Run ``python WORDS``; the supported programs are ``worldsize`` and ``train.py``."""
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    while words[0] == "-u":
        words = words[1:]
    if words[:3] != ["-m", "worldsize", "agent"]:  # an agent must start with them blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    sys.argv = list(words[1:] if words[0] == "-m" else words)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
        return
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
    program = Path(sys.argv[0]).name
    module = PROGRAMS.get(program, program)
    importlib.import_module(module).main()


def _exit_code(function: Callable[[], None]) -> int:
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


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    die_with_parent(os.getppid())
    serve(sys.argv[1])
