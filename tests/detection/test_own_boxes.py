"""Boxes of one's own: one set in three layouts is one set, and a wrong folder is named in a line."""

import json
import re
import shlex
import shutil
from pathlib import Path

import hotcoco
import pytest
import torch
import torchvision
from PIL import Image
from pycocotools import mask as mask_api
from support import own_boxes
from support.detection_runs import ENGINES, overrides
from support.own_boxes import LAYOUTS
from support.records import rows_of

from backbench.cli import program
from backbench.datasets.boxes import box_folders, yolo_text
from backbench.detection import dialect, evaluate, lint, own_check, own_heads
from backbench.detection.data import coco_lists, own
from backbench.detection.run import count_in_epochs
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN, MASK_RCNN
from backbench.errors import BadInput
from backbench.evaluation import wanted

pytestmark = pytest.mark.usefixtures("one_trunk")

# A detector of seconds
pytestmark = pytest.mark.usefixtures("one_trunk")

SMALL = overrides(
    {
        "MODEL.WEIGHTS": "random",
        "MODEL.TRUNK.ARCH": "timm:test_convnext",
        "MODEL.FPN.OUT_CHANNELS": 16,
        "MODEL.ROI_BOX_HEAD.FC_DIM": 16,
        "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
        "MODEL.RPN.POST_NMS_TOPK_TEST": 20,
        "INPUT.MIN_SIZE_TRAIN": "(64,)",
        "INPUT.MIN_SIZE_TEST": 64,
        "DATALOADER.NUM_WORKERS": 0,
        "SOLVER.EPOCHS": 1,
    }
)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The set in each layout, under one name."""
    above = tmp_path_factory.mktemp("boxes")
    return {name: write(above / name / "mine") for name, write in LAYOUTS.items()}


@pytest.fixture
def folder(written, tmp_path):
    """Make a private copy of the set in one layout."""

    def copied(layout: str) -> Path:
        return Path(shutil.copytree(written[layout], tmp_path / "mine"))

    return copied


def said_of(split):
    """Return what a list says of each image, whatever the layout calls its images and classes."""
    out = []
    for record in split.records:
        objects = []
        for each in record["annotations"]:
            objects.append((split.categories[each["category_id"]], each["bbox"]))
        name = Path(record["file_name"]).name
        out.append((name, record["width"], record["height"], sorted(objects)))
    return out


def test_three_layouts_are_one_set(written):
    lists = {name: own.read(base, FASTER_RCNN) for name, base in written.items()}
    train, test = lists["COCO"]
    assert train.categories == ("cat", "zebra")
    # val is trained on, too: nothing is chosen on it
    assert [len(train.records), len(test.records)] == [9, 3]
    assert (test.dataset, test.part) == ("mine", "test")
    for others in lists.values():
        for mine, theirs in zip((train, test), others, strict=True):
            assert said_of(theirs) == said_of(mine)
            assert theirs.fingerprint == mine.fingerprint
            assert theirs.categories == mine.categories


def test_another_box_is_another_list(folder):
    base = folder("YOLO")
    before = own.read(base, FASTER_RCNN)[1].fingerprint
    file = base / "labels" / "test" / "test_1.txt"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(reversed(lines)))
    assert own.read(base, FASTER_RCNN)[1].fingerprint == before
    file.write_text("\n".join([lines[0], "0 0.5 0.5 0.25 0.25"]))
    assert own.read(base, FASTER_RCNN)[1].fingerprint != before


def test_boxes_are_those_that_hotcoco_reads(written, tmp_path):
    """Both layouts are converted by our own reading, which refuses what hotcoco takes."""
    theirs = hotcoco.COCO.from_voc(str(written["VOC"])).dataset
    found = {}
    for split in own.read(written["VOC"], FASTER_RCNN):
        found |= {name: objects for name, _, _, objects in said_of(split)}
    names = {image["id"]: image["file_name"] for image in theirs["images"]}
    classes = {each["id"]: each["name"] for each in theirs["categories"]}
    expected: dict[str, list[object]] = {name: [] for name in found}
    for row in theirs["annotations"]:
        name = Path(names[row["image_id"]]).name
        expected[name].append((classes[row["category_id"]], row["bbox"]))
    assert found == {name: sorted(objects) for name, objects in expected.items()}
    # YOLO: hotcoco wants data.yaml beside the label files
    labels = shutil.copytree(written["YOLO"] / "labels" / "test", tmp_path / "labels")
    shutil.copy(written["YOLO"] / "data.yaml", labels)
    images = written["YOLO"] / "images" / "test"
    theirs = hotcoco.COCO.from_yolo(str(labels), str(images)).dataset
    part = box_folders.must_find(written["YOLO"]).parts["test"]
    mine = yolo_text.read(part, dict(enumerate(own_boxes.CLASSES)))
    boxes = [row["bbox"] for row in theirs["annotations"]]
    assert [row["bbox"] for row in mine["annotations"]] == boxes


@pytest.mark.parametrize("engine", ENGINES)
def test_three_layouts_give_equal_numbers(written, tmp_path, engine):
    """Bit by bit, with their intervals, under the dataset's own name."""
    found = {}
    for name, base in written.items():
        out = tmp_path / name
        line = ["detect", "--dataset", "mine", "--data", str(base.parent)]
        line += ["--out", str(out), "--engine", engine]
        assert program.main([*line, *SMALL]) == 0
        rows = rows_of(out)
        assert {row.dataset for row in rows} == {"mine"}
        assert {row.split for row in rows} == {"test"}
        assert rows[0].provenance["val"].startswith("own_mine_test:")
        detections = json.loads((out / "predictions.json").read_text())
        assert detections
        found[name] = (
            [(row.metric, row.value, row.ci95) for row in rows],
            [(each["bbox"], each["score"]) for each in detections],
        )
    assert found["VOC"] == found["COCO"]
    assert found["YOLO"] == found["COCO"]


