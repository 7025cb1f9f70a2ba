"""Both pipelines make one view: crops exactly, colours up to rounding, hue in distribution."""

import functools
from collections import Counter
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torchvision.transforms import ColorJitter, RandomResizedCrop, v2
from torchvision.transforms import functional as F

from backbench.images.augmentations import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    Crops,
    DeviceColour,
    apply_colour,
    colour_matrix,
    crop_box,
    draw,
    render_fast,
    render_geometry,
    render_reference,
)
from backbench.images.preprocess import eval_geometry

PLAIN = Crops(jitter_p=0, gray_p=0, blur_p=0)


@functools.cache
def photos():
    """Twelve of them; a process that only lists the tests draws none."""
    return [photo(seed) for seed in range(12)]


def photo(seed, height=180, width=240):
    """Smooth coloured noise with the spectrum of a photograph, more or less."""
    rng = np.random.default_rng(seed)
    image = np.zeros((height, width, 3))
    for sigma in (2, 8, 30):
        layer = cv2.GaussianBlur(rng.normal(size=image.shape), (0, 0), sigma)
        image += layer / layer.std()
    image = image / image.std() * 45 + rng.uniform(70, 180, 3)
    return image.clip(0, 255).astype(np.uint8)


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scale", [(0.2, 1.0), (0.05, 0.14), (0.9, 1.0)])
def test_crop_boxes_are_torchvisions_number_for_number(scale):
    for seed in range(120):
        height, width = [(375, 500), (32, 32), (60, 900), (900, 60)][seed % 4]
        torch.manual_seed(seed)
        image = torch.empty(3, height, width)
        want = RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3])
        box = crop_box(generator(seed), height, width, scale, (3 / 4, 4 / 3))
        assert box == tuple(want)


def test_decisions_have_the_recipes_probabilities_and_ranges():
    shares = {
        "flip": 0.5,
        "jitter_p": 0.8,
        "gray_p": 0.2,
        "blur_p": 0.1,
        "solarize_p": 0.2,
    }
    crops = Crops(jitter=(0.4, 0.3, 0.2, 0.1), **shares)
    views = [draw(generator(seed), 100, 100, crops) for seed in range(4000)]
    for name, p in shares.items():
        decided = [bool(getattr(view, name.removesuffix("_p"))) for view in views]
        assert np.mean(decided) == pytest.approx(p, abs=0.03), name
    jittered = [v.jitter for v in views if v.jitter]
    orders = Counter(tuple(op for op, _ in jitter) for jitter in jittered)
    assert len(orders) == 24
    assert max(orders.values()) < 2 * min(orders.values())
    factors = np.array([[dict(jitter)[op] for op in range(4)] for jitter in jittered])
    for op, strength in enumerate(crops.jitter):
        centre = 0 if op == HUE else 1
        assert np.abs(factors[:, op] - centre).max() <= strength
        assert np.abs(factors[:, op].mean() - centre) < strength / 20
        assert factors[:, op].std() == pytest.approx(strength / 3**0.5, rel=0.05)
    sigmas = np.array([v.blur for v in views if v.blur])
    assert 0.1 <= sigmas.min() < 0.25
    assert 1.85 < sigmas.max() <= 2.0


def test_a_view_is_a_function_of_the_generator_alone():
    one = [draw(generator(7), 90, 120, Crops()) for _ in range(2)]
    assert one[0] == one[1] != draw(generator(8), 90, 120, Crops())


