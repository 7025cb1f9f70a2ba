"""Tests that data in another format, which would train and score without any error, is named before
the training, and that what a file lacks is computed from what it has."""

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask
from support.detection_runs import ENGINES, built, needs_detectron2, run_of_config

from backbench.cli import data as data_verb
from backbench.detection import evaluate, lint, train_net
from backbench.detection.data import images, outlines, reading, sides
from backbench.detection.data.masks import crop
from backbench.detection.data.split import training_records
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN, MASK_RCNN
from backbench.errors import BadInput
from backbench.images.decoding import EXIF_ORIENTATION

pytestmark = pytest.mark.usefixtures("one_trunk")

SIGMAS = [0.107] * 5
TASKS = {"faster": FASTER_RCNN, "mask": MASK_RCNN, "keypoint": KEYPOINT_RCNN}
FLIPPED = ("INPUT.RANDOM_FLIP", "horizontal")
BITMASK = ("INPUT.MASK_FORMAT", "bitmask")


@pytest.fixture
def root(tiny_root, tmp_path):
    """A private copy of the scenes, to be changed."""
    shutil.copytree(tiny_root / "scenes", tmp_path / "data" / "scenes")
    return tmp_path / "data"


def edit(root, change, task="faster", part="train"):
    """Change the content of an annotation file."""
    kind = "person_keypoints" if task == "keypoint" else "instances"
    file = root / "scenes" / "annotations" / f"{kind}_{part}2017.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def each(change):
    """Apply a change to every object."""

    def on_all(content):
        for row in content["annotations"]:
            change(row)

    return on_all


def without(key):
    return each(lambda row: row.pop(key))


def read(root, task="faster", part="train"):
    name = f"scenes_{part}"
    if task == "keypoint":
        name = f"keypoints_{name}"
    return reading.read(reading.find(name, root), TASKS[task])


def prepare(root, task, *opts, engine="torchvision"):
    words = ("MODEL.WEIGHTS", "random", *opts)
    out = root.parent / "run"
    name = f"tiny_{task}_rcnn_R_18_FPN"
    return train_net.prepare(run_of_config(name, root, out, words, engine=engine))


# Boxes. The scenes have 128 x 128 pixels, so x and y are told apart in wider ones only.


def widened(content):
    """Make the file one of 256 x 128 pixels."""
    for image in content["images"]:
        image["width"] = 256
    for row in content["annotations"]:
        x, y, w, h = row["bbox"]
        row["bbox"] = [2 * x, y, 2 * w, h]
        row["area"] *= 2


def boxes_as(convert):
    """Return a change that writes all boxes in another format."""
    return each(lambda row: row.update(bbox=convert(*row["bbox"])))


def thousandths(x, y, w, h):
    """Return the corners of a box from 0 to 1000 in an image of 256 x 128 pixels."""
    return [x / 0.256, y / 0.128, (x + w) / 0.256, (y + h) / 0.128]


@pytest.mark.parametrize(
    ("convert", "words"),
    [
        pytest.param(
            lambda x, y, w, h: [x, y, x + w, y + h],
            r"reach outside .* all fit as corners \[x1, y1, x2, y2\]; first annotation \d+: ",
            id="corners",
        ),
        pytest.param(
            lambda x, y, w, h: [y, x, y + h, x + w],
            r"all fit as corners with y first",
            id="corners with y first",
        ),
        pytest.param(
            lambda x, y, w, h: [x / 256, y / 128, w / 256, h / 128],
            "lie between 0 and 1, so they are normalised",
            id="normalised",
        ),
        pytest.param(
            thousandths,
            "thousandths of the image's sides",
            id="thousandths",
        ),
        pytest.param(
            lambda x, y, w, h: [x - 1000, y, w, h],
            r"none of \d+ boxes touches its image",
            id="beside",
        ),
        pytest.param(
            lambda x, y, w, h: [4 * x, 4 * y, 4 * w, 4 * h],
            "have their middle outside their image, .* of another size",
            id="of larger images",
        ),
        pytest.param(
            lambda x, y, w, h: [x, y, 0, h],
            "no box has a width and a height",
            id="without width",
        ),
    ],
)
@pytest.mark.parametrize("part", ["train", "val"])
def test_boxes_in_another_format_are_refused(root, convert, words, part):
    edit(root, widened, part=part)
    assert read(root, part=part).notes == ()
    edit(root, boxes_as(convert), part=part)
    with pytest.raises(BadInput, match=words) as refused:
        read(root, part=part)
    assert f"instances_{part}2017.json: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_centres_are_noticed():
    """A box around its centre reaches outside only near the right and the lower edge."""
    from backbench.detection.data import box_format

    rng = np.random.default_rng(0)
    corners = np.sort(rng.uniform(0, 100, (50, 2, 2)), 1)
    middle = corners.mean(1)
    values = np.concatenate([middle, corners[:, 1] - corners[:, 0]], 1)
    boxes = box_format.Boxes("annotation", range(50), values, np.full((50, 2), 100.0))
    with pytest.raises(BadInput, match=r"all fit as \[centre x, centre y, width"):
        box_format.check(boxes)


