"""Decodes image files to RGB. Whatever a damaged file makes its decoder do becomes BadInput."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from backbench.errors import BadInput
from backbench.untrusted import opening, printable

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

# What an image may be, whatever its name says: PIL would give PostScript to Ghostscript
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
LARGEST = opening.GIGABYTE  # bytes of a file
JPEG_START = b"\xff\xd8"
JPEG_END = b"\xff\xd9"


@contextlib.contextmanager
def readable(path: str | Path, data: bytes | None = None) -> Iterator[BinaryIO]:
    """Open the image file, or its `data`.

    Any error in the block, of the system or of a decoder, becomes BadInput that names the file."""
    try:
        if data is not None:
            yield io.BytesIO(data)
        else:
            with opening.open_regular(path, most=LARGEST) as file:
                yield file
    except FileNotFoundError:
        raise BadInput(f"{path}: no such image file") from None
    except (MemoryError, BadInput):
        raise
    # A damaged file raises whatever its decoder happens to do with it
    except Exception as error:
        shown = printable.shown(str(path), 300)
        system_error = getattr(error, "strerror", None)
        if system_error:
            raise BadInput(f"{shown}: not readable ({system_error})") from None
        if type(error).__name__ == "UnidentifiedImageError":
            # Pillow's own text would name an object in memory
            said = "no known image format"
        else:
            said = " ".join(str(error).split())[:100]
        raise BadInput(f"{shown}: corrupt image ({said})") from None


def decode(
    path: str | Path, *, upright: bool = False, data: bytes | None = None
) -> Image.Image:
    """Decode a file, or its `data`, as PIL RGB; `upright` obeys EXIF. BadInput names a bad file."""
    from PIL import Image, ImageOps

    with readable(path, data) as file:
        opened = Image.open(file, formats=FORMATS)
        image = ImageOps.exif_transpose(opened) if upright else opened
        image.load()
        # convert() would copy an RGB image
        return image if image.mode == "RGB" else image.convert("RGB")


def decode_array(data: bytes, name: str | Path) -> np.ndarray:
    """Decode an image's bytes as uint8 RGB (H, W, 3), by OpenCV or else PIL.

    The pixels are PIL's: both use libjpeg-turbo, and EXIF is ignored. BadInput names a corrupt or
    truncated image."""
    import cv2
    import numpy as np

    # Some versions of OpenCV fill up with gray what is missing; PIL refuses it
    is_jpeg = data[:2] == JPEG_START
    truncated = is_jpeg and JPEG_END not in data[-1024:]
    if data and not truncated:
        # libjpeg itself gives RGB, where OpenCV has a flag for that (from 4.11 on)
        to_rgb = getattr(cv2, "IMREAD_COLOR_RGB", None) if is_jpeg else None
        colour = cv2.IMREAD_COLOR if to_rgb is None else to_rgb
        pixels = None
        with contextlib.suppress(cv2.error):  # PIL will say what is wrong with it
            pixels = cv2.imdecode(
                np.frombuffer(data, np.uint8), cv2.IMREAD_IGNORE_ORIENTATION | colour
            )
        if pixels is not None and to_rgb is None:
            return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)
        if pixels is not None:
            return pixels
    return np.asarray(decode(name, data=data))
