"""Small file systems for tests of full disks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Mount an empty file system of ``size`` (as in mount(8)) at the new folder ``folder``.

    A separate process unmounts it when its standard input closes, even if this process is killed.
    """
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    command = ["sh", "-c", 'read -r _; exec umount --lazy "$0"', str(folder)]
    unmounting = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield folder
    finally:
        unmounting.communicate()
        assert unmounting.returncode == 0


def fill(folder: Path) -> None:
    """Write to a file in ``folder`` until its disk is full."""
    for piece in (bytes(4096), b"\0"):
        with (folder / "ballast").open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(piece)
            except OSError:
                continue