@pytest.mark.slow
def test_the_shipped_reading_has_a_protocol_of_its_own(written, tmp_path):
    line = ["detect", "--dataset", "mine", "--data", str(written["VOC"].parent)]
    line += ["--out", str(tmp_path / "run"), "--engine", "torchvision"]
    words = ["MODEL.WEIGHTS", "random", "MODEL.TRUNK.ARCH", "resnet18"]
    assert program.main([*line, *words]) == 0
    rows = rows_of(tmp_path / "run")
    assert {row.protocol for row in rows} == {"detect-own-v1"}
    assert all(row.column.split("@")[1].count("~") == 0 for row in rows)


# Few images


def numbered(base, counts):
    """Write and read a set whose classes have so many training images each, and a test image."""
    # The last class has no image
    names = [f"class {label}" for label in range(1, len(counts) + 2)]
    classes = [{"id": label, "name": name} for label, name in enumerate(names, 1)]
    number = 0
    lists = {}
    for split in ("train", "test"):
        about = {"images": [], "categories": classes, "annotations": []}
        for label, count in enumerate(counts, 1):
            for _ in range(count if split == "train" else 1):
                number += 1
                file = base / "images" / split / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (64, 64), (number, 0, 0)).save(file)
                size = {"width": 64, "height": 64}
                about["images"].append({"id": number, "file_name": file.name, **size})
                box = {"bbox": [8, 8, 32, 32], "area": 1024, "iscrowd": 0}
                ids = {"id": number, "image_id": number, "category_id": label}
                about["annotations"].append(ids | box)
        lists[f"annotations/instances_{split}.json"] = json.dumps(about)
    for name, text in lists.items():
        write(base / name, text)
    return own.read(base, FASTER_RCNN)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((1, 2), "1.5 in the median of 2;"),
        ((9,), "9 in the median of 1;"),
        # A class that is scored and never learned counts
        ((0, 12), "6 in the median of 2;"),
        ((1, 9, 12), "9 in the median of 3;"),
        ((10,), ""),
        # Half of the classes have enough
        ((1, 10, 12), ""),
    ],
)
def test_classes_with_few_images_are_said(tmp_path, counts, said):
    lists = numbered(tmp_path / "mine", counts)
    found = lint.few_images("mine", *lists, FASTER_RCNN)
    assert bool(found) is bool(said)
    assert said in found
    assert len(found.splitlines()) <= 1


@pytest.mark.parametrize(("count", "few"), [(9, True), (10, False)])
def test_few_images_are_said_below_the_price(tmp_path, caplog, count, few):
    caplog.set_level("INFO")
    numbered(tmp_path / "mine", (count, count))
    line = ["detect", "--dataset", "mine", "--data", str(tmp_path)]
    line += ["--out", str(tmp_path / "run"), "--engine", "torchvision", *SMALL]
    assert program.main(line) == 0
    said = [record.getMessage() for record in caplog.records]
    (priced,) = [place for place, line in enumerate(said) if "to train on, 4" in line]
    warned = [place for place, line in enumerate(said) if "images a class" in line]
    assert warned == ([priced + 1] if few else [])
    if few:
        assert caplog.records[warned[0]].levelname == "WARNING"
        assert "mine: training images a class: 9 in the median" in said[warned[0]]


# Where there is no split


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_split_a_fifth_is_drawn(tmp_path, layout):
    """The same fifth in every layout."""
    about = own_boxes.content("train")
    base = tmp_path / "mine"
    if layout == "COCO":
        own_boxes.draw_images(about, base / "images")
        (base / "boxes.json").write_text(json.dumps(about))
    elif layout == "VOC":
        own_boxes.draw_images(about, base)
        hotcoco.COCO(about).to_voc(str(base))
        for file in (base / "Annotations").iterdir():
            file.rename(base / file.name)
        (base / "Annotations").rmdir()
    else:
        own_boxes.draw_images(about, base / "images")
        hotcoco.COCO(about).to_yolo(str(base / "labels"))
        (base / "labels" / "data.yaml").unlink()
        (base / "classes.txt").write_text("\n".join(own_boxes.CLASSES))
    train, test = own.read(base, FASTER_RCNN)
    names = [Path(record["file_name"]).name for record in test.records]
    assert names == ["train_3.png"]
    assert len(train.records) == 5 and test.part == "test"


def test_a_missing_label_file_means_no_objects(folder):
    base = folder("YOLO")
    (base / "labels" / "train" / "train_1.txt").unlink()
    train, _ = own.read(base, FASTER_RCNN)
    assert train.records[0]["annotations"] == []


