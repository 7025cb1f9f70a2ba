"""Keypoints of one's own in YOLO's text: one set in COCO's json and in it is one set."""

import json
import re
import shutil

import pytest
from support import own_boxes
from support.detection_runs import overrides
from support.records import rows_of

from backbench.cli import program
from backbench.datasets import box_labels
from backbench.datasets.boxes import box_folders
from backbench.detection.data import own
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN, MASK_RCNN
from backbench.errors import BadInput

pytestmark = pytest.mark.usefixtures("one_trunk")

# A detector of seconds
SMALL = overrides(
    {
        "MODEL.WEIGHTS": "random",
        "MODEL.TRUNK.ARCH": "timm:test_convnext",
        "MODEL.FPN.OUT_CHANNELS": 16,
        "MODEL.ROI_BOX_HEAD.FC_DIM": 16,
        "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": "[8]",
        "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
        "MODEL.RPN.POST_NMS_TOPK_TEST": 20,
        "INPUT.MIN_SIZE_TRAIN": "(64,)",
        "INPUT.MIN_SIZE_TEST": 64,
        "DATALOADER.NUM_WORKERS": 0,
        "SOLVER.EPOCHS": 1,
    }
)
TEXT = "labels/train/train_1.txt"
YAML = "data.yaml"


@pytest.fixture(scope="session")
def posed(tmp_path_factory):
    """The set with keypoints in each layout, under one name."""
    above = tmp_path_factory.mktemp("posed")
    return {
        "COCO": own_boxes.posed_coco(above / "coco" / "mine"),
        "YOLO": own_boxes.posed_yolo(above / "yolo" / "mine"),
    }


@pytest.fixture
def folder(posed, tmp_path):
    return shutil.copytree(posed["YOLO"], tmp_path / "mine")


def edited(file, pattern, after):
    text = file.read_text()
    assert re.search(pattern, text)
    file.write_text(re.sub(pattern, after, text, count=1))


def detect(base, out, *more):
    line = ["detect", "--dataset", "mine", "--data", str(base.parent)]
    line += ["--config-file", "keypoint_rcnn_own", "--out", str(out)]
    return program.main([*line, "--engine", "torchvision", *SMALL, *more])


def points(split):
    """Return the keypoints of all objects of a list."""
    found = []
    for record in split.records:
        found += [each["keypoints"] for each in record["annotations"]]
    return found


def test_both_layouts_are_one_set(posed):
    for task in (KEYPOINT_RCNN, FASTER_RCNN):
        lists = {name: own.read(base, task) for name, base in posed.items()}
        for mine, theirs in zip(*lists.values(), strict=True):
            assert theirs.fingerprint == mine.fingerprint
            assert theirs.keypoints == mine.keypoints
    train, test = lists["YOLO"] = own.read(posed["YOLO"], KEYPOINT_RCNN)
    assert train.keypoints == own_boxes.KEYPOINTS
    assert points(train) == points(own.read(posed["COCO"], KEYPOINT_RCNN)[0])
    assert train.flip == test.flip == list(own_boxes.PARTNERS)


@pytest.mark.slow
def test_both_layouts_give_equal_numbers(posed, tmp_path):
    found = {}
    for name, base in posed.items():
        assert detect(base, tmp_path / name) == 0
        rows = rows_of(tmp_path / name)
        assert {row.task for row in rows} == {"keypoint_rcnn"}
        predictions = json.loads((tmp_path / name / "predictions.json").read_text())
        assert predictions
        found[name] = (
            [(row.metric, row.value, row.ci95) for row in rows],
            [(each["keypoints"], each["score"]) for each in predictions],
        )
    assert found["YOLO"] == found["COCO"]


def test_a_mirrored_image_swaps_what_flip_idx_says(folder):
    """Names alone would swap none of these, and the list is another one then."""
    names = ["a", "b", "c"]
    edited(folder / YAML, r"kpt_names: .*", f"kpt_names: {{0: {names}}}")
    swapped = own.read(folder, KEYPOINT_RCNN)[0]
    assert swapped.keypoints == ("a", "b", "c")
    assert swapped.flip == [1, 0, 2]
    edited(folder / YAML, r"flip_idx: .*", "flip_idx: [0, 1, 2]")
    kept = own.read(folder, KEYPOINT_RCNN)[0]
    assert kept.flip == [0, 1, 2]
    assert kept.fingerprint != swapped.fingerprint


