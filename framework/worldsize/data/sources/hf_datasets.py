"""Samples of a Hugging Face data set that ``save_to_disk`` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from worldsize.core import ConfigError
from worldsize.data.sources.arrow import ArrowSource
from worldsize.data.sources.decoders import decoded
from worldsize.data.storage.byte_files import ByteFile, SampleError, without_secrets
from worldsize.data.storage.open_files import open_files
from worldsize.errors import neighbours


@final
@dataclass(frozen=True)
class HfDataset(ArrowSource):
    """Rows of a folder that ``save_to_disk`` of a Hugging Face ``Dataset`` or ``DatasetDict`` wrote.

    Rows have their columns as Arrow has them: a class is its number. Images are decoded by Pillow.

    Args:
        split: the one that is read, where the folder has several.
    """

    split: str | None = None

    @property
    def _folder(self) -> str:
        if not isinstance(self.path, str):
            shown = [without_secrets(each) for each in self.path]
            raise ConfigError(f"data.path={shown} must be one folder that save_to_disk wrote.")
        return self.path.rstrip("/")

    @cached_property
    def folder(self) -> str:
        """The folder of the split."""
        try:
            known = self._described(f"{self._folder}/dataset_dict.json")["splits"]
        except ConfigError:
            return self._folder  # it has no splits, or is not there, which its files will say
        if self.split not in known:
            said = "no split is chosen" if self.split is None else f"there is no split {self.split!r}"
            raise ConfigError(
                f"{without_secrets(self._folder)}: {said}{neighbours(self.split or '', known)} Set data.split."
            )
        return f"{self._folder}/{self.split}"

    @cached_property
    def files(self) -> Sequence[ByteFile]:
        state = self._described(f"{self.folder}/state.json")
        names = [f"{self.folder}/{each['filename']}" for each in state["_data_files"]]
        return [file for name in names for file in open_files(name, self.cache)]

    @cached_property
    def _images(self) -> Sequence[str]:
        """The columns that hold images."""
        features: Mapping[str, Any] = self._described(f"{self.folder}/dataset_info.json")["features"]
        chosen = features if self.columns is None else self.columns
        return [name for name in chosen if features[name].get("_type") == "Image"]

    def _described(self, path: str) -> Any:
        (file,) = open_files(path, self.cache)
        try:
            return json.loads(file.read(0, file.size))
        except ValueError as error:
            raise ConfigError(f"{file.name}, byte 0: it is no JSON: {error}. Bring the file again.") from None

    def finished(self, rows: list[dict[str, Any]], file: ByteFile, part: int) -> list[dict[str, Any]]:
        for name in self._images:
            place = f"{file.name}, byte {int(self.index['start'][part])} ({name})"
            for row in rows:
                row[name] = None if row[name] is None else _image(row[name], place)
        return rows


def _image(stored: Mapping[str, Any], place: str) -> Any:
    if stored["bytes"] is None:
        raise SampleError(f"{place}: the image is not in the data set, only its path is. Save it with its images.")
    return decoded(stored["bytes"], "png", place)