def checked(base, capsys):
    """Return the exit status of `data check`, and its lines."""
    status = program.main(["data", "check", base.name, "--data", str(base.parent)])
    return status, capsys.readouterr().out.splitlines()


def test_data_check_tells_what_has_no_object(folder, capsys):
    base = folder("COCO")
    status, lines = checked(base, capsys)
    assert status == 0 and not any("no object" in line for line in lines)
    for split in ("train", "val", "test"):
        change_json(
            base, lambda a: a["categories"].append({"id": 9, "name": "owl"}), split
        )

    def bare(about):
        first = about["images"][0]["id"]
        about["annotations"] = [
            each for each in about["annotations"] if each["image_id"] != first
        ]

    change_json(base, bare, "test")
    status, lines = checked(base, capsys)
    assert status == 0
    assert (
        "mine: 1 of 3 images that are scored have no object, first test_1.png" in lines
    )
    assert "mine: 1 of 3 classes have no object: owl" in lines


def test_data_check_tells_of_classes_that_are_perhaps_one(folder, capsys):
    base = folder("VOC")
    replaced(base / XML, "<name>cat<", "<name>Cat<")
    status, lines = checked(base, capsys)
    assert status == 1
    assert (
        "mine: PROBLEM: classes 'Cat' and 'cat' differ by capital letters alone; if they are one,"
        " spell it in one way"
    ) in lines


def test_data_check_tells_of_classes_without_anything_to_learn_from(folder, capsys):
    base = folder("VOC")
    file = base / "Annotations" / "test_1.xml"
    replaced(file, "<name>[a-z]+<", "<name>owl<")
    status, lines = checked(base, capsys)
    assert status == 1
    (line,) = [each for each in lines if "their AP will be 0" in each]
    assert "has no object of owl, of which mine_test has some" in line


# Masks and keypoints


def test_masks_are_read_where_there_are_outlines(tmp_path):
    base = own_boxes.coco(tmp_path / "mine", outlines=True)
    assert box_folders.must_find(base).has_outlines()
    lists = own.read(base, MASK_RCNN)
    # As YOLO's outlines
    labels = own_boxes.yolo(tmp_path / "yolo" / "mine")
    for split in own_boxes.COUNTS:
        about = own_boxes.content(split, outlines=True)
        for image in about["images"]:
            lines = []
            for row in about["annotations"]:
                if row["image_id"] == image["id"]:
                    shares = [
                        value / own_boxes.SIDE for value in row["segmentation"][0]
                    ]
                    words = [row["category_id"] - 1, *shares]
                    lines.append(" ".join(map(str, words)))
            name = Path(image["file_name"]).stem
            (labels / "labels" / split / f"{name}.txt").write_text("\n".join(lines))
    assert box_folders.must_find(labels).has_outlines()
    # Of every list: detectors are trained on one and scored on another
    file = base / "annotations" / "instances_train.json"
    about = json.loads(file.read_text())
    del about["annotations"][0]["segmentation"]
    file.write_text(json.dumps(about))
    assert not box_folders.must_find(base).has_outlines()
    theirs = own.read(labels, MASK_RCNN)
    for mine, other in zip(lists, theirs, strict=True):
        assert other.fingerprint == mine.fingerprint


@pytest.mark.parametrize(
    "names", [("left_eye", "right_eye"), ("left_fin", "right_fin")]
)
def test_sigmas_are_said(tmp_path, caplog, names):
    """COCO's own keypoints have COCO's, all others its widest."""
    caplog.set_level("INFO")
    base = own_boxes.coco(tmp_path / "mine")
    for file in (base / "annotations").iterdir():
        about = json.loads(file.read_text())
        about["categories"] = [{"id": 1, "name": "fish", "keypoints": list(names)}]
        for row in about["annotations"]:
            x, y, _, _ = row["bbox"]
            row |= {"category_id": 1, "keypoints": [x + 1, y + 1, 2, x + 3, y + 3, 2]}
        file.write_text(json.dumps(about))
    line = ["detect", "--dataset", "mine", "--data", str(tmp_path), "--out"]
    line += [str(tmp_path / "run"), "--config-file", "keypoint_rcnn_own"]
    line += ["--engine", "torchvision", *SMALL]
    line += ["MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", "[8]"]
    assert program.main(line) == 0
    sigma = own_heads.COCO_SIGMAS.get(names[0], 0.107)
    said = f"{names[0]} {sigma:g}, {names[1]} {sigma:g}"
    assert said in caplog.text
    rows = rows_of(tmp_path / "run")
    assert {row.task for row in rows} == {"keypoint_rcnn"}
    assert {row.dataset for row in rows} == {"mine"}


def test_sigmas_of_all_of_cocos_keypoints_are_the_shipped_ones():
    from backbench.detection import dialect

    given = dialect.read("keypoint_rcnn_R_50_FPN_1x", [])
    shipped = given.get("TEST.KEYPOINT_OKS_SIGMAS")
    assert list(own_heads.COCO_SIGMAS.values()) == list(shipped)


# The length


