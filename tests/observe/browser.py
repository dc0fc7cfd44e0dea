"""Drive headless Chromium by its DevTools protocol over a pipe: JSON messages that end with a zero byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

PROGRAM = shutil.which("chromium")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
_PIPES = 'exec "${@:3}" 3<&"$1" 4>&"$2"'  # Chromium reads descriptor 3 and writes 4


@dataclass
class Page:
    """A browser tab.

    Attributes:
        complaints: messages on its console.
        requests: requested addresses.
    """

    to: BinaryIO
    back: BinaryIO
    session: str = ""
    asked: int = 0
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    loaded: bool = False

    def call(self, method: str, **parameters: Any) -> Any:
        self.asked += 1
        message = {"id": self.asked, "method": method, "params": parameters}
        addressed = {**message, "sessionId": self.session} if self.session else message
        self.to.write(json.dumps(addressed).encode() + b"\0")
        self.to.flush()
        while (answer := self._next()).get("id") != self.asked:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\0"):
            text += (letter := self.back.read(1))
            assert letter, "the browser has ended"
        message: dict[str, Any] = json.loads(text[:-1])
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, facts: dict[str, Any]) -> None:
        match method:
            case "Log.entryAdded" | "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(facts))
            case "Network.requestWillBeSent":
                self.requests.append(facts["request"]["url"])
            case "Page.loadEventFired":
                self.loaded = True

    def show(self, path: Path, *, theme: str, width: int, height: int = 900) -> None:
        """Open a file, and wait until it is loaded."""
        self.complaints, self.requests, self.loaded = [], [], False
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=path.as_uri())
        while not self.loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    assert PROGRAM is not None
    (theirs, to), (back, answers) = os.pipe(), os.pipe()
    words = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    line = ["bash", "-c", _PIPES, "bash", str(theirs), str(answers), *words]
    process = subprocess.Popen(line, pass_fds=(theirs, answers), stderr=subprocess.DEVNULL)
    for end in (theirs, answers):
        os.close(end)
    with os.fdopen(to, "wb") as sender, os.fdopen(back, "rb") as receiver:
        try:
            page = Page(sender, receiver)
            tab = page.call("Target.createTarget", url="about:blank")["targetId"]
            page.session = page.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
            for domain in ("Page", "Log", "Runtime", "Network"):
                page.call(f"{domain}.enable")
            yield page
        finally:
            process.terminate()
            process.wait()