@pytest.mark.parametrize(
    ("interpolation", "kernel", "gray_first"),
    [
        ("bilinear", None, False),
        ("bilinear", None, True),
        ("bilinear", 9, False),
        ("bicubic", None, False),
        ("bicubic", 9, False),
    ],
)
def test_reference_views_are_torchvisions_functions_bit_for_bit(
    interpolation, kernel, gray_first
):
    crops = Crops(
        size=48,
        interpolation=interpolation,
        jitter=(0.4, 0.4, 0.4, 0.5),
        jitter_p=0.8,
        gray_p=0.2,
        gray_first=gray_first,
        blur_p=0.5,
        blur_kernel=kernel,
        solarize_p=0.3,
    )
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    for seed in range(60):
        image = Image.fromarray(photos()[seed % len(photos())])
        view = draw(generator(seed), image.height, image.width, crops)
        want = F.resized_crop(
            image, *view.box, [48, 48], F.InterpolationMode(interpolation)
        )
        if view.flip:
            want = F.hflip(want)
        if view.gray and gray_first:
            want = F.rgb_to_grayscale(want, num_output_channels=3)
        for op, factor in view.jitter:
            want = adjust[op](want, factor)
        if view.gray and not gray_first:
            want = F.rgb_to_grayscale(want, num_output_channels=3)
        if view.blur and kernel:
            want = F.gaussian_blur(want, [kernel] * 2, [view.blur] * 2)
        elif view.blur:
            want = want.filter(ImageFilter.GaussianBlur(view.blur))
        if view.solarize:
            want = F.solarize(want, 128)
        have = render_reference(image, view, crops)
        assert np.array_equal(have, np.asarray(want)), view


@pytest.mark.parametrize(
    "how",
    [
        {"resize": 256, "crop": 224},
        {"resize": 31, "crop": 40},
        {"resize": 30, "crop": 41},
        {"resize": 65, "crop": 64, "interpolation": "bicubic"},
        {"resize": 48, "crop": 48, "square": True},
    ],
)
def test_the_evaluations_view_is_torchvisions_bit_for_bit(how):
    """Sides that are odd, even, tiny, and smaller than the crop, which is then framed in black."""
    size = [how["resize"]]  # of the shorter side
    if how.get("square"):
        size = [how["resize"], how["resize"]]
    mode = F.InterpolationMode(how.get("interpolation", "bilinear"))
    theirs = v2.Compose(
        [v2.Resize(size, interpolation=mode), v2.CenterCrop(how["crop"])]
    )
    ours = eval_geometry(**how)
    rng = np.random.default_rng(0)
    sizes = [
        (1, 7),
        (7, 1),
        (224, 224),
        (256, 257),
        (257, 256),
        (500, 375),
        (31, 32),
        (33, 32),
    ]
    for height, width in sizes + rng.integers(1, 300, (30, 2)).tolist():
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        have = np.asarray(ours(image))
        assert np.array_equal(have, np.asarray(theirs(image))), (height, width)


def difference(crops, count=24):
    """Mean absolute and mean signed difference of the pipelines in grey levels, decided alike."""
    absolute = []
    signed = []
    for seed in range(count):
        image = photos()[seed % len(photos())]
        view = draw(generator(seed), *image.shape[:2], crops)
        want = render_reference(Image.fromarray(image), view, crops).astype(float)
        have = render_fast(image, view, crops).astype(float)
        assert have.shape == want.shape == (crops.size, crops.size, 3)
        absolute.append(np.abs(have - want).mean())
        signed.append((have - want).mean())
    return np.mean(absolute), np.mean(signed)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        pytest.param({"size": 224}, 0.3, id="crop and resize, growing"),
        pytest.param({"size": 64}, 0.1, id="crop and resize, shrinking"),
        pytest.param({"interpolation": "bicubic"}, 0.1, id="bicubic"),
        pytest.param({"jitter": (0.4, 0, 0, 0), "jitter_p": 1}, 0.25, id="brightness"),
        pytest.param({"jitter": (0, 0.4, 0, 0), "jitter_p": 1}, 0.4, id="contrast"),
        pytest.param({"jitter": (0, 0, 0.4, 0), "jitter_p": 1}, 0.4, id="saturation"),
        pytest.param({"gray_p": 1}, 0.25, id="gray"),
        pytest.param(
            {"gray_p": 1, "gray_first": True, "jitter": (0, 0, 0, 0.4), "jitter_p": 1},
            0.25,
            id="gray before the hue, which then moves nothing",
        ),
        pytest.param({"blur_p": 1}, 0.6, id="PIL's blur"),
        pytest.param({"blur_p": 1, "blur_kernel": 9}, 0.25, id="torchvision's blur"),
        pytest.param({"solarize_p": 1}, 0.3, id="solarize"),
    ],
)
def test_fast_views_are_the_reference_views(changes, level):
    absolute, signed = difference(replace(PLAIN, **{"size": 96, **changes}))
    assert absolute < level
    assert abs(signed) < 0.2


