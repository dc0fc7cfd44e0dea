"""Text files as one stream of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from recipes.stdlib_lm.corpus import sources
from worldsize.core import ConfigError


class Tokenizer:
    """One of transformers; each text ends with its end-of-sequence token, if it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def size(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: bytes) -> Tensor:
        """int64 [tokens]."""
        found = self._tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return torch.tensor(found if end is None else [*found, end])


class Bytes(Tokenizer):
    """Bytes as they are, and zero at the end of each text."""

    def __init__(self) -> None: ...

    @property
    def size(self) -> int:
        return 256

    def encode(self, text: bytes) -> Tensor:
        return torch.from_numpy(numpy.frombuffer(text + b"\0", dtype=numpy.uint8).copy())


def files_of(text: str | None) -> Mapping[str, Path]:
    """By name. Raises ConfigError if there are none."""
    if text is None:
        return sources()
    root = Path(text).expanduser()
    found = {root.name: root} if root.is_file() else {str(path.relative_to(root)): path for path in root.rglob("*.txt")}
    if not found:
        raise ConfigError(
            f"recipe.text={text}: there is no such file, or no *.txt in it. Give a text file or a folder."
        )
    return dict(sorted(found.items()))


def tokens_of(files: Iterable[Path], tokenizer: Tokenizer) -> Tensor:
    """All files one after the other: uint8 or int64 [tokens]."""
    return torch.cat([tokenizer.encode(file.read_bytes()) for file in files])