def test_whole_objects_that_reach_outside_are_only_counted(root):
    """Some sets state the hidden part of an object, too."""

    def grown(row):
        x, y, w, h = row["bbox"]
        row["bbox"] = [x - 2 * w, y - 2 * h, 5 * w, 5 * h]

    edit(root, each(grown))
    (note,) = read(root).notes
    assert "boxes reach outside their image" in note
    assert "first annotation " in note


def test_outlines_away_from_their_boxes_are_refused(root):
    def moved(row):
        row["segmentation"] = [[v / 2 for v in part] for part in row["segmentation"]]

    edit(root, each(moved), "mask")
    assert read(root).notes == ()
    with pytest.raises(BadInput, match="outlines leave their box"):
        read(root, "mask")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lambda k: [v / 128 if i % 3 < 2 else v for i, v in enumerate(k)],
            "between 0 and 1, so they are normalised",
            id="normalised",
        ),
        pytest.param(
            lambda k: [v + 999 if i % 3 < 2 else v for i, v in enumerate(k)],
            "marked keypoints is in its image",
            id="outside",
        ),
        pytest.param(
            lambda k: [k[0] + 999, k[1] + 999, 2] + [0] * (len(k) - 3),
            "marked keypoints is in its image",
            id="one outside, the others unmarked",
        ),
        pytest.param(
            lambda k: [0 if i % 3 == 2 else v for i, v in enumerate(k)],
            "every keypoint has visibility 0",
            id="unmarked",
        ),
    ],
)
def test_keypoints_in_another_format_are_refused(root, change, words):
    edit(
        root,
        each(lambda row: row.update(keypoints=change(row["keypoints"]))),
        "keypoint",
    )
    with pytest.raises(BadInput, match=words):
        read(root, "keypoint")


# What a file lacks


def scores_of(root, task, kind):
    """Score detections that are a little off the objects of the val file as it was first."""
    split = read(root, task, "val")
    truth = json.loads((root.parent / "first.json").read_text())
    found = []
    for number, row in enumerate(truth["annotations"]):
        x, y, w, h = row["bbox"]
        shift = number % 4
        detection = {
            "image_id": row["image_id"],
            "category_id": row["category_id"],
            "bbox": [x + shift, y, w, h],
            "score": 0.9 - number / 1000,
        }
        if kind == "keypoints":
            points = list(row["keypoints"])
            points[0::3] = [v + shift for v in points[0::3]]
            detection["keypoints"] = points
        elif kind == "segm":
            detection["segmentation"] = run_lengths(row["segmentation"])
        found.append(detection)
    return split, evaluate.score(split, found, kind, SIGMAS, manifest=None).values


def keep_first(root, task):
    kind = "person_keypoints" if task == "keypoint" else "instances"
    file = root / "scenes" / "annotations" / f"{kind}_val2017.json"
    shutil.copy(file, root.parent / "first.json")


def run_lengths(polygons):
    """Return the compressed run lengths of an object in 128 x 128 pixels."""
    parts = mask.frPyObjects([[float(v) for v in part] for part in polygons], 128, 128)
    merged = mask.merge(parts)
    return {"size": [128, 128], "counts": merged["counts"].decode()}