def colour_statistics(images):
    """Per view: mean and deviation of luma, mean saturation (max - min), means of channels."""
    rows = []
    for image in images:
        x = image.astype(float).reshape(-1, 3)
        luma = x @ [0.299, 0.587, 0.114]
        rows.append([luma.mean(), luma.std(), np.ptp(x, axis=1).mean(), *x.mean(0)])
    return np.array(rows)


@pytest.mark.parametrize(
    "strength", [(0.4, 0.4, 0.4, 0.1), (0.8, 0.8, 0.8, 0.2)], ids=["MoCo v2", "SwAV"]
)
def test_colour_jitter_is_torchvisions_in_distribution(strength):
    crops = replace(PLAIN, size=48, jitter=strength, jitter_p=1, flip=0)
    repeats = 42
    # 1. Small pictures, without a change of colours
    small = []
    for n, image in enumerate(photos()):
        view = draw(generator(n), *image.shape[:2], crops)
        small.append(render_geometry(image, view, crops))
    # 2. torchvision's jitter of them
    jitter = ColorJitter(*strength)
    torch.manual_seed(0)
    theirs = []
    for image in small:
        for _ in range(repeats):
            theirs.append(np.asarray(jitter(Image.fromarray(image))))
    want = colour_statistics(theirs)
    # 3. Ours
    whole = replace(crops, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    ours = []
    for n, image in enumerate(small):
        for r in range(repeats):
            view = draw(generator(1000 * n + r), 48, 48, whole)
            ours.append(render_fast(image, view, whole))
    have = colour_statistics(ours)
    # 4. Equal up to three standard errors and 5%
    error = 3 * (want.var(0) + have.var(0)) ** 0.5 / len(want) ** 0.5
    apart = np.abs(want.mean(0) - have.mean(0))
    assert (apart < error + np.maximum(2.0, 0.05 * want.mean(0))).all()
    assert np.allclose(want.std(0), have.std(0), rtol=0.12)


def test_the_hue_keeps_the_lightness_and_moves_the_colours():
    crops = replace(PLAIN, size=48, jitter=(0, 0, 0, 0.5), jitter_p=1)
    image = np.zeros((48, 48, 3), np.uint8)
    image[..., 0] = 200
    views = [draw(generator(seed), 48, 48, crops) for seed in range(300)]
    means = np.array([render_fast(image, view, crops).mean((0, 1)) for view in views])
    assert means.argmax(1).tolist().count(0) < 150  # red does not stay red
    assert set(means.argmax(1)) == {0, 1, 2}
    gray = np.full((48, 48, 3), 77, np.uint8)
    assert (render_fast(gray, draw(generator(1), 48, 48, crops), crops) == 77).all()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"blur_kernel": 9},
        {"jitter_p": 0, "gray_p": 0, "blur_p": 0, "solarize_p": 0.5},
    ],
)
def test_views_are_finished_on_the_device(changes):
    crops = Crops(size=64, **changes)
    pixels = np.empty((12, 64, 64, 3), np.uint8)
    want = np.empty_like(pixels)
    views = []
    for n, image in enumerate(photos()):
        view = draw(generator(n), *image.shape[:2], crops)
        views.append(view)
        pixels[n] = render_geometry(image, view, crops)
        want[n] = render_fast(image, view, crops)
    colour = DeviceColour.of(views, pixels)
    assert 3 <= sum(view.blur > 0 or view.solarize for view in views) < 12
    have = apply_colour(torch.from_numpy(pixels).permute(0, 3, 1, 2), colour, crops)
    off = np.abs(have.permute(0, 2, 3, 1).numpy() - want)
    assert off.mean() < 0.5
    assert off.max() < 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "at least 1"),
        ({"size": 1_000_000}, "at most 4096"),
        ({"count": 1_000_000}, "at most 10000"),
        ({"scale": (0.5, 0.2)}, "increasing"),
        ({"blur_kernel": 4}, "odd"),
        ({"size": 16, "blur_kernel": 33}, "from 1 to 31"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, "hue"),
        ({"jitter": (-0.4, 0.4, 0.4, 0.1)}, "negative"),
        ({"flip": 1.5}, "flip is a probability"),
        ({"blur_p": -0.1}, "blur_p is a probability"),
        ({"blur_sigma": (2.0, 0.1)}, "increasing"),
    ],
)
def test_impossible_crops_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Crops(**change)


