"""Tests that damaged annotation files and images are refused in one line before the training, in both
engines."""

import copy
import json
import shutil

import numpy as np
import pytest
from PIL import Image
from support.detection_runs import ENGINES, built, run_of_config

from backbench.detection import evaluate, lint, train_net
from backbench.detection.data import images, reading
from backbench.detection.data.split import training_records
from backbench.detection.task_rows import FASTER_RCNN
from backbench.errors import BadInput
from backbench.images.decoding import EXIF_ORIENTATION

pytestmark = pytest.mark.usefixtures("one_trunk")

NAN = float("nan")


# Ways to damage the content of an annotation file


def first(part, **values):
    """Change the first row of a list."""
    return lambda content: content[part][0].update(values)


def without(part, key):
    """Take a key from the first row of a list."""
    return lambda content: content[part][0].pop(key)


def without_keys(part, *keys):
    """Take several keys from the first row of a list."""

    def change(content):
        for key in keys:
            content[part][0].pop(key)

    return change


def replaced(key, value):
    """Replace a list."""
    return lambda content: content.update({key: value})


def again(part):
    """Repeat the first row of a list."""
    return lambda content: content[part].append(content[part][0])


def points(*values):
    """Replace the keypoints of the first object."""
    return first("annotations", keypoints=list(values))


def crowd(size, counts):
    """Turn the first object into a crowd with this mask."""
    return first(
        "annotations", iscrowd=1, segmentation={"size": size, "counts": counts}
    )


def category_ids_of_text(content):
    for row in content["categories"]:
        row["id"] = str(row["id"])


# Task -> name of a case -> what is done to its training file, and a part of what is said
BAD = {
    "faster": {
        "images_not_a_list": (replaced("images", {}), "no 'images' list"),
        "no_annotations": (lambda d: d.pop("annotations"), "no 'annotations' list"),
        "image_is_text": (lambda d: d["images"].insert(0, "x"), "not a row"),
        "image_id_fraction": (
            first("images", id=1.5),
            "neither a whole number nor a text",
        ),
        "image_ids_mixed": (first("images", id="one"), "some are texts, some numbers"),
        "image_id_twice": (again("images"), "appears twice"),
        "file_name_number": (first("images", file_name=3), "file_name 3"),
        "file_of_val": (
            first("images", file_name="../val2017/000000000001.jpg"),
            "is outside of",
        ),
        "file_missing": (
            first("images", file_name="none.jpg"),
            "are missing, first none.jpg",
        ),
        "no_height": (
            without("images", "height"),
            "has no 'height'; each row there needs id, file_name, height and width",
        ),
        "height_negative": (first("images", height=-128), "height -128"),
        "height_0": (first("images", height=0), "height 0"),
        "width_text": (first("images", width="128"), "width '128'"),
        "width_endless": (first("images", width=1e400), "width inf"),
        "size_of_another": (first("images", height=64), "annotations say"),
        "category_id_text": (
            category_ids_of_text,
            "id '1': Input should be a valid integer",
        ),
        "categories_empty": (replaced("categories", []), "'categories' is empty"),
        "category_of_another_name": (
            first("categories", name="zero"),
            "are not those of .* 1 '",
        ),
        "category_name_twice": (
            first("categories", name="1"),
            "two categories have the name '1'",
        ),
        "annotation_id_twice": (again("annotations"), "its id appears twice"),
        "image_of_none": (first("annotations", image_id=999), "image 999 is not in"),
        "category_of_none": (
            first("annotations", category_id=77),
            "category 77 is not among",
        ),
        "image_id_list": (first("annotations", image_id=[1]), r"image_id \[1\]"),
        "no_box": (
            without_keys("annotations", "bbox", "segmentation"),
            "'annotations' number 1 has no 'bbox'",
        ),
        "no_image_id": (without("annotations", "image_id"), "has no 'image_id'"),
        "box_of_texts": (first("annotations", bbox=["1", "2", "3", "4"]), "bbox '1'"),
        "box_of_three": (first("annotations", bbox=[1, 2, 3]), "bbox"),
        "box_nan": (first("annotations", bbox=[1, 2, NAN, 3]), "bbox"),
        "box_of_lists": (first("annotations", bbox=[[1], [2], [3], [4]]), "bbox"),
        "box_of_negative_height": (
            first("annotations", bbox=[9, 9, 5, -5]),
            "negative",
        ),
        "crowd_text": (first("annotations", iscrowd="yes"), "iscrowd 'yes'"),
        "area_text": (first("annotations", area="9"), "area '9'"),
        "area_nan": (first("annotations", area=NAN), "area nan"),
    },
    "mask": {
        "no_outline": (without("annotations", "segmentation"), "no 'segmentation'"),
        "outline_of_numbers": (
            first("annotations", segmentation=[1, 2, 3]),
            r"segmentation 1: .*; an outline is a list of polygons, \[\[x, y",
        ),
        "outline_nan": (
            first("annotations", segmentation=[[1, 2, 3, 4, 5, NAN]]),
            "segmentation",
        ),
        "crowd_of_another_size": (crowd([3, 3], [9]), "is not the image's"),
        "crowd_too_short": (crowd([128, 128], [9]), "do not fill"),
        "crowd_garbage": (crowd([128, 128], "~~é"), "do not fill"),
    },
    "keypoint": {
        "keypoints_short": (points(1, 2, 2), "3 keypoint values instead of 15"),
        "keypoints_nan": (points(*[NAN] * 15), "keypoints"),
        "marked_text": (first("annotations", num_keypoints="5"), "num_keypoints '5'"),
        "two_of_one_name": (
            first("categories", keypoints=["a", "a", "b", "c", "d"]),
            "one name",
        ),
    },
}
CASES = [(task, name) for task, cases in BAD.items() for name in cases]


