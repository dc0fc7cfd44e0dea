"""Finds the current line of a program, as its author knows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_TORCH = f"{Path(torch.__file__).parent}/"
_FRAMEWORK = f"{Path(__file__).parents[2]}/"
_OWN = f"{Path(__file__).parent}/"


def site() -> tuple[str, bool]:
    """Return the innermost line outside torch, and whether torch pickles objects there, whose sizes may differ."""
    is_object = False
    for frame in _frames():
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_TORCH):
            is_object = is_object or "object" in name
        elif not file.startswith((_OWN, "<")) and name != "__torch_function__":  # of a mode, around what it watches
            return f"{short_path(file)}:{frame.f_lineno} ({name})", is_object
    return "torch", is_object


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def short_path(file: str) -> str:
    """Shorten a path: relative to worldsize or to the working directory, else absolute."""
    path = Path(file)
    if file.startswith(_FRAMEWORK):
        return str(path.relative_to(Path(_FRAMEWORK).parent))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
