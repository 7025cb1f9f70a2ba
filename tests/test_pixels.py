"""Every program sees the same pixels of an image, whatever its mode: those that Pillow alone gives,
or a refusal."""

import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from support.containers import packed
from support.extraction import checkpoint, extractor
from support.layouts import trunk_file

from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.detection.data import images as detection_images
from backbench.errors import BadInput
from backbench.images.decoding import EXIF_ORIENTATION
from backbench.images.image_list import ImageList, scan_folder
from backbench.transfer.features.cache import FeatureCache

WIDTH = 40
HEIGHT = 32
PHOTOMETRIC = 262
BITS_PER_SAMPLE = 258


def noise(channels=3, seed=0):
    rng = np.random.default_rng(seed)
    shape = (HEIGHT, WIDTH, channels) if channels > 1 else (HEIGHT, WIDTH)
    return rng.integers(0, 256, shape, dtype=np.uint8)


COLOURS = Image.fromarray(noise())
GRAY = Image.fromarray(noise(1))
WITH_ALPHA = Image.fromarray(noise(4))
# All 65,536 levels are drawn from, not only those that 8 bits have
LEVELS = np.random.default_rng(1).integers(0, 2**16, (HEIGHT, WIDTH), dtype=np.uint16)
FRAMES = [Image.fromarray(noise(seed=seed)) for seed in (2, 3)]


def saved(image, kind, **settings):
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def turned(kind, **settings):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    return saved(COLOURS, kind, exif=exif, **settings)


def levels_in_tiff(values, *, bits=16, white_is_zero=False, mode="I;16"):
    """Write an uncompressed TIFF of gray, whose tags say what its values mean."""
    pixels = values.astype("<u2" if mode == "I;16" else ">u2").tobytes()
    if bits == 12:
        # Two values lie in three bytes
        pairs = values.reshape(-1, 2).astype(np.uint32)
        packed = (pairs[:, 0] << 12) | pairs[:, 1]
        pixels = packed.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:].tobytes()
    order = "<" if mode == "I;16" else ">"
    tags = {
        256: WIDTH,
        257: HEIGHT,
        BITS_PER_SAMPLE: bits,
        259: 1,  # not compressed
        PHOTOMETRIC: 0 if white_is_zero else 1,
        273: 8,  # where the pixels begin
        277: 1,  # sample per pixel
        278: HEIGHT,  # rows in the one strip
        279: len(pixels),
    }
    short = np.dtype(f"{order}u2")
    long = np.dtype(f"{order}u4")

    def word(value, kind):
        return np.array(value, kind).tobytes()

    directory = word(len(tags), short)
    for tag, value in tags.items():
        directory += word([tag, 4], short) + word([1, value], long)
    start = b"II" if order == "<" else b"MM"
    head = start + word(42, short) + word(8 + len(pixels), long)
    return head + pixels + directory + word(0, long)


def text_head(kind, most):
    return f"{kind} {WIDTH} {HEIGHT} {most}\n".encode()