@pytest.mark.parametrize(
    "limits",
    [
        {"count": 1, "size": 1},
        {"count": 10_000, "size": 4096},
        {"size": 16, "blur_kernel": 31},
        {"size": 16, "blur_kernel": 1},
        {"flip": 0, "jitter_p": 1, "gray_p": 0, "blur_p": 1, "solarize_p": 1},
        {"scale": (0.5, 0.5), "ratio": (1.0, 1.0)},
        {"jitter": (0, 0, 0, 0.5)},
        {"blur_sigma": (0.0, 0.0)},
    ],
)
def test_crops_at_their_limits_are_made(limits):
    crops = Crops(**limits)
    assert {name: getattr(crops, name) for name in limits} == limits


@pytest.mark.parametrize(
    "beyond",
    [
        {"count": 0},
        {"count": 10_001},
        {"size": 4097},
        {"size": 16, "blur_kernel": 0},
        {"size": 16, "blur_kernel": -1},
        {"solarize_p": 1.01},
        {"jitter_p": 1.01},
        {"gray_p": -0.01},
        {"scale": (0.0, 1.0)},
        {"ratio": (0.0, 1.0)},
        {"ratio": (1.5, 1.2)},
        {"jitter": (0.4, 0.4, 0.4, 0.51)},
        {"blur_sigma": (-0.1, 2.0)},
    ],
)
def test_crops_just_beyond_their_limits_are_refused(beyond):
    with pytest.raises(ValueError, match=r"must be|at most|is a probability"):
        Crops(**beyond)


def test_what_has_no_strength_is_not_drawn():
    crops = Crops(jitter=(0, 0.4, 0, 0.1), jitter_p=1)
    for seed in range(20):
        view = draw(generator(seed), 50, 60, crops)
        assert {op for op, _ in view.jitter} == {1, HUE}


def test_a_factor_is_never_negative():
    crops = Crops(jitter=(3.0, 0, 0, 0), jitter_p=1)
    factors = [draw(generator(n), 50, 60, crops).jitter[0][1] for n in range(200)]
    assert 0 <= min(factors) < 0.1
    assert 3.9 < max(factors) <= 4


def test_the_next_view_does_not_depend_on_what_this_one_decided():
    every = Crops(jitter_p=1, gray_p=1, blur_p=1, solarize_p=1, flip=1)
    following = []
    for crops in (PLAIN, every, replace(every, jitter=(0, 0, 0, 0))):
        one = generator(5)
        draw(one, 90, 120, crops)
        following.append(draw(one, 90, 120, every))
    assert following[0] == following[1] == following[2]


def test_a_third_of_a_turn_moves_the_primary_colours():
    view = draw(generator(0), 48, 48, PLAIN)
    matrix = colour_matrix(replace(view, jitter=((HUE, 1 / 3),)), (10.0, 20.0, 30.0))
    red, green, blue = np.eye(3)
    np.testing.assert_allclose(matrix[:, :3] @ red, green, atol=1e-12)
    np.testing.assert_allclose(matrix[:, :3] @ green, blue, atol=1e-12)
    np.testing.assert_allclose(matrix[:, 3], 0, atol=1e-12)


def test_operations_are_applied_one_to_the_others_result():
    """Contrast 3 around the luma that brightness 2 has left; then saturation 0, which is luma."""
    view = draw(generator(0), 48, 48, PLAIN)
    mean = np.array([10.0, 20.0, 60.0])
    pixel = np.array([30.0, 50.0, 20.0])
    steps = ((BRIGHTNESS, 2.0), (CONTRAST, 3.0), (SATURATION, 0.0))
    matrix = colour_matrix(replace(view, jitter=steps), mean)
    luma = np.array([0.299, 0.587, 0.114])
    bright = 2 * pixel - 0.5
    contrast = 3 * bright - 2 * (luma @ (2 * mean - 0.5)) - 0.5
    wanted = luma @ contrast - 0.5
    np.testing.assert_allclose(matrix[:, :3] @ pixel + matrix[:, 3], [wanted] * 3)