def plain_run_lengths(polygons):
    """Return the run lengths as plain numbers."""
    pixels = mask.decode(run_lengths(polygons)).reshape(-1, order="F")
    edges = np.flatnonzero(np.diff(pixels)) + 1
    counts = np.diff([0, *edges, len(pixels)]).tolist()
    if pixels[0]:
        counts.insert(0, 0)
    return {"size": [128, 128], "counts": counts}


@pytest.mark.parametrize("task", ["faster", "keypoint"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda row: row.update(area=0), id="0"),
        pytest.param(lambda row: row.update(area=None), id="null"),
        pytest.param(lambda row: row.pop("area"), id="missing"),
    ],
)
def test_areas_are_computed(root, task, change):
    kind = "keypoints" if task == "keypoint" else "bbox"
    keep_first(root, task)
    # The area of the polygons, as COCO's files have it
    edit(
        root,
        each(lambda row: row.update(area=outlines.area(row["segmentation"]))),
        task,
        "val",
    )
    split, right = scores_of(root, task, kind)
    assert split.notes == ()
    assert right["AP"] > 10
    edit(root, each(change), task, "val")
    split, computed = scores_of(root, task, kind)
    (note,) = split.notes
    assert "areas are missing or 0: computed" in note
    assert computed == right


def test_areas_that_are_no_pixels_are_said(root):
    edit(root, each(lambda row: row.update(area=row["area"] / 128**2)))
    (note,) = read(root).notes
    assert "one of the two is not in pixels" in note


def test_the_number_of_keypoints_is_counted(root):
    keep_first(root, "keypoint")
    split, right = scores_of(root, "keypoint", "keypoints")
    assert right["AP"] > 10
    edit(root, each(lambda row: row.update(num_keypoints=0)), "keypoint", "val")
    split, counted = scores_of(root, "keypoint", "keypoints")
    (note,) = split.notes
    assert "counted anew" in note
    assert counted == right


def contents(root, task, part="train"):
    kind = "person_keypoints" if task == "keypoint" else "instances"
    file = root / "scenes" / "annotations" / f"{kind}_{part}2017.json"
    return json.loads(file.read_text())


def box_around(segmentation):
    """Return the box of polygons by numpy, of run lengths by pycocotools."""
    if isinstance(segmentation, list):
        points = np.concatenate([np.reshape(part, (-1, 2)) for part in segmentation])
        low, high = points.min(0), points.max(0)
        return [*low.tolist(), *(high - low).tolist()]
    code = segmentation
    if isinstance(code["counts"], list):
        code = mask.frPyObjects(code, *code["size"])
    return mask.toBbox(code).tolist()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("encode", [None, run_lengths, plain_run_lengths])
def test_boxes_are_computed_from_outlines(root, task, encode):
    def unboxed(row):
        row["bbox"] = None
        if encode:
            row["segmentation"] = encode(row["segmentation"])

    def first_outline(content):
        content["annotations"][0].pop("segmentation")

    edit(root, each(unboxed), task)
    edit(root, without("bbox"), task)
    split = read(root, task)
    assert any("boxes are missing: computed from outlines" in n for n in split.notes)
    computed = {}
    for record in split.records:
        for annotation in record["annotations"]:
            mine = computed.setdefault(record["image_id"], [])
            mine.append(annotation["bbox"])
    expected = {}
    for row in contents(root, task)["annotations"]:
        theirs = expected.setdefault(row["image_id"], [])
        theirs.append(box_around(row["segmentation"]))
    assert computed == expected
    edit(root, first_outline, task)
    with pytest.raises(BadInput, match="no 'bbox', and no outline to compute it from"):
        read(root, task)