READ = {
    # What most data sets hold
    "RGB JPEG": saved(COLOURS, "JPEG", quality=90),
    "RGB JPEG without YCbCr": saved(COLOURS, "JPEG", keep_rgb=True),
    "progressive JPEG": saved(COLOURS, "JPEG", progressive=True),
    "gray JPEG": saved(GRAY, "JPEG"),
    "RGB PNG": saved(COLOURS, "PNG"),
    "gray PNG": saved(GRAY, "PNG"),
    "RGB WebP": saved(COLOURS, "WEBP"),
    "RGB BMP": saved(COLOURS, "BMP"),
    "RGB TIFF": saved(COLOURS, "TIFF"),
    "gray TIFF": saved(GRAY, "TIFF"),
    # More than 8 bits
    "16-bit gray PNG": saved(Image.fromarray(LEVELS), "PNG"),
    "16-bit gray TIFF": saved(Image.fromarray(LEVELS), "TIFF"),
    "16-bit gray TIFF, big-endian": levels_in_tiff(LEVELS, mode="I;16B"),
    "16-bit gray TIFF, LZW": saved(
        Image.fromarray(LEVELS), "TIFF", compression="tiff_lzw"
    ),
    "16-bit PGM": text_head("P5", 65535) + LEVELS.astype(">u2").tobytes(),
    "12-bit PGM": text_head("P5", 4095) + (LEVELS >> 4).astype(">u2").tobytes(),
    "16-bit PPM": text_head("P6", 65535)
    + (noise() * np.uint16(257)).astype(">u2").tobytes(),
    "PGM up to 100": text_head("P5", 100) + (noise(1) % 101).tobytes(),
    # Other colours
    "CMYK JPEG": saved(COLOURS.convert("CMYK"), "JPEG"),
    "CMYK TIFF": saved(COLOURS.convert("CMYK"), "TIFF"),
    "YCbCr TIFF": saved(COLOURS.convert("YCbCr"), "TIFF"),
    "LAB TIFF": saved(COLOURS.convert("LAB"), "TIFF"),
    # Alpha, palettes, one bit
    "RGBA PNG": saved(WITH_ALPHA, "PNG"),
    "RGBA TIFF": saved(WITH_ALPHA, "TIFF"),
    "RGBA WebP": saved(WITH_ALPHA, "WEBP", lossless=True),
    "LA PNG": saved(WITH_ALPHA.convert("LA"), "PNG"),
    "palette PNG": saved(COLOURS.convert("P"), "PNG"),
    "palette PNG, one colour transparent": saved(
        COLOURS.quantize(16), "PNG", transparency=3
    ),
    "palette PNG with alpha": saved(
        COLOURS.quantize(16), "PNG", transparency=bytes(range(0, 256, 16))
    ),
    "gray PNG, one level transparent": saved(GRAY, "PNG", transparency=7),
    "palette TIFF": saved(COLOURS.convert("P"), "TIFF"),
    "1-bit PNG": saved(COLOURS.convert("1"), "PNG"),
    "1-bit TIFF": saved(COLOURS.convert("1"), "TIFF"),
    # Several frames or pages
    "animated GIF": saved(COLOURS, "GIF", save_all=True, append_images=FRAMES),
    "animated GIF, transparent": saved(
        COLOURS.quantize(16),
        "GIF",
        save_all=True,
        append_images=[frame.quantize(16) for frame in FRAMES],
        transparency=2,
    ),
    "animated WebP": saved(
        COLOURS, "WEBP", save_all=True, append_images=FRAMES, lossless=True
    ),
    "animated PNG": saved(COLOURS, "PNG", save_all=True, append_images=FRAMES),
    "animated PNG with a still": saved(
        COLOURS, "PNG", save_all=True, append_images=FRAMES, default_image=True
    ),
    "TIFF of three pages": saved(COLOURS, "TIFF", save_all=True, append_images=FRAMES),
    "MPO, a phone's JPEG": saved(COLOURS, "MPO", save_all=True, append_images=FRAMES),
    # Turned by EXIF
    "turned JPEG": turned("JPEG"),
    "turned PNG": turned("PNG"),
    "turned WebP": turned("WEBP", lossless=True),
    "turned TIFF": turned("TIFF"),
}
REFUSED = {
    "32-bit integer TIFF": (saved(Image.fromarray(LEVELS.astype("i4")), "TIFF"), "I"),
    "float TIFF": (saved(Image.fromarray(noise(1) / np.float32(255)), "TIFF"), "F"),
    "float PFM": (
        text_head("Pf", -1.0) + (noise(1) / np.float32(255)).tobytes(),
        "F",
    ),
}


def by_pillow(data, *, upright):
    """Return the pixels by Pillow's own means, (H, W, 3)."""
    image = Image.open(io.BytesIO(data))
    if upright:
        image = ImageOps.exif_transpose(image)
    image.load()
    if image.mode.startswith("I"):
        # 16 bits: a division by 256 that is cut off
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(image.convert("RGB"))


def listed(file):
    return ImageList(file.parent, (file.name,), (0,), ("x",))


def of_probes(file, _size):
    """Read as probes, finetuning, `data check` and the reference views of pretraining do."""
    return np.asarray(listed(file).open(0))


def of_pretraining(file, _size):
    """Read as the fast views of pretraining do."""
    return listed(file).array(0)


def record_of(file, size):
    width, height = size
    return {
        "file_name": str(file),
        "image_id": 1,
        "width": width,
        "height": height,
        "annotations": [],
    }


def of_detection(file, size):
    """Read as the torchvision engine and the previews do, after the check before a training."""
    record = record_of(file, size)
    detection_images.check_file(record)
    return np.asarray(detection_images.load_image(record))


def of_detectron2(file, size):
    """Read as the Detectron2 engine does."""
    pytest.importorskip("detectron2")
    from backbench.detection.engine_detectron2 import PixelMapper

    record = record_of(file, size)
    detection_images.check_file(record)
    mapper = PixelMapper(is_train=False, augmentations=[], image_format="BGR")
    return mapper(record)["image"].permute(1, 2, 0).numpy()[..., ::-1]


