"""Add, remove and list processes of a running job, by requests to its launching process over a private Unix socket."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self, final

from worldsize.errors import ConfigError, WorldsizeError

_PATIENCE = 5.0  # seconds for one request


class Resizable(Protocol):
    """Changes the processes of a job while it runs, as requests ask for."""

    def grow(self, count: int) -> list[str]: ...
    def shrink(self, count: int) -> list[str]: ...
    def listed(self) -> list[dict[str, Any]]: ...


@final
class Control:
    """A context: a socket in the launching process that answers one request at a time.

    ``path``: of the socket, in a private folder; ``sign``: a file that names it, if others are to find it.
    """

    def __init__(self, path: Path, sign: Path | None, job: Resizable) -> None:
        self._path, self._sign, self._job = path, sign, job
        self.listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        self.listener.bind(str(self._path))
        self.listener.listen()
        if self._sign:
            self._sign.write_text(str(self._path))
        return self

    def __exit__(self, *_: object) -> None:
        if self._sign:
            self._sign.unlink(missing_ok=True)
        self.listener.close()

    def answer(self) -> None:
        """Accept one connection, do what it asks for, and answer it."""
        with suppress(OSError, ValueError), self.listener.accept()[0] as connection:
            connection.settimeout(_PATIENCE)
            request = json.loads(connection.makefile().readline())
            connection.sendall(json.dumps(self._answered(request)).encode() + b"\n")

    def _answered(self, request: Any) -> dict[str, Any]:
        match request:
            case {"do": "add", "count": int(count)}:
                return _tried(lambda: self._job.grow(count))
            case {"do": "remove", "count": int(count)}:
                return _tried(lambda: self._job.shrink(count))
            case {"do": "list"}:
                return _tried(self._job.listed)
        return {"error": f"no such request: {str(request)[:200]}"}


def _tried(action: Any) -> dict[str, Any]:
    try:
        return {"answer": action()}
    except WorldsizeError as error:
        return {"error": str(error)}


def request(sign: Path, **facts: Any) -> Any:
    """Send a request to the launching process that ``sign`` names; return its answer.

    Raises:
        ConfigError: it is not there, or refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE)
            connection.connect(sign.read_text())
            connection.sendall(json.dumps(facts).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the run {sign.parent} is not being trained on this machine ({error}). Look at `worldsize status`."
        ) from error
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["answer"]
