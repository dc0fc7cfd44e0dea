"""Turns the bytes of a sample's parts into what they say, by the ending of the part's name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy

from worldsize.data.storage.byte_files import SampleError
from worldsize.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from PIL import Image

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")


def image(data: bytes) -> Image.Image:
    """Decode an image of any format that Pillow knows, in the mode that it is stored in."""
    try:
        from PIL import Image  # an extra, and it takes time
    except ImportError:
        raise missing_extra("Reading images", package="pillow", extra="data") from None
    opened = Image.open(io.BytesIO(data))
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


def decoded(data: bytes, ending: str, place: str) -> Any:
    """Decode ``data`` as its ``ending`` says.

    Args:
        place: the file and the byte, for the message.

    Raises:
        SampleError: it cannot be decoded.
    """
    try:
        return DECODERS[ending](data)
    except ConfigError:
        raise
    except Exception as error:  # decoders of damaged files raise errors of many kinds
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise SampleError(f"{place}: it does not decode as {ending}: {reason}.") from None
