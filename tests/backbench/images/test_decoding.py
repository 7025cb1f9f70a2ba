"""Who decodes an image, what its header says, and what a damaged one becomes."""

import errno
import io
import os

import cv2
import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from backbench.errors import BadInput
from backbench.images import decoding

COLOURS = Image.effect_noise((40, 24), 90).convert("RGB")
GRAY = COLOURS.convert("L")


def saved(image, kind, **settings):
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def turned(kind, orientation=6):
    exif = Image.Exif()
    exif[decoding.EXIF_ORIENTATION] = orientation
    return saved(COLOURS, kind, exif=exif)


DEEP = Image.fromarray(np.full((24, 40), 4000, np.uint16))


@pytest.mark.parametrize(
    ("data", "by_opencv"),
    [
        (saved(COLOURS, "JPEG"), True),
        (saved(COLOURS, "JPEG", progressive=True), True),
        (saved(GRAY, "JPEG"), True),
        (turned("JPEG"), True),
        (saved(COLOURS, "JPEG", comment=b"x" * 60_000), True),
        (saved(COLOURS, "PNG"), True),
        (saved(GRAY, "PNG"), True),
        # Colours, depths and frames of which OpenCV makes other pixels
        (saved(COLOURS.convert("CMYK"), "JPEG"), False),
        (saved(DEEP, "PNG"), False),
        (saved(COLOURS.convert("P"), "PNG"), False),
        (saved(COLOURS.convert("RGBA"), "PNG"), False),
        (saved(COLOURS, "PNG", save_all=True, append_images=[GRAY]), False),
        (saved(COLOURS, "WEBP", lossless=True), False),
        (saved(COLOURS, "BMP"), False),
    ],
)
def test_opencv_decodes_what_it_makes_pillows_pixels_of(data, by_opencv, monkeypatch):
    asked = []
    imdecode = cv2.imdecode

    def counted(content, flags):
        asked.append(len(content))
        return imdecode(content, flags)

    monkeypatch.setattr(cv2, "imdecode", counted)
    found = decoding.decode_array(data, "x")
    wanted = np.asarray(decoding.decode("x", data=data))
    np.testing.assert_array_equal(found, wanted)
    assert asked == ([len(data)] if by_opencv else [])
    assert found.flags.writeable


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_what_is_cut_off_is_left_to_pillow(kind, monkeypatch):
    monkeypatch.delattr(cv2, "imdecode")
    with pytest.raises(BadInput, match=r"^x: corrupt image \(.*\); copy it again"):
        decoding.decode_array(saved(COLOURS, kind)[:-30], "x")


START = b"\xff\xd8"
TABLE = b"\xff\xdb\x00\x04\x11\x22"  # six bytes, of which the length counts four


def frame(marker, channels):
    return bytes([0xFF, marker, 0, 17, 8, 0, 24, 0, 40, channels]) + b"\x00"


@pytest.mark.parametrize(
    ("data", "channels"),
    [
        (START + frame(0xC0, 3), 3),
        (START + frame(0xC2, 1), 1),
        (START + TABLE + TABLE + frame(0xCF, 4), 4),
        # Fillers before a marker
        (START + TABLE + b"\xff\xff" + frame(0xC0, 3), 3),
        # Huffman tables, a reserved one and arithmetic conditions are no frames
        (START + b"\xff\xc4\x00\x04\x11\x22" + frame(0xC1, 3), 3),
        (START + b"\xff\xc8\x00\x02" + frame(0xC1, 3), 3),
        (START + b"\xff\xcc\x00\x03\x11" + frame(0xC1, 3), 3),
        # None is found
        (START + TABLE, 0),
        (START + frame(0xC0, 3)[:-2], 0),
        (START + b"\x00" + frame(0xC0, 3), 0),
        (START, 0),
    ],
)
def test_a_jpegs_channels_stand_in_its_frame_header(data, channels):
    assert decoding._jpeg_channels(data) == channels


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 8])
def test_the_size_of_a_turned_image_is_known_before_it_is_read(kind, orientation):
    data = turned(kind, orientation)
    with Image.open(io.BytesIO(data)) as image:
        assert decoding.orientation_of(image) == orientation
        size = decoding.upright_size(image)
    assert size == ((24, 40) if orientation in (5, 8) else (40, 24))
    assert decoding.decode("x", data=data, upright=True).size == size
    with Image.open(io.BytesIO(saved(COLOURS, "JPEG"))) as plain:
        assert (decoding.orientation_of(plain), plain.size) == (1, (40, 24))


# Damage


def raised(error):
    with pytest.raises(type(error)) as caught, decoding.readable("a/b.png", b""):
        raise error
    return caught.value


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_the_machine_lacks_is_no_fault_of_an_image(code):
    error = OSError(code, os.strerror(code))
    assert raised(error) is error
    for error in (MemoryError("x"), BadInput("as it is")):
        assert raised(error) is error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError(), "a/b.png: no such image file"),
        (
            OSError(errno.EIO, "Input/output error"),
            "a/b.png: not readable (Input/output error)",
        ),
        (
            UnidentifiedImageError("cannot identify <_io.BytesIO at 0x7f>"),
            "a/b.png: corrupt image (no JPEG, PNG, GIF, BMP, PPM, TIFF, WEBP that Pillow reads);"
            " copy it again, or take it out",
        ),
        (
            ValueError("  many \n lines " + "x" * 100),
            f"a/b.png: corrupt image (many lines {'x' * 89}); copy it again, or take it out",
        ),
    ],
)
def test_any_other_error_names_the_file_in_one_line(error, says):
    with pytest.raises(BadInput) as caught, decoding.readable("a/b.png", b""):
        raise error
    assert str(caught.value) == says


def test_a_folder_or_a_long_file_is_no_image(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"not readable \(Is a directory\)$"):
        decoding.decode(tmp_path)
    file = tmp_path / "x.png"
    COLOURS.save(file)
    size = file.stat().st_size
    monkeypatch.setattr(decoding, "LARGEST", size)
    assert decoding.decode(file).size == (40, 24)
    monkeypatch.setattr(decoding, "LARGEST", size - 1)
    with pytest.raises(BadInput, match=f"not readable \\({size} bytes, more than any"):
        decoding.decode(file)


def test_an_image_of_too_many_pixels_is_not_called_corrupt(tmp_path):
    """Copying it again would not help."""
    file = tmp_path / "huge.png"
    Image.new("1", (40_000, 5_000)).save(file)
    with pytest.raises(BadInput) as error:
        decoding.decode(file)
    assert str(error.value) == (
        f"{file}: has more than 178,956,970 pixels; write it smaller, or take it out"
    )
