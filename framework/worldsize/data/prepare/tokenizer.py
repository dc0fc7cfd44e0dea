"""Turns texts into token numbers: bytes as they are, or a tokenizer of Hugging Face."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy
from numpy.typing import NDArray

from worldsize.errors import ConfigError, neighbours

BYTES = "bytes"
Tokens = NDArray[numpy.integer[Any]]


class Encoder(Protocol):
    """Turns texts into token numbers.

    Attributes:
        sha256: Digest of everything that decides the numbers.
        vocabulary: One more than the largest number.
    """

    sha256: str
    vocabulary: int

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the numbers of each text, in the smallest type that holds the vocabulary."""


def dtype_of(vocabulary: int) -> numpy.dtype[Any]:
    """Return the smallest unsigned type that holds the numbers below ``vocabulary``."""
    return numpy.min_scalar_type(max(0, vocabulary - 1))


@final
@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer to use.

    Attributes:
        name: "bytes" (UTF-8, 256 numbers), a tokenizer.json, a folder of a transformers tokenizer, or its name on the
            hub.
        end: A token of the vocabulary that is put after each document; None: none is.
    """

    name: str
    end: str | None = None

    def encoder(self) -> Encoder:
        """Load it.

        Raises:
            ConfigError: it cannot be loaded, or has no token ``end``.
        """
        if self.name == BYTES:
            if self.end is not None:
                raise ConfigError("--tokenizer bytes has no token to put after a document. Leave --end out.")
            return _Bytes()
        return _HuggingFace(_loaded(self.name), self.end)


@final
class _Bytes:
    def __init__(self) -> None:
        self.sha256, self.vocabulary = hashlib.sha256(BYTES.encode()).hexdigest(), 256

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts]


@final
class _HuggingFace:
    """A tokenizer without padding, truncation and the special tokens that it adds by itself."""

    def __init__(self, tokenizer: Any, end: str | None) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        numbers: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if end is not None and end not in numbers:
            raise ConfigError(f"--end {end!r} is no token of the tokenizer{neighbours(end, numbers)}")
        self._tokenizer, self._end = tokenizer, [] if end is None else [numbers[end]]
        self.sha256 = hashlib.sha256(f"{tokenizer.to_str()}{self._end}".encode()).hexdigest()
        self.vocabulary = 1 + max(numbers.values())

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [numpy.array(each.ids + self._end, dtype=dtype_of(self.vocabulary)) for each in encoded]


def _loaded(name: str) -> Any:
    """Return a tokenizer of the library ``tokenizers``."""
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # each process has a core, and threads do not survive forks
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        if file.is_file():
            from tokenizers import Tokenizer as Library

            return Library.from_file(str(file))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise ConfigError(f"--tokenizer {name} needs {error.name}: pip install transformers.") from None
    except Exception as error:  # tokenizers raises no other
        raise ConfigError(
            f"--tokenizer {name} cannot be loaded: {error}. Name bytes, a tokenizer.json, a folder that has one, or a "
            "name on the Hugging Face hub."
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"--tokenizer {name} has no tokenizer.json, and worldsize takes no other. Choose a fast one.")
    return tokenizer.backend_tokenizer
