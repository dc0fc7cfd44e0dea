"""Samples of a Hugging Face data set that ``save_to_disk`` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from worldsize.core import ConfigError
from worldsize.data.sources.arrow import ArrowSource
from worldsize.data.sources.decoders import FORMATS, decoded
from worldsize.data.storage.byte_files import ByteFile, SampleError, without_secrets
from worldsize.data.storage.open_files import open_files
from worldsize.errors import neighbours
from worldsize.strict_json import LARGEST, parse


@final
@dataclass(frozen=True)
class HfDataset(ArrowSource):
    """Rows of a folder that ``save_to_disk`` of a Hugging Face ``Dataset`` or ``DatasetDict`` wrote.

    Rows have their columns as Arrow has them: a class is its number. Images are decoded by Pillow.

    Args:
        split: the one that is read, where the folder has several.
        image_formats: the formats of images that are decoded, by Pillow's names.
    """

    split: str | None = None
    image_formats: Sequence[str] = FORMATS

    @property
    def _folder(self) -> str:
        if not isinstance(self.path, str) or not self.path:
            shown = [without_secrets(each) for each in self.path]
            raise ConfigError(f"data.path={shown} must be one folder that save_to_disk wrote.")
        return self.path.rstrip("/")

    @cached_property
    def folder(self) -> str:
        """The folder of the split."""
        try:
            file = self._opened(f"{self._folder}/dataset_dict.json")
        except ConfigError:
            return self._folder  # it has no splits, or is not there, which its files will say
        known = [str(each) for each in _entry(file, "splits", list)]
        if self.split not in known:
            said = "no split is chosen" if self.split is None else f"there is no split {self.split!r}"
            raise ConfigError(
                f"{without_secrets(self._folder)}: {said}{neighbours(self.split or '', known)} Set data.split."
            )
        return f"{self._folder}/{self.split}"

    @cached_property
    def files(self) -> Sequence[ByteFile]:
        state = self._opened(f"{self.folder}/state.json")
        listed = _entry(state, "_data_files", list)
        if not listed or not all(isinstance(each, dict) and isinstance(each.get("filename"), str) for each in listed):
            raise ConfigError(f"{state.name} names no file of data. Save the data set anew with save_to_disk.")
        return [file for each in listed for file in open_files(f"{self.folder}/{each['filename']}", self.cache)]

    @cached_property
    def _images(self) -> Sequence[str]:
        """The columns that hold images."""
        features = _entry(self._opened(f"{self.folder}/dataset_info.json"), "features", dict)
        images = [name for name, kind in features.items() if isinstance(kind, dict) and kind.get("_type") == "Image"]
        return [name for name in images if self.columns is None or name in self.columns]

    def _opened(self, path: str) -> ByteFile:
        files = open_files(path, self.cache)
        if len(files) > 1:
            raise ConfigError(f"{without_secrets(path)} stands for {len(files)} files. data.path must be one folder.")
        return files[0]

    def finished(self, rows: list[dict[str, Any]], parts: Sequence[int]) -> list[dict[str, Any]]:
        for name in self._images:
            for row, part in zip(rows, parts, strict=True):
                place = f"{self.file_of(part).name}, byte {int(self.index['start'][part])} ({name})"
                row[name] = None if row[name] is None else _image(row[name], place, self.image_formats)
        return rows


def _entry(file: ByteFile, key: str, kind: type) -> Any:
    """Return what a file of JSON says under a key.

    Raises:
        ConfigError: the file is too large or no JSON, or has something else there.
    """
    if file.size > LARGEST:
        raise ConfigError(f"{file.name} has {file.size:,} bytes; {LARGEST:,} at most are read. Is the folder right?")
    try:
        content = parse(file.read(0, file.size), finite=False)
    except ValueError as error:
        raise ConfigError(f"{file.name}, byte 0: it is no JSON: {error}. Bring the file again.") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), kind):
        raise ConfigError(f"{file.name} says nothing of {key}, as save_to_disk has it. Save the data set anew.")
    return content[key]


def _image(stored: Mapping[str, Any], place: str, formats: Sequence[str]) -> Any:
    if stored["bytes"] is None:
        raise SampleError(f"{place}: the image is not in the data set, only its path is. Save it with its images.")
    return decoded(stored["bytes"], "png", place, formats)
