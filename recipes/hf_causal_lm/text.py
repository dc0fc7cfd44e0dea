"""Read text files as a single stream of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from recipes.stdlib_lm.corpus import find_modules
from worldsize.core import ConfigError


class Tokenizer:
    """Tokenizer from transformers. Its end-of-sequence token, if it has one, ends each text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def size(self) -> int:
        """Size of the vocabulary, in tokens."""
        return len(self._tokenizer)

    def encode(self, text: bytes) -> Tensor:
        """Return the tokens of a text as int64 (tokens,)."""
        tokens = self._tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return torch.tensor(tokens if end is None else [*tokens, end])

    def save(self, folder: Path) -> None:
        """Save the tokenizer in transformers' format."""
        self._tokenizer.save_pretrained(folder)


class Bytes(Tokenizer):
    """Byte-level tokenizer with a zero byte at the end of each text."""

    def __init__(self) -> None: ...

    @property
    def size(self) -> int:
        return 256

    def encode(self, text: bytes) -> Tensor:
        return torch.from_numpy(numpy.frombuffer(text + b"\0", dtype=numpy.uint8).copy())

    def save(self, folder: Path) -> None:
        """Do nothing: transformers lacks an equivalent tokenizer."""


def find_text_files(text: str | None) -> Mapping[str, Path]:
    """Return the files of ``text`` by name. Raises ConfigError if there are none."""
    if text is None:
        return find_modules()
    root = Path(text).expanduser()
    files = {root.name: root} if root.is_file() else {str(path.relative_to(root)): path for path in root.rglob("*.txt")}
    if not files:
        raise ConfigError(
            f"recipe.text={text}: file not found, or the folder has no *.txt files. Set a text file or a folder."
        )
    return dict(sorted(files.items()))


def read_tokens(files: Iterable[Path], tokenizer: Tokenizer) -> Tensor:
    """Concatenate the tokens of all files, uint8 or int64 (tokens,)."""
    return torch.cat([tokenizer.encode(file.read_bytes()) for file in files])
