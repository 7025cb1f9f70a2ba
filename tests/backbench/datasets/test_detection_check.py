"""What `data check` says of COCO's and VOC's own layouts: counts, and what is missing."""

import json

import pytest
from PIL import Image

from backbench.datasets import detection_check
from backbench.errors import BadInput


def nothing(file, folder):
    return [], []


def pictures(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (3, 2)).save(folder / name)


def coco(base, split, names, objects):
    (base / "annotations").mkdir(parents=True, exist_ok=True)
    about = {
        "images": [{"file_name": name} for name in names],
        "annotations": [{}] * objects,
    }
    (base / "annotations" / f"instances_{split}.json").write_text(json.dumps(about))


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_cocos_files_are_counted_and_inspected(tmp_path, capsys):
    base = tmp_path / "mine"
    for split, count in (("train", 3), ("val", 2)):
        names = [f"{i}.jpg" for i in range(count)]
        coco(base, split, names, objects=count + 4)
        pictures(base / split, names)
    looked_at = []

    def inspect(file, folder):
        looked_at.append((file.name, folder))
        return ([], [f"{file.name}: worth saying"]) if len(looked_at) == 1 else ([], [])

    assert detection_check.check("mine", tmp_path, inspect) == []
    assert lines(capsys) == [
        "mine: instances_train.json: 3 images, 7 objects",
        "mine: instances_train.json: worth saying",
        "mine: instances_val.json: 2 images, 6 objects",
        "mine: all right",
    ]
    assert looked_at == [
        ("instances_train.json", base / "train"),
        ("instances_val.json", base / "val"),
    ]


def test_problems_are_counted_and_missing_images_named(tmp_path, capsys):
    base = tmp_path / "mine"
    for split in ("train", "val"):
        coco(base, split, ["1.jpg", "2.jpg", "3.jpg"], objects=1)
    pictures(base / "train", ["1.jpg"])
    pictures(base / "val", ["1.jpg", "2.jpg", "3.jpg"])

    def inspect(file, folder):
        assert file.name == "instances_val.json", "images are missing of the other"
        return ["a box without a side", "another"], ["worth saying"]

    wrong = detection_check.check("mine", tmp_path, inspect)
    missing = f"2 files are missing, {base / 'train' / '2.jpg'} first"
    assert lines(capsys) == [
        f"mine: PROBLEM: instances_train.json: 3 images, 1 objects; {missing}",
        "mine: instances_val.json: 3 images, 1 objects",
        "mine: PROBLEM: a box without a side",
        "mine: PROBLEM: another",
        "mine: worth saying",
        "mine: 3 problems",
    ]
    assert wrong is not None and wrong[1:] == ["a box without a side", "another"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"images": [{}]}', "KeyError: 'file_name'"),
        ('{"images": [{"file_name": 3}]}', "TypeError: file_name 3 is no text"),
        ('{"images": [], "annotations": 3}', "TypeError"),
    ],
)
def test_what_is_not_cocos_is_said(tmp_path, text, says):
    folder = tmp_path / "mine" / "annotations"
    folder.mkdir(parents=True)
    file = folder / "instances_val.json"
    file.write_text(text)
    with pytest.raises(BadInput) as refused:
        detection_check.check("mine", tmp_path, nothing)
    said = str(refused.value)
    assert said.startswith(f"{file}: not COCO's format (")
    assert says in said


def test_a_folder_of_annotations_without_files(tmp_path):
    folder = tmp_path / "mine" / "annotations"
    folder.mkdir(parents=True)
    (folder / "readme.json").write_text("{}")
    with pytest.raises(BadInput) as refused:
        detection_check.check("mine", tmp_path, nothing)
    said = f"{folder}: no file instances_<split>.json; get COCO's"
    assert str(refused.value) == said


def voc(base, lists, names):
    (base / "ImageSets" / "Main").mkdir(parents=True)
    (base / "Annotations").mkdir()
    for name, content in lists.items():
        (base / "ImageSets" / "Main" / f"{name}.txt").write_text(content)
    pictures(base / "JPEGImages", [f"{name}.jpg" for name in names])
    for name in names:
        (base / "Annotations" / f"{name}.xml").touch()


@pytest.mark.parametrize("years", [("VOC2007", "VOC2012"), (".",)])
def test_vocs_lists_are_counted_in_each_year(tmp_path, capsys, years):
    base = tmp_path / "voc"
    for year in years:
        # A list of a class has a flag behind each name; blank lines are none
        lists = {"cat_train": "9 1\n", "test": "c\n", "train": "a  1\n\nb -1\n"}
        voc(base / year, lists, ["a", "b", "c"])
    assert detection_check.check("voc", tmp_path, nothing) == []
    wanted = []
    for year in years:
        name = "voc" if year == "." else year
        wanted += [f"voc: {name} test: 1 images", f"voc: {name} train: 2 images"]
    assert lines(capsys) == [*wanted, "voc: all right"]


def test_vocs_missing_files_are_images_and_annotations(tmp_path, capsys):
    base = tmp_path / "voc" / "VOC2007"
    voc(base, {"train": "a\nb\nc\n", "val": "a\n"}, ["a", "b", "c"])
    for name in ("a", "c"):
        (base / "Annotations" / f"{name}.xml").unlink()
    (base / "JPEGImages" / "b.jpg").unlink()
    wrong = detection_check.check("voc", tmp_path, nothing)
    image = f"1 files are missing, {base / 'JPEGImages' / 'b.jpg'} first"
    about = f"{base / 'Annotations' / 'a.xml'} first"
    assert lines(capsys) == [
        f"voc: PROBLEM: VOC2007 train: 3 images; {image}; 2 files are missing, {about}",
        f"voc: PROBLEM: VOC2007 val: 1 images; 1 files are missing, {about}",
        "voc: 2 problems",
    ]
    assert wrong is not None and len(wrong) == 2


def test_a_list_that_is_no_text_is_named(tmp_path):
    base = tmp_path / "voc" / "VOC2007"
    voc(base, {}, [])
    file = base / "ImageSets" / "Main" / "train.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=f"{file}: not a list of images"):
        detection_check.check("voc", tmp_path, nothing)


def test_another_layout_is_none_of_its(tmp_path, capsys):
    (tmp_path / "mine" / "train").mkdir(parents=True)
    assert detection_check.check("mine", tmp_path, nothing) is None
    assert lines(capsys) == []
