"""Serve a folder over HTTP on this machine, with range requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


@dataclass
class Served:
    """A running server and the requests that it received."""

    url: str
    ranges: list[str] = field(default_factory=list)
    sent: int = 0
    failures: int = 0  # range requests that fail before the next one succeeds
    ignores_ranges: bool = False


class _Handler(SimpleHTTPRequestHandler):
    """Answers range requests, unlike Python's own handler."""

    protocol_version = "HTTP/1.1"

    def __init__(self, served: Served, *arguments: object, directory: str) -> None:
        self._served = served
        super().__init__(*arguments, directory=directory)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_file():
            facts = path.stat()
            self.send_header("ETag", f'"{facts.st_mtime_ns}-{facts.st_size}"')
        super().end_headers()

    def do_GET(self) -> None:
        path, asked = Path(self.translate_path(self.path)), self.headers.get("Range")
        if asked is None or not path.is_file() or self._served.ignores_ranges:
            super().do_GET()
            return
        self._served.ranges.append(asked)
        if self._served.failures:
            self._served.failures -= 1
            self.send_error(503)
            return
        first, last = map(int, re.findall(r"\d+", asked))
        data = path.read_bytes()
        part = data[first : last + 1]
        self._served.sent += len(part)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Serve ``folder`` until the end of the block."""
    facts = Served("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, facts, directory=str(folder)))
    facts.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield facts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