@pytest.fixture(scope="module")
def scenes(tiny_root, tmp_path_factory):
    """Make a private copy; return it, and its training files with their contents."""
    root = tmp_path_factory.mktemp("data")
    shutil.copytree(tiny_root / "scenes", root / "scenes")
    contents = {}
    for kind in ("instances", "person_keypoints"):
        file = root / "scenes" / "annotations" / f"{kind}_train2017.json"
        contents[kind] = (file, json.loads(file.read_text()))
    return root, contents


def checked(root, tmp_path, task, engine):
    """Do everything that a run does before its folder is made, but for the network."""
    run = run_of_config(
        f"tiny_{task}_rcnn_R_18_FPN", root, tmp_path / "run", engine=engine
    )
    lint.files(train_net.prepare(run))


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.mark.parametrize(("task", "name"), CASES)
def test_refused_before_training(scenes, tmp_path, engine, task, name):
    root, contents = scenes
    change, words = BAD[task][name]
    kind = "person_keypoints" if task == "keypoint" else "instances"
    file, content = contents[kind]
    damaged = copy.deepcopy(content)
    change(damaged)
    file.write_text(json.dumps(damaged))
    try:
        with pytest.raises(BadInput, match=words) as refused:
            checked(root, tmp_path, task, engine)
    finally:
        file.write_text(json.dumps(content))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("what", ["cut off", "empty", "no image", "gone"])
