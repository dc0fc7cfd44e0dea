"""Control socket of a running job: requests to resize its gang and list its processes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, Protocol, Self, TypedDict, final

from worldsize.errors import ConfigError, WorldsizeError
from worldsize.files import read_regular
from worldsize.net.agent_connection import receive_line
from worldsize.strict_json import parse_strict_json

MOST = 64  # maximum processes per request, so that all of them start before the request times out
_PATIENCE = 5.0  # timeout of a request in seconds, from connecting to its last byte
_LONGEST_REQUEST = 1 << 12  # maximum bytes
_LONGEST_ANSWER = 1 << 17  # maximum bytes; fits into a socket's buffer, so that sending never blocks
_LONGEST_PATH = 1 << 12  # maximum bytes
_AT_ONCE = 16  # maximum pending requests; a new one evicts the oldest


class ListedProcess(TypedDict):
    """A live process of a job: role, rank in the role, process ID, and step in progress.

    ``waits`` marks a spare, which trains only after another process dies.
    """

    role: str
    rank: int
    pid: int | None
    step: int | None
    waits: NotRequired[bool]


class JobState(TypedDict):
    """The newest step in progress, and the number of processes that train or are about to join."""

    step: int
    processes: int


class Resizable(Protocol):
    """A running job whose processes can be added, removed and listed."""

    def add_processes(self, count: int) -> list[str]: ...
    def remove_processes(self, count: int) -> list[str]: ...
    def resize_gang(self, processes: int) -> list[str]: ...
    def list_processes(self) -> list[ListedProcess]: ...
    def describe_job(self) -> JobState: ...


@final
@dataclass
class _Request:
    """A request, possibly still incomplete."""

    connection: socket.socket
    text: bytearray = field(default_factory=bytearray)
    deadline: float = field(default_factory=lambda: time.monotonic() + _PATIENCE)


@final
class Control:
    """Context manager for the socket where the launching process answers requests.

    The launching process's event loop must wait for the sockets from :meth:`collect_sockets`, and pass readable ones to
    :meth:`serve_socket`.

    ``path`` is the socket's path in a private folder; other processes read that path from the file ``sign``.
    """

    def __init__(self, path: Path, sign: Path, job: Resizable) -> None:
        self._path, self._sign, self._job = path, sign, job
        self._listener = socket.socket(socket.AF_UNIX)
        self._requests: dict[socket.socket, _Request] = {}  # by connection, oldest first

    def __enter__(self) -> Self:
        self._listener.setblocking(False)
        self._listener.bind(str(self._path))
        self._listener.listen()
        draft = self._sign.with_name(f".{self._sign.name}")
        draft.write_text(str(self._path))
        draft.replace(self._sign)  # atomic, so that readers see a complete file
        return self

    def __exit__(self, *_: object) -> None:
        self._sign.unlink(missing_ok=True)
        for connection in (self._listener, *self._requests):
            connection.close()

    def collect_sockets(self) -> tuple[Sequence[socket.socket], float | None]:
        """Drop requests past their deadline; list the sockets to wait for.

        Returns:
            The sockets to wait for, and the seconds until the next deadline (None if there is none).
        """
        now = time.monotonic()
        for request in [each for each in self._requests.values() if each.deadline <= now]:
            self._close_request(request)
        seconds = min((each.deadline - now for each in self._requests.values()), default=None)
        return [self._listener, *self._requests], seconds

    def serve_socket(self, ready: socket.socket) -> None:
        """Read from a readable socket; once its request is complete, execute and answer it."""
        if ready is self._listener:
            self._accept_client()
        elif ready in self._requests:
            self._receive_request(self._requests[ready])

    def _accept_client(self) -> None:
        with suppress(OSError):  # the client has already disconnected
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._requests) >= _AT_ONCE:
                self._close_request(next(iter(self._requests.values())))
            self._requests[connection] = _Request(connection)

    def _receive_request(self, request: _Request) -> None:
        try:
            data = request.connection.recv(_LONGEST_REQUEST - len(request.text))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        request.text += data
        if b"\n" in data:
            self._send_reply(request, self._execute_request(bytes(request.text).partition(b"\n")[0]))
        elif len(request.text) >= _LONGEST_REQUEST:
            self._send_reply(request, {"error": f"the request is longer than {_LONGEST_REQUEST} bytes"})
        elif not data:
            self._close_request(request)

    def _send_reply(self, request: _Request, answer: dict[str, Any]) -> None:
        with suppress(OSError):  # BlockingIOError if the client does not read
            request.connection.sendall(json.dumps(answer).encode() + b"\n")
        self._close_request(request)

    def _close_request(self, request: _Request) -> None:
        del self._requests[request.connection]
        request.connection.close()

    def _execute_request(self, text: bytes) -> dict[str, Any]:
        try:
            request = parse_strict_json(text, at_most=_LONGEST_REQUEST)
        except ValueError as error:
            return {"error": f"invalid request: {error}"}
        match request:
            case {"do": "add", "count": int(count)} if 0 < count <= MOST:
                return _try_action(lambda: self._job.add_processes(count))
            case {"do": "remove", "count": int(count)} if 0 < count <= MOST:
                return _try_action(lambda: self._job.remove_processes(count))
            case {"do": "resize", "processes": int(processes)} if processes > 0:
                return _try_action(lambda: self._job.resize_gang(processes))
            case {"do": "state"}:
                return _try_action(self._job.describe_job)
            case {"do": "list"}:
                return _try_action(self._job.list_processes)
        return {"error": f"unknown request: {str(request)[:200]}"}


def _try_action(action: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"answer": action()}
    except (WorldsizeError, OSError) as error:  # uncaught, it would end the run
        return {"error": str(error)}


def send_request(sign: Path, **facts: Any) -> Any:
    """Send a request to the launching process and return the answer.

    The file ``sign`` contains the path of the launching process's socket.

    Raises:
        ConfigError: the process does not exist or refuses the request.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE)
            connection.connect(read_regular(sign, at_most=_LONGEST_PATH).decode())
            connection.sendall(json.dumps(facts).encode() + b"\n")
            deadline = time.monotonic() + _PATIENCE
            answer = parse_strict_json(
                receive_line(connection, at_most=_LONGEST_ANSWER, deadline=deadline), at_most=_LONGEST_ANSWER
            )
    except (OSError, ValueError) as error:
        why = "" if isinstance(error, FileNotFoundError) else f" ({error})"
        raise ConfigError(
            f"the run {sign.parent} is not running on this machine{why}. Check `worldsize status`."
        ) from error
    match answer:
        case {"answer": result}:
            return result
        case {"error": str(why)}:
            raise ConfigError(why)
    raise ConfigError(
        f"the control socket of the run {sign.parent} belongs to a process other than its launching process."
    )