def test_names_are_those_of_the_description(folder):
    edited(folder / YAML, r"kpt_names: .*", f"kpt_names: {list(own_boxes.KEYPOINTS)}")
    assert own.read(folder, KEYPOINT_RCNN)[0].keypoints == own_boxes.KEYPOINTS
    edited(folder / YAML, r"kpt_names: .*", "")
    by_place = ("keypoint_1", "keypoint_2", "keypoint_3")
    assert own.read(folder, KEYPOINT_RCNN)[0].keypoints == by_place
    # Names that state their sides need no flip_idx
    edited(folder / YAML, r"flip_idx: .*", f"kpt_names: {list(own_boxes.KEYPOINTS)}")
    assert own.read(folder, KEYPOINT_RCNN)[0].flip == [1, 0, 2]


def test_keypoints_of_two_numbers_are_visible_but_at_0_0(posed, tmp_path):
    base = own_boxes.posed_yolo(tmp_path / "mine", numbers=2)
    mine = points(own.read(base, KEYPOINT_RCNN)[0])
    theirs = points(own.read(posed["COCO"], KEYPOINT_RCNN)[0])
    for ours, others in zip(mine, theirs, strict=True):
        assert [ours[0::3], ours[1::3]] == [others[0::3], others[1::3]]
        assert ours[2::3] == [2 if mark else 0 for mark in others[2::3]]
    # On an edge, and left of it
    line = "0 0.5 0.5 0.5 0.5 {} 0.5 0.5 0.5 0.5 0.5"
    for x, mark in (("0", 2), ("-0.0005", 0)):
        (base / TEXT).write_text(line.format(x))
        assert points(own.read(base, KEYPOINT_RCNN)[0])[0][2] == mark


def test_boxes_with_keypoints_are_boxes_for_other_readings(folder):
    boxes = box_folders.must_find(folder)
    assert not boxes.has_outlines()
    assert own.read(folder, FASTER_RCNN)[0].categories == ("fish",)
    with pytest.raises(BadInput, match=r"data\.yaml: describes boxes with keypoints"):
        own.read(folder, MASK_RCNN)
    assert box_labels.read(folder, 0).train.classes == ("fish",)


def test_data_check_says_the_keypoints(posed, folder, capsys):
    expected = (
        "mine: 3 keypoints (left_eye, right_eye, tail), 60 of 72 marked; mirrored images swap"
        " left_eye and right_eye; no side: tail"
    )
    for base in posed.values():
        assert program.main(["data", "check", "mine", "--data", str(base.parent)]) == 0
        assert expected in capsys.readouterr().out
    # What `detect` refuses
    edited(folder / YAML, r"(?s)flip_idx: .*", "")
    assert program.main(["data", "check", "mine", "--data", str(folder.parent)]) == 1
    assert "neither flip_idx nor kpt_names" in capsys.readouterr().out