def test_epochs_stretch_the_schedule():
    from backbench.detection import dialect
    from backbench.detection.engine_torchvision import TorchvisionEngine

    cfg = TorchvisionEngine.read_config(dialect.read("faster_rcnn_own", []))
    count_in_epochs(cfg, 100)
    # 8 epochs of 100 images, 4 a step
    assert cfg.SOLVER.MAX_ITER == 200
    assert tuple(cfg.SOLVER.STEPS) == (133, 178)
    assert cfg.SOLVER.WARMUP_ITERS == 10


# COCO's name


def test_only_cocos_lists_are_called_coco(tmp_path):
    """Blood cells in a folder called coco are no COCO."""
    names = tuple(coco_lists.CLASSES.values())
    ids = tuple(coco_lists.CLASSES)
    images = (9, 25)
    files = ("000000000009.jpg", "000000000025.jpg")
    assert coco_lists.are_cocos(names, ids, files, images, 12)
    assert not coco_lists.are_cocos(("RBC", "WBC"), (1, 2), files, images, 12)
    assert not coco_lists.are_cocos(names, ids, ("a.jpg", "b.jpg"), images, 12)
    # All of val's images, with another number of objects: other people's annotations
    every = range(1, 5001)
    whole = [f"{number:012d}.jpg" for number in every]
    assert coco_lists.are_cocos(names, ids, whole, every, 36781)
    assert not coco_lists.are_cocos(names, ids, whole, every, 40000)


# What is refused, in one line


def change_json(base, change, split="train"):
    file = base / "annotations" / f"instances_{split}.json"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def replaced(path, before, after):
    text = path.read_text()
    assert re.search(before, text)
    path.write_text(re.sub(before, after, text, count=1))


def image_at(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64)).save(path)


def normalised(about):
    for row in about["annotations"]:
        row["bbox"] = [value / 64 for value in row["bbox"]]


