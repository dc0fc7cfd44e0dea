"""Source code of the installed standard library as bytes, split by file into train and test."""

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
_BUILT = ("_sysconfigdata", "config-")  # generated when Python was built; they contain machine-specific paths


def find_modules(root: Path | None = None) -> dict[str, Path]:
    """Return all modules of the standard library except tests, by relative path in sorted order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    modules = {path.relative_to(root).as_posix(): path for path in _walk_modules(root)}
    if not modules:
        raise ConfigError(
            f"no .py files found in {root}. Use a Python installation with the source of the standard library."
        )
    return {name: modules[name] for name in sorted(modules)}


def _walk_modules(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # skip site-packages, which may have a hundred times more files than the library
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(_BUILT)]
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(_BUILT))


def is_test(name: str) -> bool:
    """Return whether a file belongs to the test split: one in ten, by a hash of its path."""
    return _hash_name(name)[0] < 26


def read_split(split: str, limit: int | None = None) -> Tensor:
    """Return at most ``limit`` bytes of a split, uint8 (bytes,); a zero byte ends each file.

    Files are in the order of their hashes, so that a limit samples the whole library instead of the first letters of
    the alphabet.
    """
    modules = find_modules()
    chosen = sorted((name for name in modules if is_test(name) == (split == "test")), key=_hash_name)
    text = b"".join(modules[name].read_bytes() + b"\0" for name in chosen)
    return torch.from_numpy(numpy.frombuffer(text[:limit], dtype=numpy.uint8).copy())


def _hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


@final
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Split text into non-overlapping windows of inputs and next bytes, int64 (context,) each.

    The windows together predict every byte exactly once. Each window starts with the last byte of the previous one; the
    first starts with a zero byte, as after the end of a file. Targets past the end of the text are ``IGNORED``.
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
        """Return windows ``indices`` (batch,): inputs and targets int64 (batch, context)."""
        places_bt = indices[:, None] * self.context + torch.arange(self.context + 1)
        tokens_bt = self.text[places_bt].long()
        return tokens_bt[:, :-1], tokens_bt[:, 1:].masked_fill(places_bt[:, 1:] > self.known, IGNORED)