LINE = "0 0.5 0.5 0.5 0.5 0.5 0.5 2 0.4 0.4 2 0.3 0.3 {}"
WRONG = {
    "numbers that do not fit": (
        lambda b: (b / TEXT).write_text("0 0.5 0.5 0.5 0.5 0.5 0.5 2"),
        r"line 1: 7 numbers behind the class; kpt_shape \[3, 3\] asks for 13",
    ),
    "a coordinate above 1": (
        lambda b: (b / TEXT).write_text(LINE.replace("0.4", "1.4").format(2)),
        "line 1: '1.4' is no share of the image's side",
    ),
    "a visibility of 3": (
        lambda b: (b / TEXT).write_text(LINE.format(3)),
        "line 1: keypoint 2: visibility '3'; it is 0",
    ),
    "a visibility that is no number": (
        lambda b: (b / TEXT).write_text(LINE.format("v")),
        "keypoint 2: visibility 'v'",
    ),
    "no kpt_shape": (
        lambda b: edited(b / YAML, "kpt_shape: .*", ""),
        "data.yaml: has flip_idx and no kpt_shape",
    ),
    "a kpt_shape of one number": (
        lambda b: edited(b / YAML, r"\[3, 3\]", "[9]"),
        r"kpt_shape \[9\] is not \[K, 2\] or \[K, 3\]",
    ),
    "a kpt_shape of no keypoints": (
        lambda b: edited(b / YAML, r"\[3, 3\]", "[0, 3]"),
        r"kpt_shape \[0, 3\] is not",
    ),
    "a kpt_shape of four": (
        lambda b: edited(b / YAML, r"\[3, 3\]", "[3, 4]"),
        r"kpt_shape \[3, 4\]: a keypoint has 2 numbers",
    ),
    "a flip_idx of fewer": (
        lambda b: edited(b / YAML, r"\[1, 0, 2\]", "[1, 0]"),
        r"flip_idx \[1, 0\] does not have each of 0 to 2 once",
    ),
    "a flip_idx with one twice": (
        lambda b: edited(b / YAML, r"\[1, 0, 2\]", "[1, 1, 2]"),
        r"flip_idx \[1, 1, 2\] does not have each of 0 to 2 once",
    ),
    "a flip_idx in a circle": (
        lambda b: edited(b / YAML, r"\[1, 0, 2\]", "[1, 2, 0]"),
        "flip_idx: keypoint 0 becomes 1, but 1 becomes 2",
    ),
    "a flip_idx against the names": (
        lambda b: edited(b / YAML, r"\[1, 0, 2\]", "[0, 1, 2]"),
        "flip_idx does not exchange 'left_eye' and 'right_eye'",
    ),
    "too few names": (
        lambda b: edited(b / YAML, ", 'tail'", ""),
        "kpt_names has 2 names for class 0, and kpt_shape says 3",
    ),
    "a name twice": (
        lambda b: edited(b / YAML, "tail", "left_eye"),
        "two keypoints of class 0 are called 'left_eye'",
    ),
    "nothing that tells the sides": (
        lambda b: edited(b / YAML, "(?s)flip_idx: .*", ""),
        r"neither flip_idx nor kpt_names .* write `flip_idx: \[0, 1, 2\]` if none do",
    ),
    "two classes": (
        lambda b: edited(b / YAML, r"(?s)\[fish\](.*)kpt_names: .*", r"[fish, bird]\1"),
        r"keypoints need one category .* this has 2 \(fish, bird\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_keypoints_are_named_in_one_line(folder, tmp_path, bad_input, case):
    spoil, expected = WRONG[case]
    spoil(folder)
    status = detect(folder, tmp_path / "runs")
    said = bad_input(status)
    assert re.search(expected, said), said
    assert not (tmp_path / "runs").exists()


def spoiled(base, split, change):
    """Copy the set in COCO's layout, and change its list of a split."""
    file = base / "annotations" / f"instances_{split}.json"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


@pytest.mark.parametrize("visibility", [5, -1, 0.5])
def test_visibilities_of_cocos_json_are_0_1_or_2(posed, tmp_path, visibility):
    base = shutil.copytree(posed["COCO"], tmp_path / "mine")
    spoiled(
        base,
        "train",
        lambda about: about["annotations"][1]["keypoints"].__setitem__(5, visibility),
    )
    expected = f"annotation 2: keypoint 1: visibility {visibility}; it is 0"
    with pytest.raises(BadInput, match=expected):
        own.read(base, KEYPOINT_RCNN)


@pytest.mark.parametrize("split", ["val", "test"])
def test_lists_name_their_keypoints_alike(posed, tmp_path, split):
    """Lists are trained and scored by the keypoints' places."""
    base = shutil.copytree(posed["COCO"], tmp_path / "mine")
    spoiled(base, split, lambda about: about["categories"][0]["keypoints"].reverse())
    expected = f"instances_{split}.json: its keypoint 0 is 'tail', and 'left_eye' in"
    with pytest.raises(BadInput, match=expected):
        own.read(base, KEYPOINT_RCNN)


@pytest.mark.parametrize("mark", ["2", "1"])
def test_keypoints_that_nothing_describes_are_no_outlines(folder, tmp_path, mark):
    """Three keypoints behind a box of four numbers could be an outline, but for their marks."""
    edited(folder / YAML, "(?s)kpt_shape: .*", "")
    for file in folder.rglob("labels/*/*.txt"):
        file.write_text(f"0 0.5 0.5 0.5 0.5 0.5 0.4 {mark} 0.4 0.4 1\n")
    expected = r"line 1: a box and 2 keypoints .* write `kpt_shape: \[2, 3\]` into"
    with pytest.raises(BadInput, match=expected):
        own.read(folder, FASTER_RCNN)


def test_keypoints_without_sides_train_unmirrored(folder, tmp_path):
    edited(folder / YAML, "(?s)flip_idx: .*", "")
    assert detect(folder, tmp_path / "runs", "INPUT.RANDOM_FLIP", "none") == 0


def test_boxes_alone_have_no_keypoints(tmp_path, bad_input):
    base = own_boxes.yolo(tmp_path / "mine")
    status = detect(base, tmp_path / "runs")
    bad_input(status, "no data.yaml has kpt_shape, and keypoint_rcnn needs keypoints")
