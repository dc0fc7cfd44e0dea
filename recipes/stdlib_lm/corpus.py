"""The source of the installed Python standard library as bytes, split by file into train and test."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import final

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from worldsize.core import ConfigError
from worldsize.data.sources.documents import IGNORED

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_BUILT = ("_sysconfigdata", "config-")  # written when Python was built: they name the machine's own folders


def sources(root: Path | None = None) -> dict[str, Path]:
    """Return every module of the standard library but its tests, by relative path in sorted order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    modules = {path.relative_to(root).as_posix(): path for path in _walk(root)}
    if not modules:
        raise ConfigError(f"no .py files in {root}. Use a Python whose standard library is installed as source.")
    return {name: modules[name] for name in sorted(modules)}


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # site-packages may hold a hundred times more files than the library: do not enter it
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(_BUILT)]
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(_BUILT))


def is_test(name: str) -> bool:
    """Return whether a file is tested on: one in ten, by a hash of its path, so that no file depends on the others."""
    return _hash(name)[0] < 26


def read(split: str, limit: int | None = None) -> Tensor:
    """Return the bytes of a split, uint8 (bytes,), at most ``limit``; a zero byte ends each file.

    Files follow each other in the order of their hash, so that a limit takes a sample of the library
    and not its first letters.
    """
    modules = sources()
    chosen = sorted((name for name in modules if is_test(name) == (split == "test")), key=_hash)
    text = b"".join(modules[name].read_bytes() + b"\0" for name in chosen)
    return torch.from_numpy(numpy.frombuffer(text[:limit], dtype=numpy.uint8).copy())


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


@final
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Cut text into windows that do not overlap: inputs and the bytes that follow them, int64 (context,) each.

    Together the windows predict every byte exactly once. Each starts with the last byte of the one before, the first
    with a zero byte, as after the end of a file. Targets past the end of the text are ``IGNORED``.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.context = context
        self.length = -(-len(text) // context)
        self.known = len(text)
        self.text = F.pad(text, (1, self.length * context - len(text)))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs_bt, targets_bt = self.load_batch(torch.tensor([index]))
        return inputs_bt[0], targets_bt[0]

    def load_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return windows ``indices``, int64 (batch,), as inputs and targets int64 (batch, context)."""
        places_bt = indices[:, None] * self.context + torch.arange(self.context + 1)
        tokens_bt = self.text[places_bt].long()
        return tokens_bt[:, :-1], tokens_bt[:, 1:].masked_fill(places_bt[:, 1:] > self.known, IGNORED)