def test_outlines_of_run_lengths_are_measured_as_pycocotools_does():
    rng = np.random.default_rng(0)
    for _ in range(20):
        pixels = np.asfortranarray(rng.random((9, 7)) < 0.1, np.uint8)
        code = mask.encode(pixels)
        outline = {"size": [9, 7], "counts": code["counts"].decode()}
        if not pixels.any():
            assert outlines.bounding_box(outline) is None
            assert outlines.area(outline) is None
            continue
        assert outlines.bounding_box(outline) == mask.toBbox(code).tolist()
        assert outlines.area(outline) == mask.area(code)


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        "x",
        [],
        [[1, 2, 3, 4]],
        [[1, 2, 3, 4, 5, "6"]],
        [1, 2, 3],
        {},
        {"size": "x", "counts": [1, 2]},
        {"size": [0, 3], "counts": [1, 2]},
        {"size": [2, 2], "counts": "~~é"},
        {"size": [2, 2], "counts": [4, -1]},
    ],
)
def test_what_is_no_outline_has_no_box_and_no_area(damaged):
    assert outlines.bounding_box(damaged) is None
    assert outlines.area(damaged) in (None, 2)


# Masks as run lengths


@pytest.mark.parametrize("encode", [run_lengths, plain_run_lengths])
def test_run_length_masks_are_scored(root, encode):
    keep_first(root, "mask")
    _, right = scores_of(root, "mask", "segm")
    assert right["AP"] > 90

    def encoded(row):
        row["segmentation"] = encode(row["segmentation"])

    edit(root, each(encoded), "mask", "val")
    split, scored = scores_of(root, "mask", "segm")
    assert split.notes == ()
    assert scored == right
    lint.files(prepare(root, "mask"))


@pytest.mark.parametrize("engine", ENGINES)
def test_run_length_masks_are_trained_on_as_bitmaps(root, engine):
    def encoded(content):
        for row in content["annotations"][::2]:
            row["segmentation"] = plain_run_lengths(row["segmentation"])

    edit(root, encoded, "mask")
    with pytest.raises(BadInput, match=r"add INPUT\.MASK_FORMAT bitmask"):
        prepare(root, "mask", engine=engine)
    with pytest.raises(BadInput, match="MASK_FORMAT rle: polygon or bitmask"):
        prepare(root, "mask", "INPUT.MASK_FORMAT", "rle", engine=engine)
    words = ("MODEL.WEIGHTS", "random", *BITMASK)
    run = run_of_config(
        "tiny_mask_rcnn_R_18_FPN", root, root.parent / "run", words, engine=engine
    )
    p, network = built(run)
    network.start(training_records(p.train, p.task), 0, 1)
    network.model.train()
    losses = network.step()
    assert all(value.isfinite() for value in losses.values())
    assert losses["loss_mask"] > 0


@needs_detectron2
def test_bitmaps_are_detectron2s(root):
    """Polygons and run lengths, resized and mirrored, then cropped to boxes."""
    from detectron2.data import transforms
    from detectron2.data.detection_utils import (
        annotations_to_instances,
        transform_instance_annotations,
    )

    from backbench.detection import engine_detectron2

    def encoded(content):
        for row in content["annotations"][::2]:
            row["segmentation"] = run_lengths(row["segmentation"])

    edit(root, encoded, "mask")
    height, width = 150, 190
    resize = transforms.ResizeTransform(128, 128, height, width)
    for mirrored in (False, True):
        steps = [resize]
        if mirrored:
            steps.append(transforms.HFlipTransform(width))
        for record in read(root, "mask").records[:4]:
            mine = images.targets(
                record,
                height,
                width,
                mirrored=mirrored,
                flip_map=[],
                task=MASK_RCNN,
                bitmasks=True,
            )
            rows = engine_detectron2.standard_dict(record)["annotations"]
            theirs = annotations_to_instances(
                [
                    transform_instance_annotations(
                        dict(row), transforms.TransformList(steps), (height, width)
                    )
                    for row in rows
                ],
                (height, width),
                "bitmask",
            )
            assert torch.equal(mine["bitmaps"], theirs.gt_masks.tensor)
            of_box = torch.arange(len(rows)).repeat(2)
            boxes = mine["boxes"].repeat(2, 1)
            boxes[: len(rows)] += 3.3
            cropped = crop(mine["bitmaps"], of_box, boxes, 28)
            expected = theirs.gt_masks[of_box].crop_and_resize(boxes, 28)
            assert torch.equal(cropped.bool(), expected)


def test_no_objects_have_no_bitmaps():
    none = torch.zeros(0, 8, 8, dtype=torch.bool)
    cropped = crop(none, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), 28)
    assert cropped.shape == (0, 28, 28)