def test_images_are_looked_at_before_training(tiny_root, tmp_path, engine, what):
    shutil.copytree(tiny_root / "scenes", tmp_path / "scenes")
    image = tmp_path / "scenes" / "val2017" / "000000000002.jpg"
    match what:
        case "cut off":
            data = image.read_bytes()
            image.write_bytes(data[: len(data) // 2])
        case "empty":
            image.write_bytes(b"")
        case "no image":
            image.write_bytes(b"GIF89a, or not")
        case "gone":
            image.unlink()
    with pytest.raises(BadInput, match=r"000000000002.jpg"):
        checked(tmp_path, tmp_path, "faster", engine)


def test_what_only_scoring_would_stumble_over(tiny_root, tmp_path, monkeypatch):
    truth = evaluate.ground_truth

    def broken(split, kind):
        out = truth(split, kind)
        out["annotations"][0]["bbox"] = "none"
        return out

    monkeypatch.setattr(evaluate, "ground_truth", broken)
    with pytest.raises(BadInput, match="its bbox cannot be scored"):
        checked(tiny_root, tmp_path, "faster", "torchvision")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_an_image_as_detectron2_does(tmp_path, orientation):
    """One image is wide; the other is square, so that its size does not tell whether it was turned."""
    rng = np.random.default_rng(orientation)
    for width, height in ((24, 16), (16, 16)):
        file = tmp_path / f"{width}.jpg"
        pixels = Image.fromarray(
            rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        )
        exif = Image.Exif()
        exif[EXIF_ORIENTATION] = orientation
        pixels.save(file, exif=exif)
        sideways = orientation >= 5
        size = (height, width) if sideways else (width, height)
        record = {"file_name": str(file), "width": size[0], "height": size[1]}
        images.check_file(record)
        turned = np.asarray(images.load_image(record))
        assert turned.shape[1::-1] == size
        as_stored = np.asarray(Image.open(file).convert("RGB"))
        assert np.array_equal(turned, as_stored) is (orientation == 1)
        try:
            from detectron2.data.detection_utils import read_image
        except ImportError:
            continue
        np.testing.assert_array_equal(turned, read_image(str(file), "RGB"))


@pytest.mark.parametrize(
    "new",
    [
        # As texts, 10 would come before 2. Padded, the images keep their order.
        pytest.param(lambda id: f"{id:09}", id="texts"),
        pytest.param(lambda id: id - 10**6, id="negative"),
        pytest.param(lambda id: id + 2**70, id="huge"),
        pytest.param(lambda id: id - 1, id="from 0"),
    ],
)
def test_ids_decide_nothing(tiny_root, tmp_path, new):
    scores = []
    for name in ("plain", "renamed"):
        root = tmp_path / name
        shutil.copytree(tiny_root / "scenes", root / "scenes")
        file = root / "scenes" / "annotations" / "instances_val2017.json"
        data = json.loads(file.read_text())
        if name == "renamed":
            for row in data["images"]:
                row["id"] = new(row["id"])
            for row in data["annotations"]:
                row["id"] = new(row["id"])
                row["image_id"] = new(row["image_id"])
            file.write_text(json.dumps(data))
        split = reading.read(reading.find("scenes_val", root), FASTER_RCNN)
        evaluate.rehearse(split, "bbox", [])
        found = []
        for record in split.records:
            for n, a in enumerate(record["annotations"]):
                x, y, w, h = a["bbox"]
                found.append(
                    {
                        "image_id": record["image_id"],
                        "category_id": split.ids[a["category_id"]],
                        "bbox": [x + n, y, w, h],
                        "score": 0.5 + n / 10,
                    }
                )
        scores.append(evaluate.score(split, found, "bbox", [], manifest="m"))
    plain, renamed = scores
    assert plain.values == renamed.values
    assert plain.ci95 == renamed.ci95
    low, high = plain.ci95["AP"]
    assert low <= plain.values["AP"] <= high


def test_some_objects_without_keypoints(tiny_root, tmp_path, engine):
    """They get unmarked ones. Detectron2 by itself would end in the middle of its training."""
    shutil.copytree(tiny_root / "scenes", tmp_path / "scenes")
    file = tmp_path / "scenes" / "annotations" / "person_keypoints_train2017.json"
    data = json.loads(file.read_text())
    for a in data["annotations"][::2]:
        a.pop("keypoints")
        a.pop("num_keypoints", None)
    file.write_text(json.dumps(data))
    run = run_of_config(
        "tiny_keypoint_rcnn_R_18_FPN", tmp_path, tmp_path / "run", engine=engine
    )
    p, network = built(run)
    network.start(training_records(p.train, p.task), 0, 1)
    network.model.train()
    assert all(value.isfinite() for value in network.step().values())
