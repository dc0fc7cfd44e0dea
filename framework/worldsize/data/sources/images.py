"""Images in one folder per class, and decoders by file name ending."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy

from worldsize.data.source import FileSource
from worldsize.data.storage.byte_files import ByteFile, SampleError, strip_secrets
from worldsize.data.storage.index import Array, Scan, open_index
from worldsize.data.storage.listing import Folder, walk_folders
from worldsize.errors import ConfigError, neighbours, require

if TYPE_CHECKING:
    from PIL import Image


IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Image formats to decode by default. Pillow's other decoders are rarely needed and less well tested."""


def decode_image(data: bytes, formats: Sequence[str] = FORMATS) -> Image.Image:
    """Decode an image without converting its mode.

    Args:
        data: content of the image file, which determines the format.
        formats: allowed formats, by their Pillow names.

    Raises:
        ConfigError: Pillow does not support one of ``formats``, or is not installed.
        ValueError: the data are not an image in an allowed format.
    """
    try:
        from PIL import Image, UnidentifiedImageError  # an extra, and slow to import
    except ImportError:
        require("Reading images", "pillow", extra="data")
        raise
    try:
        opened = Image.open(io.BytesIO(data), formats=list(formats))
    except KeyError as error:
        name = str(error.args[0])
        raise ConfigError(
            f"data.image_formats: Pillow does not support {name!r}{neighbours(name, Image.OPEN)}"
        ) from None
    except UnidentifiedImageError:
        raise ValueError(
            f"not an image in one of the formats {', '.join(formats)}; add other formats to data.image_formats"
        ) from None
    opened.load()  # otherwise Pillow decodes lazily, and errors lack the file name
    return opened


def _decode_array(data: bytes) -> Any:
    return numpy.load(io.BytesIO(data), allow_pickle=False)


DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "txt": bytes.decode,
    "text": bytes.decode,
    "json": json.loads,
    "cls": int,
    "npy": _decode_array,
    **dict.fromkeys(IMAGES, decode_image),
}


def decode_content(data: bytes, ending: str, place: str, image_formats: Sequence[str] = FORMATS) -> Any:
    """Decode the content of a file according to the ``ending`` of its name.

    Args:
        place: the file and byte offset, for error messages.
        image_formats: allowed image formats, by their Pillow names.

    Raises:
        SampleError: the data cannot be decoded.
    """
    try:
        return decode_image(data, image_formats) if ending in IMAGES else DECODERS[ending](data)
    except ConfigError:
        raise
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise SampleError(f"{place}: failed to decode as {ending}: {reason}.") from None


_ROWS = 10_000  # images per write to the index
_HASHED = 1 << 24  # array elements to hash at once
_LOOKS = 16  # number of images to include in the fingerprint with their content


@final
@dataclass(frozen=True)
class ImageFolder(FileSource):
    """Images in a folder with one subfolder per class, like torchvision's ImageFolder.

    A sample is a dict with ``image`` and ``label``, the index of its class in the sorted class names. Without class
    folders, samples do not have a ``label``.

    Args:
        transform: maps each Pillow image to the value to use, such as a tensor of fixed size; None keeps Pillow images
            of any size and mode.
        image_formats: allowed image formats, by their Pillow names; file names do not matter.
    """

    transform: Callable[[Any], Any] | None = None
    image_formats: Sequence[str] = FORMATS

    endings: ClassVar[tuple[str, ...]] = tuple(f".{each}" for each in IMAGES)

    @cached_property
    def _walked(self) -> list[tuple[Folder, tuple[str, ...]]]:
        if not isinstance(self.path, str):
            shown = [strip_secrets(each) for each in self.path]
            raise ConfigError(f"data.path must be a single folder of images, got {shown}.")
        walked = list(walk_folders(self.path, self.cache))
        return [each for each in walked if each[1]] or walked

    @cached_property
    def classes(self) -> list[str]:
        """Class names, sorted; empty if there are no class folders."""
        return sorted({parts[0] for _, parts in self._walked if parts})

    @property
    def files(self) -> list[ByteFile]:
        """The folders with images, in place of the individual files."""
        return [folder for folder, _ in self._walked]

    @cached_property
    def index(self) -> Mapping[str, Array]:
        """Index of all images: sizes, folders, concatenated names, and the end offset of each name."""
        made = open_index("images-1", self.files, self.cache, self._create_scanner())
        if not made:
            raise ConfigError(f"no images found in {strip_secrets(str(self.path))}. Check the data path.")
        return made

    def _create_scanner(self) -> Scan:
        end = 0

        def scan_folder(file: ByteFile) -> Iterator[Mapping[str, Array]]:
            nonlocal end
            assert isinstance(file, Folder)
            rows: list[tuple[bytes, int]] = []
            for name, size in file.list_sizes():
                if name.lower().endswith(self.endings) and not name.startswith("."):
                    rows.append((name.encode(errors="surrogateescape"), size))
                if len(rows) == _ROWS:
                    yield _build_columns(rows, end)
                    end += sum(len(name) for name, _ in rows)
                    rows = []
            yield _build_columns(rows, end)
            end += sum(len(name) for name, _ in rows)

        return scan_folder

    def __len__(self) -> int:
        return len(self.index["size"])

    def locate_image(self, index: int) -> tuple[Folder, str, int]:
        """Return the folder, the file name and the size in bytes of image ``index``."""
        ends, names = self.index["end"], self.index["name"]
        first = int(ends[index - 1]) if index else 0
        name = names[first : int(ends[index])].tobytes().decode(errors="surrogateescape")
        return self._walked[int(self.index["file"][index])][0], name, int(self.index["size"][index])

    def sample(self, index: int) -> dict[str, Any]:
        folder, name, size = self.locate_image(index)
        ending = name.rpartition(".")[2].lower()
        image = decode_content(
            folder.read_file(name, size), ending, f"{folder.name}/{name}, byte 0", self.image_formats
        )
        sample = {"image": image if self.transform is None else self.transform(image)}
        if self.classes:
            sample["label"] = self._labels[int(self.index["file"][index])]
        return sample

    @cached_property
    def _labels(self) -> list[int]:
        numbers = {name: number for number, name in enumerate(self.classes)}
        return [numbers[parts[0]] for _, parts in self._walked]

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the total size, and a hash of all names and sizes and of the content of 16 images."""
        hashed = hashlib.sha256("\n".join("/".join(parts) for _, parts in self._walked).encode())
        for name in ("name", "size", "file"):
            array = self.index[name]
            for first in range(0, len(array), _HASHED):
                hashed.update(array[first : first + _HASHED].tobytes())
        for index in numpy.linspace(0, len(self) - 1, min(_LOOKS, len(self)), dtype=int).tolist():
            folder, name, size = self.locate_image(index)
            hashed.update(folder.read_file(name, size))
        return {"size": int(self.index["size"].sum()), "sha256": hashed.hexdigest(), "files": len(self)}


def _build_columns(rows: list[tuple[bytes, int]], end: int) -> dict[str, Array]:
    lengths = numpy.array([len(name) for name, _ in rows], dtype=numpy.uint64)
    return {
        "size": numpy.array([size for _, size in rows], dtype=numpy.uint64),
        "end": numpy.cumsum(lengths, dtype=numpy.uint64) + numpy.uint64(end),
        "name": numpy.frombuffer(b"".join(name for name, _ in rows), numpy.uint8),
    }