JSON = "annotations/instances_train.json"
XML = "Annotations/train_1.xml"
MAIN = "ImageSets/Main"
TEXT = "labels/train/train_1.txt"
WRONG = {
    "broken json": (
        "COCO",
        lambda b: write(b / JSON, "{"),
        "instances_train.json: not",
    ),
    "a list of detections": (
        "COCO",
        lambda b: write(b / JSON, '[{"image_id": 1, "score": 0.5}]'),
        "instances_train.json: a list, as of detections, and no annotation file",
    ),
    "images that are no list": (
        "COCO",
        lambda b: change_json(b, lambda about: about.update(images={})),
        "instances_train.json: 'images' is no list",
    ),
    "an image's id as text": (
        "COCO",
        lambda b: change_json(b, lambda a: a["annotations"][0].update(image_id="1")),
        "image '1' is not in the file's 'images'",
    ),
    "no categories": (
        "COCO",
        lambda b: change_json(b, lambda about: about.pop("categories")),
        "has no 'categories' list",
    ),
    "no images": (
        "COCO",
        lambda b: change_json(b, lambda about: about["images"].clear()),
        "'images' list is empty",
    ),
    "an unknown category": (
        "COCO",
        lambda b: change_json(b, lambda a: a["annotations"][0].update(category_id=9)),
        "category 9 is not among the file's 2 categories",
    ),
    "an unknown image": (
        "COCO",
        lambda b: change_json(b, lambda a: a["annotations"][0].update(image_id=99)),
        "image 99 is not in the file's 'images'",
    ),
    "normalised boxes": (
        "COCO",
        lambda b: change_json(b, normalised),
        "they are normalised",
    ),
    "an image that is missing": (
        "COCO",
        lambda b: (b / "images/train/train_2.png").unlink(),
        "1 of 6 images of instances_train.json are missing, first train_2.png",
    ),
    "an image twice": (
        "COCO",
        lambda b: change_json(
            b, lambda a: a["images"][1].update(file_name="train_1.png")
        ),
        "'train_1.png' is listed twice",
    ),
    "two files for train": (
        "COCO",
        lambda b: shutil.copy(b / JSON, b / "annotations/boxes_train.json"),
        "two annotation files for 'train', boxes_train.json and instances_train.json",
    ),
    "no train list": (
        "COCO",
        lambda b: (b / JSON).unlink(),
        "but no train list; call one of them train",
    ),
    "a test list without objects": (
        "COCO",
        lambda b: change_json(b, lambda a: a["annotations"].clear(), "test"),
        "none of its 3 images has an object",
    ),
    "a train list without objects": (
        "COCO",
        lambda b: change_json(b, lambda a: a["annotations"].clear()),
        "instances_train.json: none of its 6 images has an object, and .* trained on",
    ),
    "other classes in test": (
        "COCO",
        lambda b: change_json(
            b, lambda a: a["categories"][0].update(name="dog"), "val"
        ),
        "its categories are not those of",
    ),
    "images nowhere": (
        "COCO",
        lambda b: shutil.rmtree(b / "images"),
        "its first image 'test_1.png' lies neither beside it nor in",
    ),
    "broken XML": ("VOC", lambda b: write(b / XML, "<annotation"), "not an XML file"),
    "another XML": ("VOC", lambda b: write(b / XML, "<svg/>"), "begins with <svg>"),
    "another size": (
        "VOC",
        lambda b: replaced(b / XML, "<width>64", "<width>640"),
        r"train_1.png: is \(64, 64\) pixels; its annotations say \(640, 64\)",
    ),
    "no size": (
        "VOC",
        lambda b: replaced(b / XML, "<width>64</width>", ""),
        "has no <size><width>",
    ),
    "a size of 0": (
        "VOC",
        lambda b: replaced(b / XML, "<width>64", "<width>0"),
        "<width> is '0'; write the image's width in pixels",
    ),
    "a corner that is no number": (
        "VOC",
        lambda b: replaced(b / XML, "<xmin>", "<xmin>x"),
        r"object 1 \(zebra\): <xmin> is 'x\d+'; write pixels",
    ),
    "corners exchanged": (
        "VOC",
        lambda b: replaced(b / XML, r"<xmax>\d+", "<xmax>-9"),
        "xmax -9 lies before xmin",
    ),
    "an object without a class": (
        "VOC",
        lambda b: replaced(b / XML, "<name>zebra</name>", ""),
        "object 1 has no <name>",
    ),
    "a listed image without XML": (
        "VOC",
        lambda b: (b / XML).unlink(),
        "train.txt: line 1: 'train_1' has no train_1.xml",
    ),
    "a listed image that is missing": (
        "VOC",
        lambda b: (b / "JPEGImages/train_1.png").unlink(),
        "train.txt: line 1: 'train_1' has no image",
    ),
    "a line twice": (
        "VOC",
        lambda b: write(b / MAIN / "train.txt", "train_1\ntrain_1"),
        "line 2: 'train_1' is listed twice",
    ),
    "an empty list": (
        "VOC",
        lambda b: write(b / MAIN / "train.txt", ""),
        "train.txt: lists no image",
    ),
    "two lists for val": (
        "VOC",
        lambda b: write(b / MAIN / "valid.txt", "val_1"),
        "'val' is there twice, as val.txt and valid.txt",
    ),
    "labels without images": (
        "VOC",
        lambda b: [shutil.rmtree(b / MAIN), (b / "JPEGImages/val_1.png").unlink()],
        "1 label files have no image, first val_1.xml",
    ),
    "images without labels": (
        "VOC",
        lambda b: [shutil.rmtree(b / MAIN), (b / XML).unlink()],
        "1 images have no XML file, first train_1.png",
    ),
    "copies of train in test": (
        "VOC",
        lambda b: shutil.copy(
            b / "JPEGImages/train_1.png", b / "JPEGImages/test_1.png"
        ),
        "1 of 3 val images are trained on",
    ),
    "a coordinate above 1": (
        "YOLO",
        lambda b: write(b / TEXT, "0 32 0.5 0.5 0.5"),
        "train_1.txt: line 1: '32' is no share of the image's side",
    ),
    "not a number": (
        "YOLO",
        lambda b: write(b / TEXT, "0 nan 0.5 0.5 0.5"),
        "line 1: 'nan' is no share",
    ),
    "a class beyond the list": (
        "YOLO",
        lambda b: write(b / TEXT, "7 0.5 0.5 0.5 0.5"),
        "line 1: class 7 is none of the 2 named, 0 to 1",
    ),
    "a class that is no number": (
        "YOLO",
        lambda b: write(b / TEXT, "cat 0.5 0.5 0.5 0.5"),
        "class 'cat' is no whole number",
    ),
    "too few numbers": (
        "YOLO",
        lambda b: write(b / TEXT, "0 0.5 0.5 0.5"),
        "3 numbers behind the class",
    ),
    "a box of no width": (
        "YOLO",
        lambda b: write(b / TEXT, "0 0.5 0.5 0 0.5"),
        "a box of 0 x 0.5",
    ),
    "boxes and outlines mixed": (
        "YOLO",
        lambda b: write(b / TEXT, "0 .1 .1 .9 .1 .9 .9\n0 .5 .5 .5 .5"),
        r"4 numbers \(boxes\), but others have outlines",
    ),
    "no class names": (
        "YOLO",
        lambda b: (b / "data.yaml").unlink(),
        "neither data.yaml nor classes.txt",
    ),
    "another count of names": (
        "YOLO",
        lambda b: replaced(b / "data.yaml", "^", "nc: 3\n"),
        "says 3 classes, but 2 names are there",
    ),
    "a name twice": (
        "YOLO",
        lambda b: replaced(b / "data.yaml", "zebra", "cat"),
        "two classes are called 'cat'",
    ),
    "two descriptions": (
        "YOLO",
        lambda b: shutil.copy(b / "data.yaml", b / "more.yaml"),
        "data.yaml and more.yaml both name classes",
    ),
    "a folder that is not there": (
        "YOLO",
        lambda b: replaced(b / "data.yaml", "images/train", "images/trian"),
        "'images/trian' is no folder of images",
    ),
    "keypoints that no line has": (
        "YOLO",
        lambda b: replaced(b / "data.yaml", "^", "kpt_shape: [5, 3]\n"),
        r"4 numbers behind the class; kpt_shape \[5, 3\] asks for 19",
    ),
    "a label file without its image": (
        "YOLO",
        lambda b: (b / "images/train/train_1.png").unlink(),
        "1 label files have no image, first train_1.txt",
    ),
    "hardly any label files": (
        "YOLO",
        lambda b: [file.unlink() for file in (b / "labels/val").iterdir()],
        "3 of 3 images have no label file",
    ),
    "two images of one label file": (
        "YOLO",
        lambda b: image_at(b / "images/train/train_1.jpg"),
        "would have the same label file",
    ),
    "an image that is cut off": (
        "YOLO",
        lambda b: write(b / "images/train/train_1.png", "no image"),
        "train_1.png: corrupt image",
    ),
    "an undivided list beside a named one": (
        "COCO",
        lambda b: [
            (b / "annotations/instances_train.json").rename(
                b / "annotations/instances.json"
            ),
            shutil.copytree(b / "images/train", b / "images", dirs_exist_ok=True),
        ],
        "instances.json: its name tells no split, and test and val are beside it; call it train",
    ),
    "images in a folder below the others": (
        "YOLO",
        lambda b: image_at(b / "images/train/more/one.png"),
        "images/train/more: holds images, too",
    ),
    "a list of images without label files": (
        "YOLO",
        lambda b: [
            write(
                b / "images.txt", "images/train/train_1.png\nimages/train/train_2.png"
            ),
            [file.unlink() for file in (b / "labels/train").iterdir()],
            replaced(b / "data.yaml", "train: images/train", "train: images.txt"),
        ],
        "images.txt: 2 of 2 images have no label file",
    ),
    "two layouts": (
        "YOLO",
        lambda b: write(
            b / "annotations/instances_train.json", json.dumps(one_image(b))
        ),
        "boxes in the layouts of COCO and YOLO",
    ),
    "an empty folder": (
        "YOLO",
        lambda b: [shutil.rmtree(b), b.mkdir()],
        "mine: is empty; expected COCO's",
    ),
}


