"""Images per second and core: decoding a 500 x 375 JPEG and making training views of it.

MoCo v2's one 224 px crop, its two, and multi-crop (3 x 224, 5 x 96) as SwAV's and LORAC's loaders
make it: the baseline decodes with PIL, once for every crop, and augments with torchvision.
`reference` is what the papers' recipes run, `fast` what `--fast` runs. Last comes `data check`.
"""

import contextlib
import io
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from machine import least, print_ratios
from PIL import Image, ImageFilter
from torchvision import transforms as T

from backbench.cli import data as list_data
from backbench.datasets import catalog
from backbench.images.augmentations import (
    draw,
    render_fast,
    render_geometry,
    render_reference,
)
from backbench.images.crops import Crops
from backbench.images.decoding import decode_array
from backbench.images.preprocess import IMAGENET_MEAN, IMAGENET_STD, Pixels, normalise
from backbench.pretrain.recipe import ViewsConfig

PIXELS = Pixels()
MOCO = (Crops(count=1),)
TWO = (Crops(count=2),)
STRONG = {"jitter": (0.8, 0.8, 0.8, 0.2)}
MULTI = (
    Crops(count=3, scale=(0.14, 1.0), **STRONG),
    Crops(count=5, size=96, scale=(0.05, 0.14), **STRONG),
)


def torchvision_pipeline(crops: Crops) -> T.Compose:
    def blur(image: Image.Image) -> Image.Image:
        # MoCo's and SwAV's: PIL's, with a random sigma
        return image.filter(ImageFilter.GaussianBlur(random.uniform(*crops.blur_sigma)))

    return T.Compose(
        [
            T.RandomResizedCrop(crops.size, scale=crops.scale),
            T.RandomApply([T.ColorJitter(*crops.jitter)], p=crops.jitter_p),
            T.RandomGrayscale(p=crops.gray_p),
            T.RandomApply([T.Lambda(blur)], p=crops.blur_p),
            T.RandomHorizontalFlip(crops.flip),
            T.ToTensor(),
            T.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )


def photographs(count: int) -> list[bytes]:
    """JPEGs of 500 x 375 with a photograph's spectrum, quality 92."""
    out = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        image = np.zeros((375, 500, 3))
        for sigma in (1, 3, 15, 60):
            layer = cv2.GaussianBlur(rng.normal(size=image.shape), (0, 0), sigma)
            image += layer / layer.std()
        pixels = (
            (image / image.std() * 45 + rng.uniform(70, 180, 3))
            .clip(0, 255)
            .astype(np.uint8)
        )
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
        out.append(buffer.getvalue())
    return out


def write_photographs(folder: Path, count: int, distinct: int) -> None:
    """FOLDER/0 and FOLDER/1: `count` such JPEGs in two classes, of which so many are distinct."""
    jpegs = photographs(distinct)
    for i in range(count):
        file = folder / f"{i % 2}" / f"{i:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(jpegs[i % distinct])


def naive(data: bytes, seed: int, pipelines: list[T.Compose]) -> list[torch.Tensor]:
    return [
        pipeline(Image.open(io.BytesIO(data)).convert("RGB")) for pipeline in pipelines
    ]


def reference(data: bytes, seed: int, crops: list[Crops]) -> list[torch.Tensor]:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    generator = torch.Generator().manual_seed(seed)
    out = []
    for group in crops:
        view = draw(generator, image.height, image.width, group)
        pixels = torch.from_numpy(render_reference(image, view, group).copy())
        out.append(normalise(pixels[None].permute(0, 3, 1, 2), PIXELS))
    return out


def ours(
    data: bytes, seed: int, crops: list[Crops], *, geometry_only: bool
) -> list[torch.Tensor]:
    image = decode_array(data, "benchmark")
    generator = torch.Generator().manual_seed(seed)
    out = []
    for group in crops:
        view = draw(generator, image.shape[0], image.shape[1], group)
        if geometry_only:
            out.append(torch.from_numpy(render_geometry(image, view, group).copy()))
        else:
            pixels = torch.from_numpy(render_fast(image, view, group))[None].permute(
                0, 3, 1, 2
            )
            out.append(normalise(pixels, PIXELS))
    return out


Way = Callable[[bytes, int], object]  # a JPEG and a seed


def ways(groups: tuple[Crops, ...]) -> dict[str, Way]:
    """The ways to make all views of one image."""
    crops = list(ViewsConfig(crops=groups).per_view)
    pipelines = [torchvision_pipeline(c) for c in crops]
    return {
        "PIL, torchvision": partial(naive, pipelines=pipelines),
        "reference": partial(reference, crops=crops),
        "fast": partial(ours, crops=crops, geometry_only=False),
        "fast, GPU's colour": partial(ours, crops=crops, geometry_only=True),
        "limit: decoding alone": lambda data, seed: decode_array(data, "benchmark"),
    }


def measure(ways: dict[str, Way], jpegs: list[bytes], rounds: int) -> dict[str, float]:
    """The least seconds of each way for all images; a round has seeds of its own."""

    def all_images(work: Way, turns: Iterator[int]) -> None:
        turn = next(turns)
        for n, data in enumerate(jpegs):
            work(data, 1000 * turn + n)

    timed = {
        name: partial(all_images, work, itertools.count())
        for name, work in ways.items()
    }
    return least(timed, rounds)


def run(quick: bool) -> None:
    jpegs = photographs(4 if quick else 24)
    of_papers = {
        "one crop": MOCO,
        "two crops of MoCo v2": TWO,
        "3 x 224 + 5 x 96 (LORAC)": MULTI,
    }
    for name, groups in of_papers.items():
        print_ratios(name, measure(ways(groups), jpegs, 2 if quick else 7), len(jpegs))
    data_check(8 if quick else 48)


def data_check(count: int) -> None:
    """Times `data check` on unlike photographs, against decoding these in as many threads."""

    def decode() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(
                    lambda file: Image.open(file).convert("RGB").getpixel((0, 0)), files
                )
            )

    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder, "mine"), count, count)
        files = list(Path(folder).rglob("*.jpg"))
        found = catalog.load("mine", Path(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            check = partial(list_data._content_problems, "mine", found, {})
            taken = least({"decoding": decode, "ours": check}, 7)
    limit = {"limit, 1.3 times PIL's decoding": 1.3 * taken["decoding"]}
    print_ratios("data check", limit | {"ours": taken["ours"]}, count)
