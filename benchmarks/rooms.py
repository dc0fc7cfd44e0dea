"""Count the source files that a command executes from the start to the first step.

    python benchmarks/rooms.py train recipe=digits steps=20 cluster.processes=1 run.root=/tmp/rooms run.name=a
    python benchmarks/rooms.py resume /tmp/rooms/digits/a steps=40

It traces calls in the launching process and in the first worker forked from it, until that calls ``fit``. A file is
entered when a function in a different file of worldsize calls one of its functions, or resumes one of its generators. A
place is a line from which a file is entered, counted once however often it runs: one jump for a reader of the code.

It prints all files in the order of their first entry, with their numbers of places and entries; the number of reads of
the manifest; and the path: the files with functions on the call stack when ``fit`` is called.

Run it in a clone of a different commit to measure that commit.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import worldsize
from worldsize.cli import main

PACKAGE = f"{Path(worldsize.__file__).parent}/"
LAST = ("loop/fit.py", "fit")
READS = ("manifest.py", "read_manifest")
entries: Counter[str] = Counter()
calls: Counter[tuple[str, str]] = Counter()
places: defaultdict[str, set[tuple[str | None, int]]] = defaultdict(set)


def trace(frame: FrameType, event: str, _: object) -> None:
    """Profile function: count calls from other files; report and stop at the first step."""
    if event != "call" or (room := _room(frame)) is None or frame.f_code.co_name == "<module>":
        return
    calls[room.rpartition("/")[2], frame.f_code.co_name] += 1
    caller = next(_callers(frame), None)
    if (calling := _room(caller) if caller else None) != room:
        entries[room] += 1
        places[room].add((calling, caller.f_lineno if caller else 0))
    if (room, frame.f_code.co_name) == LAST:
        sys.setprofile(None)
        report(frame)


def _room(frame: FrameType) -> str | None:
    file = frame.f_code.co_filename
    return file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else None


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """Yield the calling frames of ``frame`` that are in worldsize, innermost first."""
    caller = frame.f_back
    while caller is not None:
        if _room(caller) is not None:
            yield caller
        caller = caller.f_back


def report(last: FrameType) -> None:
    """Print the counts; ``last`` is the frame of ``fit``."""
    again = sum(len(places[room]) - 1 for room in entries), sum(entries[room] - 1 for room in entries)
    _say(f"\n{len(entries)} files, entered again from {again[0]} places, {again[1]} times")
    _say("\n".join(f"  {room:40} {len(places[room]):5} {entries[room]:5}" for room in entries))
    _say(f"\nthe manifest is read {calls[READS]} times")
    path = list(dict.fromkeys(_room(each) or "" for each in (last, *_callers(last))))[::-1]
    packages = dict.fromkeys(room.rpartition("/")[0] for room in path)
    _say(f"\npath: {len(path)} files in {len(packages)} packages")
    _say("\n".join(f"  {room}" for room in path))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.setprofile(trace)
    main()