# Sides


@pytest.mark.parametrize(
    ("names", "partners"),
    [
        (["nose", "left_eye", "right_eye"], [0, 2, 1]),
        (["Left", "Right", "eye_R", "eye_L"], [1, 0, 3, 2]),
        (["L", "R"], [1, 0]),
        (["l_hip", "r_hip", "hip_r", "hip_l"], [1, 0, 3, 2]),
        (["l eye", "R eye", "nose"], [1, 0, 2]),
        (["LEye", "REye", "earL", "earR"], [1, 0, 3, 2]),
        (["lefteye", "RightEye"], [1, 0]),
        (["lhip", "rhip"], [1, 0]),
        (["LF_paw", "RF_paw"], [1, 0]),
        (["left-eye", "RIGHT-EYE"], [1, 0]),
        (["upper left", "upper right"], [1, 0]),
        (
            [
                "left_eye_left_corner",
                "left_eye_right_corner",
                "right_eye_left_corner",
                "right_eye_right_corner",
            ],
            [3, 2, 1, 0],
        ),
        # The second side, the second word, the last letter, the middle of a word
        (["left_row_left", "left_row_right"], [1, 0]),
        (["rail_lhip", "rail_rhip", "hipl", "hipr"], [1, 0, 3, 2]),
        (["upperleftlower", "upperrightlower"], [1, 0]),
        # No sides
        (["upright", "bright", "cleft"], [0, 1, 2]),
        (list("ABCDLR"), [0, 1, 2, 3, 4, 5]),
        (["L1", "L2", "T1"], [0, 1, 2]),
        (["rear", "tail", "leg"], [0, 1, 2]),
    ],
)
def test_sides_are_found_by_name(names, partners):
    assert sides.partners(names) == partners
    assert sides.unpaired(names) == []


@pytest.mark.parametrize(
    ("names", "alone", "other"),
    [
        (["left_eye", "nose"], "left_eye", "right_eye"),
        (["Right", "nose"], "Right", "Left"),
        (["eye_L", "eye"], "eye_L", "eye_R"),
        (["lefteye", "righthand"], "lefteye", "righteye"),
    ],
)
def test_a_side_alone_is_noticed(names, alone, other):
    assert sides.unpaired(names)[0] == alone
    assert sides.opposite(alone) == other


def renamed(*names):
    return lambda content: content["categories"][0].update(keypoints=list(names))


@pytest.mark.parametrize("engine", ENGINES)
def test_mirrored_images_need_pairs_of_sides(root, caplog, engine):
    caplog.set_level("INFO")
    alone = renamed("Left", "Right", "eye_L", "mouth", "nose")
    pairs = renamed("Left", "Right", "eye_L", "eye_R", "nose")
    for part in ("train", "val"):
        edit(root, alone, "keypoint", part)
    with pytest.raises(BadInput, match=r"'eye_L' has no partner .*RANDOM_FLIP none"):
        prepare(root, "keypoint", *FLIPPED, engine=engine)
    prepare(root, "keypoint", engine=engine)
    assert "mirrored images" not in caplog.text
    for part in ("train", "val"):
        edit(root, pairs, "keypoint", part)
    p = prepare(root, "keypoint", *FLIPPED, engine=engine)
    assert p.train.flip == [1, 0, 3, 2, 4]
    said = "mirrored images swap Left and Right, eye_L and eye_R; no side: nose"
    assert said in caplog.text


# Images

SHORTER = 24  # the shorter side of the turned image


@pytest.fixture(scope="module")
def reader(one_trunk, tiny_root, tmp_path_factory):
    """Build the detector of each engine that reads a record of `SHORTER` as it is, once: to read
    changes nothing in it."""

    @functools.cache
    def of(engine):
        out = tmp_path_factory.mktemp("run")
        words = ("MODEL.WEIGHTS", "random", "INPUT.MIN_SIZE_TEST", str(SHORTER))
        name = "tiny_faster_rcnn_R_18_FPN"
        _, network = built(run_of_config(name, tiny_root, out, words, engine=engine))
        return network

    return of


