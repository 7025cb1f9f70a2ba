"""What the loader is worth: each loader's pixels, its rows, and how their differences are told."""

import io
import json

import cv2
import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from support.records import a_result, rows_of

from backbench import Checkpoint
from backbench.cli.program import main
from backbench.images.loaders import LOADERS, geometry_by
from backbench.images.preprocess import eval_geometry
from backbench.records import loaders, predictions
from backbench.stats import paired_differences
from backbench.verify import verification

SHAPE = {"resize": 40, "crop": 32}


@pytest.fixture
def picture():
    """A picture with edges, larger than what is read of it."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(6, 0).repeat(6, 1))


def centre(pixels):
    """The middle 32 x 32 pixels of 40 x 60."""
    return pixels[4:36, 14:46]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_each_loader_is_the_librarys_own(picture, interpolation):
    size = (60, 40)
    mode = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}[interpolation]
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    by_tensor = tv.resize(
        image, [40, 60], interpolation=tv.InterpolationMode(interpolation)
    )
    expected = {
        "pil": np.asarray(
            picture.resize(size, Image.Resampling[interpolation.upper()])
        ),
        "opencv": cv2.resize(np.asarray(picture), size, interpolation=mode),
        "torch": by_tensor.permute(1, 2, 0).numpy(),
    }
    for quality in (95, 75):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality)
        again = Image.open(io.BytesIO(file.getvalue()))
        resized = again.resize(size, Image.Resampling[interpolation.upper()])
        expected[f"jpeg{quality}"] = np.asarray(resized)
    found = {}
    for loader in LOADERS:
        geometry = geometry_by(loader, interpolation=interpolation, **SHAPE)
        found[loader] = np.asarray(geometry(picture))
        np.testing.assert_array_equal(found[loader], centre(expected[loader]))
    usual = eval_geometry(interpolation=interpolation, **SHAPE)(picture)
    np.testing.assert_array_equal(found["pil"], np.asarray(usual))
    # OpenCV's has no antialiasing, torch's is nearly Pillow's
    gaps = {
        loader: np.abs(pixels.astype(int) - found["pil"]).mean()
        for loader, pixels in found.items()
    }
    assert gaps["opencv"] > 5 > gaps["torch"]
    assert gaps["jpeg75"] > gaps["jpeg95"] > 0


def command(root, trunk, out, recipe, **keys):
    file = out.with_suffix(".yaml")
    about = {"kind": recipe, "protocol": f"{recipe}-x-v1", "geometry": SHAPE, **keys}
    file.write_text(json.dumps(about))
    line = ["linear", str(trunk), "--datasets", "classes", "--data", str(root)]
    line += ["--workers", "0"]
    return [*line, "--out", str(out), "--protocol", str(file), "--accelerator", "cpu"]


def test_each_loader_is_a_row_and_the_usual_one_is_that_of_knn(
    trees, trunk, tmp_path, capsys
):
    root = trees("classes", sizes=(("train", 8), ("val", 4), ("test", 6)))
    out = tmp_path / "run"
    assert main(command(root, trunk, out, "loaders", k=5)) == 0
    said = capsys.readouterr().out
    assert "5 loaders spread over" in said
    rows = rows_of(out)
    assert [r.metric for r in rows] == [f"top1_{loader}" for loader in LOADERS]
    told = {(r.provenance["k"], r.provenance["bank"]) for r in rows}
    assert told == {(5, "train+val")}
    verdicts = verification.of_run(rows, out)
    assert {v.level for v in verdicts} == {verification.FROM_LIST}
    assert main(command(root, trunk, tmp_path / "knn", "knn", k=[5])) == 0
    (usual,) = rows_of(tmp_path / "knn")
    assert (rows[0].value, rows[0].ci95) == (usual.value, usual.ci95)
    # The features of each loader are others
    cached = list((tmp_path / "cache").rglob("*.npy")) or None
    assert cached is None or len(cached) >= len(LOADERS)


@torch.no_grad()
def test_the_row_of_jpeg_is_scikit_learns_on_pictures_written_again(
    trees, trunk, tmp_path
):
    """From the files to the percentage, by Pillow, the trunk itself and scikit-learn."""
    root = trees("classes", sizes=(("train", 24), ("val", 12), ("test", 20)))
    rng = np.random.default_rng(1)
    for file in sorted(root.rglob("*.png")):
        # Noise, a little brighter in one class: some answers are wrong, and JPEG changes some
        brighter = 12 * (file.parent.name == "circle")
        pixels = rng.integers(0, 200, (60, 60, 3)) + rng.integers(0, 40) + brighter
        Image.fromarray(pixels.astype(np.uint8)).save(file)
    network = Checkpoint.load(trunk).backbone().eval()
    mean = np.array([0.485, 0.456, 0.406])
    std = np.array([0.229, 0.224, 0.225])

    def features(*splits):
        inputs = []
        labels = []
        for split in splits:
            for file in sorted((root / "classes" / split).rglob("*.png")):
                again = io.BytesIO()
                Image.open(file).convert("RGB").save(again, "JPEG", quality=75)
                resized = Image.open(again).resize((40, 40), Image.Resampling.BILINEAR)
                pixels = np.asarray(resized.crop((4, 4, 36, 36))) / 255
                inputs.append(((pixels - mean) / std).transpose(2, 0, 1))
                labels.append(file.parent.name)
        return network(torch.tensor(np.stack(inputs)).float()).numpy(), labels

    def weight(distance):
        return np.exp((1 - distance) / 0.07)

    nearest = KNeighborsClassifier(5, weights=weight, metric="cosine")
    nearest.fit(*features("train", "val"))
    expected = 100 * nearest.score(*features("test"))
    out = tmp_path / "run"
    keys = {"loaders": ["pil", "jpeg75"], "k": 5}
    assert main(command(root, trunk, out, "loaders", **keys)) == 0
    usual, again = rows_of(out)
    assert again.metric == "top1_jpeg75"
    assert round(again.value, 2) == round(expected, 2)
    assert round(usual.value, 2) != round(expected, 2)


def test_loaders_that_say_nothing_are_refused(trees, trunk, tmp_path, bad_input):
    root = trees("classes")
    for number, (keys, said) in enumerate(
        (
            ({"loaders": ["opencv", "torch"]}, "loaders are compared with pil; add it"),
            (
                {"loaders": ["pil", "torch", "torch"]},
                "loaders name one twice: pil, torch",
            ),
            ({"k": 500}, "k = 500 neighbours of "),
        )
    ):
        out = tmp_path / f"run{number}"
        status = main(command(root, trunk, out, "loaders", **keys))
        bad_input(status, said)
        assert not out.exists()


def test_differences_and_the_spread_are_told(tmp_path):
    label = np.arange(400) % 4
    rows = []
    for loader, share in (("pil", 0.6), ("opencv", 0.5), ("jpeg75", 0.65)):
        right = np.arange(400) < round(share * 400)
        kept = predictions.keep(
            tmp_path,
            f"x-{loader}",
            manifest="m",
            label=label,
            prediction=np.where(right, label, label + 1),
        )
        row = a_result(
            name="vit",
            task="loaders",
            dataset="mine",
            metric=f"top1_{loader}",
            value=100 * share,
            ci95=(100 * share - 5, 100 * share + 5),
            provenance={"predictions": kept},
        )
        rows.append((row, tmp_path))
    told, opencv, jpeg = loaders.sayings(rows)
    assert told == (
        "loaders of mine: vit has 60.00% [55.00, 65.00] by pil; 3 loaders spread over"
        " 15.00 points"
    )
    step = np.repeat([0.0, -1.0, 0.0], [200, 40, 160])
    low, high = paired_differences.of_images(step).ci95
    assert opencv.split(maxsplit=1) == ["opencv", f"-10.00 [{low:.2f}, {high:.2f}]"]
    assert jpeg.startswith("  jpeg75  +5.00 [")
    # Without the usual loader nothing is compared
    assert loaders.sayings(rows[1:]) == []
