"""Several listeners receive a run's events; a failing one takes down neither the others nor the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from select import select
from threading import Event as Flag
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plugins.test_tensorboard import read
from worldsize.core import Evaluated, Event, Listener, RunEnded, StepDone
from worldsize.observe import subprocess_listeners
from worldsize.observe.subprocess_listeners import SubprocessListeners


class Recorder:
    """A custom listener that writes the names of events to a file of the run; it may fail at one of them."""

    def __init__(self, *, folder: Path, file: str, fails_at: str = "", **facts: Any) -> None:
        self._path, self._fails_at = folder / file, fails_at

    def __call__(self, event: Event) -> None:
        if type(event).__name__ == self._fails_at:
            raise OSError("no network")
        with self._path.open("a") as file:
            file.write(f"{type(event).__name__}\n")


def impossible() -> Listener:
    raise ValueError("no key")


def stuck() -> Listener:
    Flag().wait()
    raise AssertionError


def expires_after(listener: SubprocessListeners, *names: str, patch: pytest.MonkeyPatch) -> None:
    """Expire the time limit for the end once these listeners' processes have ended, however long they take."""
    awaited = [each for each in listener._processes if each.name.removeprefix("listener ") in names]

    def now() -> float:
        return time.monotonic() + (0 if any(each._process.is_alive() for each in awaited) else 1e6)

    def briefly(reading: list[int], writing: list[int], other: list[int], seconds: float) -> Any:
        return select(reading, writing, other, min(seconds, 0.05))

    patch.setattr(subprocess_listeners, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    patch.setattr(subprocess_listeners, "select", briefly)


def test_a_listener_that_fails_or_hangs_is_named_once_and_the_others_go_on(
    tmp_path: Path, shown: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "door")

    def slow() -> Listener:
        (tmp_path / "door").open().close()  # waits until it is opened for writing
        return Recorder(folder=tmp_path, file="fourth")

    makers: dict[str, Callable[[], Listener]] = {
        "listener first": lambda: Recorder(folder=tmp_path, file="first", fails_at="Evaluated"),
        "listener second": impossible,
        "listener third": stuck,
        "listener fourth": slow,
    }
    listener = SubprocessListeners(makers, timeout=60.0)
    expires_after(listener, "first", "second", "fourth", patch=monkeypatch)
    for number in range(1, 3001):  # more than a pipe's capacity
        listener(Evaluated(number, {}))
    (tmp_path / "door").open("w").close()
    listener(RunEnded(3000, "completed"))
    assert (tmp_path / "fourth").read_text().split() == ["Evaluated"] * 3000 + ["RunEnded"]
    assert not (tmp_path / "first").exists()
    assert sorted(shown.readouterr().err.splitlines()) == [
        "warning: the listener first failed and is disabled for the rest of the run: OSError: no network",
        "warning: the listener second failed and is disabled for the rest of the run: ValueError: no key",
        "warning: the listener third did not finish within 60 s: its unsent events are lost",
    ]


def test_a_listener_that_falls_behind_misses_steps_and_nothing_else(
    tmp_path: Path, shown: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_listeners, "_QUEUED", 1 << 18)
    monkeypatch.setattr(subprocess_listeners, "_INTERVAL", 0.0)
    os.mkfifo(tmp_path / "door")

    def slow() -> Listener:
        (tmp_path / "door").open().close()
        return Recorder(folder=tmp_path, file="told")

    listener = SubprocessListeners({"logger": slow}, timeout=120.0)
    for number in range(1, 1001):
        listener(StepDone(number, number, 0.1, 0.1, None, 0, 0.0, (0.1,) * 500, 1.0))
        if number % 100 == 0:
            listener(Evaluated(number, {}))
    (tmp_path / "door").open("w").close()
    listener(RunEnded(1000, "completed"))
    told = (tmp_path / "told").read_text().split()
    assert 50 < told.count("StepDone") < 500
    assert (told.count("Evaluated"), told[-1]) == (10, "RunEnded")
    warning = "warning: the logger is falling behind and skips steps until it catches up\n"
    assert shown.readouterr().err == warning


def test_a_run_tells_a_group_option_and_ones_own_class_and_loses_the_broken_one(train: Any) -> None:
    target = f"{__name__}.Recorder"
    run = train(
        *("recipe=digits", "steps=2", "log_every=1", "cluster.processes=1", "allow_targets=[tests]"),
        "+logger@listeners.tensorboard=tensorboard",
        f"+listeners.broken={{_target_: {target}, file: broken, fails_at: Evaluated}}",
        f"+listeners.mine={{_target_: {target}, file: mine}}",
        "+listeners.off=null",
    )
    assert run.code == 0, run.error
    assert (run.folder / "mine").read_text().split()[-2:] == ["Evaluated", "RunEnded"]
    assert "Evaluated" not in (run.folder / "broken").read_text()
    said = "the listener broken failed and is disabled for the rest of the run: OSError: no network"
    logs = "".join(path.read_text() for path in (run.folder / "logs").rglob("*") if path.is_file())
    assert said in run.error + logs
    assert len(read(run.folder).Scalars("train/loss")) == 2
    assert [each["name"] for each in run.json("run_manifest.json")["plugins"]] == [
        "plugins.tensorboard",
        "recipes.digits",
    ]


@pytest.mark.parametrize("value", ["5", "{file: x}"])
def test_what_names_no_listener_is_refused_before_the_start(train: Any, value: str) -> None:
    run = train("recipe=digits", f"+listeners.mine={value}")
    assert (run.code, run.folder) == (2, None)
    assert "listeners.mine is not a listener. Set listeners.mine._target_=" in run.error