@pytest.mark.parametrize("suffix", ["png", "tiff", "TIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_format_is_read_as_shown(
    root, reader, caplog, *, suffix, orientation, engine
):
    """Of an image that is turned, both engines read the pixels that a viewer shows."""
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 255, (SHORTER, 40, 3), dtype=np.uint8)
    shown = {
        1: stored,
        3: stored[::-1, ::-1],
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
    }
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    name = f"turned.{suffix}"
    file = root / "scenes" / "train2017" / name
    Image.fromarray(stored).save(file, exif=exif)
    height, width = shown[orientation].shape[:2]

    def first_image(content):
        id = content["images"][0]["id"]
        content["images"][0].update(file_name=name, width=width, height=height)
        for row in content["annotations"]:
            if row["image_id"] == id:
                row["bbox"] = [1, 1, 9, 9]

    edit(root, first_image)
    # 1. The size that is shown is right, ...
    p = prepare(root, "faster", engine=engine)
    lint.files(p)
    assert ("EXIF orientation" in caplog.text) is (orientation != 1)
    record = p.train.records[0]
    read_by_engine = reader(engine).read(record)
    if engine == "detectron2":
        read_by_engine = read_by_engine["image"]
    pixels = read_by_engine.permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels, shown[orientation])
    # 2. ... and the size as stored is refused.
    if orientation in (6, 7):
        record.update(width=height, height=width)
        with pytest.raises(BadInput, match=r"EXIF orientation \d turns it.*exiftool"):
            images.check_file(record)


@pytest.mark.parametrize("name", ["a.tif", "a.jpg"])
def test_a_tiff_is_turned_once_whatever_its_name_is(tmp_path, name):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    Image.new("RGB", (8, 12)).save(tmp_path / name, format="TIFF", exif=exif)
    record = {"width": 12, "height": 8, "file_name": str(tmp_path / name)}
    assert images.check_file(record).turned
    assert images.load_image(record).size == (12, 8)


@pytest.mark.parametrize("engine", ENGINES)
def test_val_images_that_are_trained_on_are_refused(root, caplog, engine):
    """They are found as copies, under whatever name."""
    train = root / "scenes" / "train2017"
    val = root / "scenes" / "val2017"
    _, second, third = sorted(val.iterdir())[:3]
    target = sorted(train.iterdir())[4]
    lint.files(prepare(root, "faster", engine=engine))
    kept = target.read_bytes()
    shutil.copy(third, target)
    p = prepare(root, "faster", engine=engine)
    # The tiny configs score the first two images only.
    assert len(p.val.records) == 2
    lint.files(p)
    target.write_bytes(kept)
    shutil.copy(second, target)
    with pytest.raises(BadInput, match=f"1 of 2 val images .*{second.name}, the same"):
        lint.files(prepare(root, "faster", engine=engine))


def test_a_few_shared_images_are_only_said(root, caplog, monkeypatch):
    monkeypatch.setattr(lint, "SHARED", 0.5)
    val = sorted((root / "scenes" / "val2017").iterdir())
    train = sorted((root / "scenes" / "train2017").iterdir())
    shutil.copy(val[0], train[3])
    lint.files(prepare(root, "faster"))
    assert "1 of 2 val images are trained on" in caplog.text


# Before any training: `data check`


def test_data_check_says_what_detect_would(root, capsys):
    from backbench.requests.data import DataCheckRequest

    request = DataCheckRequest(name="scenes", data=root, record=False)
    assert data_verb.run_check(request).status == 0
    assert "mirrored images swap" in capsys.readouterr().out
    edit(root, each(lambda row: row.update(num_keypoints=0)), "keypoint", "val")
    edit(root, renamed("left_eye", "b", "c", "d", "e"), "keypoint", "val")
    edit(root, each(lambda r: r.update(bbox=[v / 128 for v in r["bbox"]])))
    assert data_verb.run_check(request).status == 1
    problems = [
        line for line in capsys.readouterr().out.splitlines() if "PROBLEM" in line
    ]
    assert len(problems) == 3
    assert "instances_train2017.json: " in problems[0]
    assert "normalised" in problems[0]
    assert "counted anew" in problems[1]
    assert "without a partner of the other side: left_eye" in problems[2]