@pytest.mark.parametrize("corner", ["<xmin>-500", "<xmax>5000"])
def test_one_box_far_outside_its_image_is_said(folder, capsys, corner):
    base = folder("VOC")
    replaced(base / XML, corner[:6] + r"\d+", corner)
    expected = "1 of 12 boxes reach outside their image by more than its side"
    assert any(expected in note for note in own.read(base, FASTER_RCNN)[0].notes)
    assert program.main(["data", "check", "mine", "--data", str(base.parent)]) == 1
    assert expected in capsys.readouterr().out


def test_epochs_have_bounds(written, tmp_path, capsys):
    line = ["detect", "--dataset", "mine", "--data", str(written["VOC"].parent)]
    line += ["--out", str(tmp_path / "run"), "--engine", "torchvision", *SMALL]
    assert program.main([*line, "SOLVER.EPOCHS", "-3"]) == 2
    assert "SOLVER.EPOCHS -3.0: at least 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["SOLVER.IMS_PER_BATCH", "0"], "SOLVER.IMS_PER_BATCH 0: at least 1"),
        (
            ["SOLVER.EPOCHS", "0", "SOLVER.MAX_ITER", "0"],
            "SOLVER.MAX_ITER 0: at least 1",
        ),
    ],
)
def test_epochs_are_counted_from_checked_values(written, tmp_path, capsys, words, said):
    line = ["detect", "--dataset", "mine", "--data", str(written["VOC"].parent)]
    line += ["--out", str(tmp_path / "run"), "--engine", "torchvision", *SMALL, *words]
    assert program.main(line) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["SOLVER.MAX_ITER", "10"],
        ["SOLVER.STEPS", "(6, 8)"],
        ["SOLVER.MAX_ITER", "10", "SOLVER.STEPS", "(6, 8)"],
        ["SOLVER.EPOCHS", "2", "SOLVER.MAX_ITER", "10"],
    ],
)
def test_iterations_are_refused_where_epochs_are_the_length(words):
    with pytest.raises(
        BadInput, match=r"the length is SOLVER.EPOCHS .*SOLVER.EPOCHS 0"
    ):
        dialect.read("faster_rcnn_own", words)


def test_iterations_and_steps_may_say_shares_of_the_epochs():
    words = ["SOLVER.EPOCHS", "3", "SOLVER.MAX_ITER", "3", "SOLVER.STEPS", "(2,)"]
    assert dialect.read("faster_rcnn_own", words).get("SOLVER.STEPS") == (2,)
    words = ["SOLVER.EPOCHS", "0", "SOLVER.MAX_ITER", "10"]
    assert dialect.read("faster_rcnn_own", words).get("SOLVER.MAX_ITER") == 10


def one_image(base):
    image_at(base / "images" / "a.png")
    image = {"id": 1, "file_name": "a.png", "width": 64, "height": 64}
    return {"images": [image], "categories": [], "annotations": []}