READERS = {
    "probes and finetuning": of_probes,
    "pretraining": of_pretraining,
    "detection": of_detection,
    "detection by Detectron2": of_detectron2,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mode", READ)
@pytest.mark.filterwarnings("error")
def test_every_reader_sees_pillows_pixels(mode, reader, tmp_path):
    file = tmp_path / "image.png"  # the name decides nothing
    file.write_bytes(READ[mode])
    wanted = by_pillow(READ[mode], upright=reader.startswith("detection"))
    assert wanted.std() > 30, "the picture shows something"
    found = READERS[reader](file, wanted.shape[1::-1])
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mode", REFUSED)
def test_every_reader_refuses_values_of_unknown_range(mode, reader, tmp_path):
    data, letter = REFUSED[mode]
    file = tmp_path / "image.tif"
    file.write_bytes(data)
    with pytest.raises(BadInput) as caught:
        READERS[reader](file, (WIDTH, HEIGHT))
    said = str(caught.value)
    assert said.startswith(f"{file}: an image of mode {letter} (")
    assert said.endswith("scale it to 0..255 and save it as an 8-bit PNG")
    assert "\n" not in said


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_tiff_that_pillow_does_not_know(reader, tmp_path):
    file = tmp_path / "image.tif"
    file.write_bytes(levels_in_tiff(LEVELS, bits=17))
    with pytest.raises(BadInput, match=r"image\.tif: a TIFF .*save it as an 8-bit PNG"):
        READERS[reader](file, (WIDTH, HEIGHT))


@pytest.mark.parametrize("reader", READERS)
def test_a_tiff_says_what_its_gray_means(reader, tmp_path):
    """Pillow alone neither scales 12 bits nor inverts 16 bits whose 0 is white."""
    for name, data, wanted in (
        ("12", levels_in_tiff(LEVELS >> 4, bits=12), LEVELS >> 8),
        ("0 is white", levels_in_tiff(65535 - LEVELS, white_is_zero=True), LEVELS >> 8),
    ):
        file = tmp_path / f"{name}.tif"
        file.write_bytes(data)
        found = READERS[reader](file, (WIDTH, HEIGHT))
        np.testing.assert_array_equal(found, np.stack([wanted] * 3, axis=2))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_equal_pictures_of_8_and_16_bits_have_equal_features(kind, tmp_path):
    """Where 16 bits hold 257 times the 8, as everybody scales them."""
    made = []
    for bits in (8, 16):
        for number in range(4):
            pixels = noise(1, seed=number)
            if bits == 16:
                pixels = pixels.astype(np.uint16) * 257
            file = tmp_path / str(bits) / "ab"[number % 2] / f"{number}.{kind.lower()}"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
        images = scan_folder(tmp_path / str(bits))
        cache = FeatureCache(tmp_path / "cache", limit=2**30)
        (features,) = extractor(cache, checkpoint())(images)
        made.append(features)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "layout", ["tar", "deflated", "parquet of 2025", "arrow", "lmdb"]
)
def test_a_container_changes_no_pixel_and_no_refusal(layout, tmp_path):
    source = tmp_path / "own" / "train"
    chosen = {"a/1.png": READ["16-bit gray PNG"], "b/1.jpg": READ["CMYK JPEG"]}
    for name, data in {**chosen, "b/2.png": REFUSED["float TIFF"][0]}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    there = packed(tmp_path, "own", layout)
    images = catalog.open_split(there, "own", "train")
    assert len(images) == 3
    for index, data in enumerate(chosen.values()):
        wanted = by_pillow(data, upright=False)
        np.testing.assert_array_equal(np.asarray(images.open(index)), wanted)
        np.testing.assert_array_equal(images.array(index), wanted)
    for read in (images.open, images.array):
        with pytest.raises(BadInput, match=r"an image of mode F \(floats\)"):
            read(2)


def test_a_folder_of_floats_ends_a_command_in_one_line(tmp_path, capsys):
    for seed in range(12):
        split = "test" if seed % 3 == 0 else "train"
        file = tmp_path / "data/own" / split / "ab"[seed % 2] / f"{seed}.tif"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(1, seed) / np.float32(255)).save(file)
    assert main(["data", "check", "own", "--data", str(tmp_path / "data")]) == 1
    assert "unreadable" in capsys.readouterr().out
    trunk = trunk_file(tmp_path / "trunk.safetensors", 0)
    words = ["linear", str(trunk), "--protocol", "knn", "k=2", "--datasets", "own"]
    words += ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "runs")]
    assert main([*words, "--workers", "0"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "mode" in x]
    assert ".tif: an image of mode F (floats)" in line
    assert not list((tmp_path / "runs").rglob("results.jsonl"))
