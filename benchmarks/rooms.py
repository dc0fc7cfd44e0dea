"""Count the source files that a command passes on its way from the typed words to the first step.

    python benchmarks/rooms.py train recipe=digits steps=20 cluster.processes=1 run.root=/tmp/rooms run.name=a
    python benchmarks/rooms.py resume /tmp/rooms/digits/a steps=40

It traces calls in the launching process and, forked from it, in the first worker, until that calls ``fit``. A file is
entered when a function of another file of worldsize calls one of its own, or goes on with a generator of its own. It
prints the files in the order of their first entry, each with how often it was entered: those that keep the run's record
(the folders app, driver and records), and all.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import worldsize
from worldsize.app import main

PACKAGE = f"{Path(worldsize.__file__).parent}/"
RECORD = ("app/", "driver/", "records/")
LAST = ("engine/fit.py", "fit")
entries: Counter[str] = Counter()


def trace(frame: FrameType, event: str, _: object) -> None:
    """Count a call that comes from another file; stop at the first step."""
    if event != "call" or (room := _room(frame)) is None or frame.f_code.co_name == "<module>":
        return
    if _caller(frame) != room:
        entries[room] += 1
    if (room, frame.f_code.co_name) == LAST:
        sys.setprofile(None)
        report()


def _room(frame: FrameType) -> str | None:
    file = frame.f_code.co_filename
    return file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else None


def _caller(frame: FrameType) -> str | None:
    """The file of worldsize that has called, perhaps by way of other packages."""
    caller = frame.f_back
    while caller is not None and _room(caller) is None:
        caller = caller.f_back
    return _room(caller) if caller else None


def report() -> None:
    """Print what was counted."""
    for title, folders in (("record", RECORD), ("all", "")):
        rooms = [room for room in entries if room.startswith(folders)]
        again = sum(entries[room] - 1 for room in rooms)
        print(f"\n{title}: {len(rooms)} files, entered again {again} times", file=sys.stderr)
        print("\n".join(f"  {room:40} {entries[room]:5}" for room in rooms), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.setprofile(trace)
    main()