@pytest.fixture(scope="session")
def trunk(tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("trunk") / "my_resnet.pth"
    torch.save(torchvision.models.resnet18().state_dict(), file)
    return file


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_named_in_one_line(folder, tmp_path, trunk, capsys, case):
    """Nothing is written, neither by `evaluate` nor by `detect`."""
    layout, spoil, expected = WRONG[case]
    base = folder(layout)
    spoil(base)
    out = tmp_path / "runs"
    data = ["--data", str(base)]
    assert (
        program.main(["evaluate", str(trunk), "faster_rcnn", *data, "--out", str(out)])
        == 2
    )
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(expected, said), said
    assert not out.exists()
    # `detect` says the same
    line = ["detect", "--dataset", "mine", "--data", str(tmp_path), "--out", str(out)]
    assert program.main([*line, "--engine", "torchvision", *SMALL]) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (
            "knn",
            "holds boxes .*knn reads one class an image; take faster_rcnn, or multilabel",
        ),
        ("mask_rcnn", "VOC's XML has boxes only, and mask_rcnn needs outlines"),
        (
            "keypoint_rcnn",
            "VOC's XML has boxes only, and keypoint_rcnn needs keypoints",
        ),
    ],
)
def test_a_task_that_boxes_do_not_serve(written, trunk, capsys, task, expected):
    out = trunk.parent / "runs"
    line = ["evaluate", str(trunk), task, "--data", str(written["VOC"])]
    assert program.main([*line, "--out", str(out)]) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize("name", ["classes.txt", "data.yaml"])
def test_a_folder_of_classes_with_a_list_of_them_is_no_boxes(tmp_path, name):
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            image_at(tmp_path / "mine" / split / label / "one.png")
    text = "cat\ndog\n" if name == "classes.txt" else "names: [cat, dog]\n"
    (tmp_path / "mine" / name).write_text(text)
    (tmp_path / "mine" / "README.txt").write_text("pictures")
    assert box_folders.find(tmp_path / "mine") is None


def test_an_archive_of_boxes_is_named(written, tmp_path, trunk, capsys):
    shutil.make_archive(str(tmp_path / "mine"), "zip", written["YOLO"])
    archive = tmp_path / "mine.zip"
    out = tmp_path / "runs"
    line = ["evaluate", str(trunk), "faster_rcnn", "--data", str(archive)]
    assert program.main([*line, "--out", str(out)]) == 2
    expected = f"{archive}: boxes are read from folders; unpack it to {tmp_path}/mine"
    assert expected in capsys.readouterr().err
    assert not out.exists()


def test_few_images_without_a_split_are_refused(tmp_path):
    about = own_boxes.content("val")
    own_boxes.draw_images(about, tmp_path / "images")
    (tmp_path / "boxes.json").write_text(json.dumps(about))
    with pytest.raises(BadInput, match="3 images and no split; 5 are the fewest"):
        own.read(tmp_path, FASTER_RCNN)


def test_keypoints_need_their_list(written):
    with pytest.raises(BadInput, match="keypoints need one category"):
        own.read(written["COCO"], KEYPOINT_RCNN)


@pytest.mark.parametrize("empty", [[], [[]]])
def test_objects_with_an_empty_outline_are_not_scored_as_masks(tmp_path, empty):
    """Label programs write [] for an object with a box alone."""
    base = own_boxes.coco(tmp_path / "mine", outlines=True)
    file = base / "annotations" / "instances_test.json"
    about = json.loads(file.read_text())
    about["annotations"][1]["segmentation"] = empty
    file.write_text(json.dumps(about))
    _, scored = own.read(base, MASK_RCNN)
    number = about["annotations"][1]["id"]
    said = (
        rf"1 of \d+ objects have an empty 'segmentation' \(first annotation {number}\)"
    )
    with pytest.raises(BadInput, match=rf"^{file}: {said}.* or take faster_rcnn$"):
        evaluate.rehearse(scored, "segm", [])
    evaluate.rehearse(scored, "bbox", [])


def test_an_outline_that_is_a_line_is_missed_in_scoring(tmp_path):
    """pycocotools takes four numbers for a box, and ends in an error."""
    base = own_boxes.coco(tmp_path / "mine", outlines=True)
    file = base / "annotations" / "instances_test.json"
    about = json.loads(file.read_text())
    first, second, third, *_ = about["annotations"]
    whole = first["segmentation"]
    first["segmentation"] = [[3, 3, 9, 9], *whole]
    second["segmentation"] = [[3, 3, 9, 9]]
    file.write_text(json.dumps(about))
    _, scored = own.read(base, MASK_RCNN)
    evaluate.rehearse(scored, "segm", [])
    rows = evaluate.ground_truth(scored, "segm")["annotations"]
    assert [row["segmentation"] for row in rows[::2]][:2] == [
        whole,
        third["segmentation"],
    ]
    mask = mask_api.decode(rows[1]["segmentation"])
    assert mask.shape == (64, 64) and not mask.any()
    # And `data check` says so
    said = "test: 1 objects without a valid outline left out of the training; scoring misses them"
    assert own_check.check(base)[1] == [said]


def test_keypoints_beside_their_image_are_told_by_the_check(tmp_path):
    base = own_boxes.posed_coco(tmp_path / "mine")
    file = base / "annotations" / "instances_test.json"
    about = json.loads(file.read_text())
    about["annotations"][0]["keypoints"][:2] = [900, 900]
    file.write_text(json.dumps(about))
    (said,) = own_check.check(base)[1]
    assert (
        said.startswith("test: 1 of ") and "keypoints are outside their image" in said
    )


