"""Decodes image files to 8-bit RGB, by one rule for every program that looks at pixels.

The pixels are those of Pillow's convert("RGB"), which torchvision's readers and the papers use: alpha
is dropped; palettes, CMYK, YCbCr and LAB are converted; of several frames or pages the first counts.
Pillow would clip gray of more than 8 bits to white, so there the rule is our own. 16-bit gray keeps
its high byte, as Pillow itself does with 16-bit colours. Floats and 32-bit integers are refused,
because no file says which of its values is white.

Whatever a damaged file makes its decoder do becomes BadInput.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from backbench.errors import BadInput
from backbench.images import MOST_PIXELS
from backbench.runs import failures
from backbench.untrusted import opening, printable

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

# What an image may be, whatever its name says: PIL would give PostScript to Ghostscript
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
LARGEST = opening.GIGABYTE  # bytes of a file
JPEG_START = b"\xff\xd8"
JPEG_END = b"\xff\xd9"
EXIF_ORIENTATION = 0x0112
SIDEWAYS = (5, 6, 7, 8)  # orientations that swap an image's sides
# Headers of a JPEG's frame, which have its channels: SOF0 to SOF15 without DHT, JPG and DAC
JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PNG_START = b"\x89PNG\r\n\x1a\n"
# Where a PNG's header has the bits of a sample and the kind of colour
PNG_DEPTH_COLOUR = slice(24, 26)
PNG_GRAY_RGB = (b"\x08\x00", b"\x08\x02")
# Pillow's modes whose range a file does not tell. Of all others but I;16 values lie in 0..255
UNKNOWN_RANGE = {"I": "signed or 32-bit integers", "F": "floats"}
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
TIFF_WIDTH = 256
TIFF_HEIGHT = 257
TIFF_BITS_PER_SAMPLE = 258
TIFF_PHOTOMETRIC = 262


@contextlib.contextmanager
def readable(path: str | Path, data: bytes | None = None) -> Iterator[BinaryIO]:
    """Open the image file, or its `data`.

    Any error in the block, of the file or of a decoder, becomes BadInput that names the file. What
    the machine lacks (memory, free file descriptors) is raised as it is."""
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
        system_errno = getattr(error, "errno", None)
        if system_errno in failures.OF_THE_MACHINE:
            raise
        shown = printable.shown(str(path), 300)
        system_error = getattr(error, "strerror", None)
        if system_error:
            raise BadInput(f"{shown}: not readable ({system_error})") from None
        if type(error).__name__ == "UnidentifiedImageError":
            # Pillow's own text would name an object in memory
            said = f"no {', '.join(FORMATS)} that Pillow reads"
        elif type(error).__name__ == "DecompressionBombError":
            raise BadInput(
                f"{shown}: has more than {MOST_PIXELS:,} pixels; write it smaller, or take it out"
            ) from None
        else:
            said = " ".join(str(error).split())[:100]
        raise BadInput(
            f"{shown}: corrupt image ({said}); copy it again, or take it out"
        ) from None


def decode(
    path: str | Path, *, upright: bool = False, data: bytes | None = None
) -> Image.Image:
    """Decode a file, or its `data`, as PIL RGB. BadInput names a file that is refused.

    `upright` turns the image as its EXIF orientation says: detection does, the others do not. Pillow
    turns a TIFF in any case."""
    from PIL import Image, ImageOps

    with readable(path, data) as file:
        source = opened(file, path)
        # Asked before turning, which makes a copy that knows nothing of its file
        deep_gray = _deep_gray(source)
        image = ImageOps.exif_transpose(source) if upright else source
        image.load()
        if image.mode == "RGB":
            return image  # convert() would copy it
        if deep_gray is not None:
            return Image.fromarray(deep_gray.high_byte(image)).convert("RGB")
        # RGB has no alpha; Pillow would warn that a palette's is lost
        image.info.pop("transparency", None)
        return image.convert("RGB")


def opened(file: BinaryIO, path: str | Path) -> Image.Image:
    """Open an image that can become RGB, without reading its pixels.

    BadInput names a TIFF that Pillow does not know, and an image of floats or 32-bit integers."""
    from PIL import Image, UnidentifiedImageError

    shown = printable.shown(str(path), 300)
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        file.seek(0)
        if file.read(4) not in TIFF_STARTS:
            raise
        raise BadInput(
            f"{shown}: a TIFF that is cut off, or has pixels that Pillow does not read (such as"
            " colours of floats); save it as an 8-bit PNG"
        ) from None
    if image.mode in UNKNOWN_RANGE and _deep_gray(image) is None:
        raise BadInput(
            f"{shown}: an image of mode {image.mode} ({UNKNOWN_RANGE[image.mode]}) does not say"
            " which value is white; scale it to 0..255 and save it as an 8-bit PNG"
        )
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) that an opened image has when it is turned as EXIF says."""
    width, height = image.size
    if image.format == "TIFF":
        # From version 11 on, Pillow states a TIFF's size as it is after turning
        tags = image.tag_v2  # type: ignore[attr-defined]
        width = tags[TIFF_WIDTH]
        height = tags[TIFF_HEIGHT]
    if orientation_of(image) in SIDEWAYS:
        return height, width
    return width, height


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, 1 where it states none."""
    return image.getexif().get(EXIF_ORIENTATION, 1)


class _DeepGray(NamedTuple):
    """Gray of more than 8 bits: of how many, and whether 0 is white."""

    bits: int
    inverted: bool = False

    def high_byte(self, image: Image.Image) -> np.ndarray:
        """Return the upper 8 bits of each pixel, uint8 (H, W)."""
        import numpy as np

        high = (np.asarray(image) >> (self.bits - 8)).astype(np.uint8)
        return 255 - high if self.inverted else high


def _deep_gray(image: Image.Image) -> _DeepGray | None:
    """Return what the values of an opened image mean if it is gray of up to 16 bits, else None."""
    # Pillow scales a PGM of more than 8 bits to 16; a PNG has no more than these
    if image.mode == "I" and image.format in ("PPM", "PNG"):
        return _DeepGray(bits=16)
    if not image.mode.startswith("I;16"):
        return None
    if image.format != "TIFF":
        return _DeepGray(bits=16)
    # Pillow unpacks 12 bits into 16 as they are, and does not invert a TIFF whose 0 is white
    tags = image.tag_v2  # type: ignore[attr-defined]
    bits = tags[TIFF_BITS_PER_SAMPLE][0]
    return _DeepGray(bits, inverted=tags.get(TIFF_PHOTOMETRIC) == 0)


def decode_array(data: bytes, name: str | Path) -> np.ndarray:
    """Decode an image's bytes as uint8 RGB (H, W, 3): the pixels of `decode`, never turned.

    OpenCV decodes what it makes the same pixels of, because it is faster; PIL all other images.
    BadInput names a bad image, as `decode` does."""
    import cv2
    import numpy as np

    if _alike_in_opencv(data):
        # libjpeg itself gives RGB, where OpenCV has a flag for that (from 4.11 on)
        is_jpeg = data.startswith(JPEG_START)
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
    # A copy, as PIL's own array cannot be written to, of which torch would warn
    return np.array(decode(name, data=data))


def _alike_in_opencv(data: bytes) -> bool:
    """Return True for a whole JPEG or PNG of 8-bit gray or RGB: OpenCV and PIL decode it alike."""
    # Some versions of OpenCV fill up with gray what is missing at the end; PIL refuses it
    tail = data[-1024:]
    if data.startswith(JPEG_START):
        # Both use libjpeg-turbo, but each has its own way from CMYK to RGB
        return _jpeg_channels(data) in (1, 3) and JPEG_END in tail
    if data.startswith(PNG_START):
        # OpenCV leaves out an animation's still picture, with which PIL begins
        animated = b"acTL" in data[: data.find(b"IDAT")]
        return (
            data[PNG_DEPTH_COLOUR] in PNG_GRAY_RGB and b"IEND" in tail and not animated
        )
    return False


def _jpeg_channels(data: bytes) -> int:
    """Return the number of channels that a JPEG's frame header states; 0 where none is found."""
    # Segments follow one another, each with a marker of two bytes and its length in two more. A
    # frame header goes on with depth (1 byte), height (2), width (2) and the number of channels
    at = len(JPEG_START)
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in JPEG_FRAMES:
            return data[at + 9]
        if marker == 0xFF:  # a filler before the marker
            at += 1
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return 0
