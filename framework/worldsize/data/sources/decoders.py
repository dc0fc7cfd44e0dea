"""Turns the bytes of a sample's parts into what they say, by the ending of the part's name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from worldsize.data.storage.byte_files import SampleError
from worldsize.errors import ConfigError, missing_extra, neighbours

if TYPE_CHECKING:
    from PIL import Image

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The formats of images that are decoded. Pillow has decoders of many more, which few data need and few people test."""


def image(data: bytes, formats: Sequence[str] = FORMATS) -> Image.Image:
    """Decode an image in the mode that it is stored in.

    Args:
        data: the bytes of its file, which decide on its format.
        formats: those that are allowed, by Pillow's names.

    Raises:
        ConfigError: Pillow has no such format, or is not installed.
        ValueError: it is of no format that is allowed.
    """
    try:
        from PIL import Image, UnidentifiedImageError  # an extra, and it takes time
    except ImportError:
        raise missing_extra("Reading images", package="pillow", extra="data") from None
    try:
        opened = Image.open(io.BytesIO(data), formats=list(formats))
    except KeyError as error:
        name = str(error.args[0])
        raise ConfigError(f"data.image_formats: Pillow has no format {name!r}{neighbours(name, Image.OPEN)}") from None
    except UnidentifiedImageError:
        raise ValueError(
            f"it is no image of {', '.join(formats)}; other formats are read if data.image_formats names them"
        ) from None
    opened.load()  # Pillow decodes late otherwise, where nobody knows any more which file it was
    return opened


def _array(data: bytes) -> Any:
    return numpy.load(io.BytesIO(data), allow_pickle=False)


DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "txt": bytes.decode,
    "text": bytes.decode,
    "json": json.loads,
    "cls": int,
    "npy": _array,
    **dict.fromkeys(IMAGES, image),
}


def decoded(data: bytes, ending: str, place: str, image_formats: Sequence[str] = FORMATS) -> Any:
    """Decode ``data`` as its ``ending`` says.

    Args:
        image_formats: the formats of images that are allowed.
        place: the file and the byte, for the message.

    Raises:
        SampleError: it cannot be decoded.
    """
    try:
        return image(data, image_formats) if ending in IMAGES else DECODERS[ending](data)
    except ConfigError:
        raise
    except Exception as error:  # decoders of damaged files raise errors of many kinds
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise SampleError(f"{place}: it does not decode as {ending}: {reason}.") from None