def test_a_run_does_not_lie_in_its_boxes(folder, tmp_path, capsys):
    base = folder("YOLO")
    line = ["detect", "--dataset", "mine", "--data", str(tmp_path)]
    assert program.main([*line, "--out", str(base / "run"), *SMALL]) == 2
    assert "lies in the dataset" in capsys.readouterr().err


def test_detect_needs_a_config_or_a_dataset(tmp_path, capsys):
    line = ["detect", "--data", str(tmp_path), "--out", str(tmp_path / "run")]
    assert program.main([*line, *SMALL]) == 2
    assert "give --config-file NAME, or --dataset NAME" in capsys.readouterr().err


def test_what_the_dataset_decides_is_no_override(written, tmp_path, capsys):
    line = ["detect", "--dataset", "mine", "--data", str(written["VOC"].parent)]
    line += ["--out", str(tmp_path / "run"), *SMALL]
    assert program.main([*line, "MODEL.ROI_HEADS.NUM_CLASSES", "80"]) == 2
    assert "NUM_CLASSES comes from --dataset mine" in capsys.readouterr().err


def test_without_a_task_what_the_folder_has_is_trained(written, tmp_path):
    """Faster R-CNN, and Mask R-CNN where there are outlines."""
    for layout, base in written.items():
        _, tasks = wanted.place_tasks(None, base, tmp_path / "runs")
        assert [(t.task, t.recipe) for t in tasks] == [
            ("faster_rcnn", "faster_rcnn_own")
        ], layout
    base = own_boxes.coco(tmp_path / "mine", outlines=True)
    _, tasks = wanted.place_tasks(None, base, tmp_path / "runs")
    assert [task.recipe for task in tasks] == ["faster_rcnn_own", "mask_rcnn_own"]
    # COCO itself is what the configs name
    assert wanted.parse_task("mask_rcnn/coco2017").recipe == "mask_rcnn_R_50_FPN_1x"


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, trunk, capsys, monkeypatch):
    """Those of docs/boxes.md run as they stand, on a tiny set."""
    page = Path(__file__).parents[2] / "docs" / "boxes.md"
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    commands = []
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            # `errors` compares two runs of another page, and has tests of its own
            if line.startswith("backbench ") and " errors " not in line:
                commands.append(shlex.split(line, comments=True)[1:])
    assert len(commands) >= 4
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "cache"))
    shutil.copy(trunk, "my_resnet50.pth")
    own_boxes.coco(tmp_path / "data" / "mine", outlines=True)
    for command in commands:
        assert program.main(command) == 0, command
    rows = rows_of(tmp_path / "runs")
    assert {row.task for row in rows} == {"faster_rcnn", "mask_rcnn"}
    assert {row.dataset for row in rows} == {"mine"}
    assert {"detect-own-v1"} <= {row.protocol for row in rows}
    printed = capsys.readouterr().out
    assert "faster_rcnn/mine/bbox_AP@detect-own-v1" in printed
    assert "Next, for one model: three seeds" in printed


def test_data_check_reads_boxes_as_detect_does(written, capsys):
    for layout, base in written.items():
        status = program.main(["data", "check", "mine", "--data", str(base.parent)])
        said = capsys.readouterr().out
        assert status == 0, said
        assert f"mine: boxes in {layout}'s layout, " in said
        train, scored = own.read(base, FASTER_RCNN)
        for split in (train, scored):
            assert f" {len(split.records)} images, " in said
            assert split.lists_digest in said
        assert said.endswith("mine: all right\n")


def test_data_check_names_what_detect_would_refuse(folder, capsys):
    base = folder("YOLO")
    label = sorted(base.rglob("labels/**/*.txt"))[0]
    label.write_text("0 1.5 0.5 0.2 0.2\n")
    status = program.main(["data", "check", "mine", "--data", str(base.parent)])
    said = capsys.readouterr().out
    assert status == 1
    assert f"mine: PROBLEM: {label}" in said
    assert said.endswith("mine: 1 problems\n")


def test_data_list_shows_boxes_and_what_is_wrong_with_them(written, tmp_path, capsys):
    for layout, base in written.items():
        shutil.copytree(base, tmp_path / layout)
    shutil.copytree(written["COCO"] / "annotations", tmp_path / "VOC" / "annotations")
    program.main(["data", "list", "--data", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    for layout in ("COCO", "YOLO"):
        row = [line for line in lines if line.startswith(f"{layout} ")]
        assert len(row) == 1
        assert " AP " in row[0]
        assert " found " in row[0]
        below = lines[lines.index(row[0]) + 1]
        assert below.strip().startswith(f"found: boxes in {layout}'s layout (")
    row = [line for line in lines if line.startswith("VOC ")]
    assert " unusable" in row[0]
    assert "in the layouts of COCO and VOC" in lines[lines.index(row[0]) + 1]


def test_a_crowd_is_no_object_to_learn_from(tmp_path):
    train, val = numbered(tmp_path / "mine", (10, 10))
    assert lint.few_images("mine", train, val, FASTER_RCNN) == ""
    for record in train.records:
        for each in record["annotations"]:
            each["iscrowd"] = int(each["category_id"] == 0)
    found = lint.few_images("mine", train, val, FASTER_RCNN)
    assert "5 in the median of 2;" in found
