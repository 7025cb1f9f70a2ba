"""Lists of images: joined, named, digested, and which of their images are trained on."""

import hashlib
from dataclasses import replace

import pytest

from backbench.detection.data import coco_lists
from backbench.detection.data.order import ImageOrder, Slots
from backbench.detection.data.split import (
    DatasetFiles,
    Split,
    join,
    refuse_unlike_keypoints,
    training_records,
)
from backbench.detection.task_rows import FASTER_RCNN, KEYPOINT_RCNN
from backbench.errors import BadInput


@pytest.fixture
def a_split(tmp_path):
    """a_split(name, images, **more): a list of images with these ids, whose file holds its name."""

    def made(name="coco_2017_train", images=(1, 2), folder="coco", dataset="", **more):
        file = tmp_path / f"{name}.json"
        file.write_text(name)
        below = tmp_path / folder / "images"
        records = []
        for id in images:
            path = f"{below}/{id:012d}.jpg"
            about = {"file_name": path, "image_id": id, "height": 3, "width": 4}
            records.append({**about, "annotations": []})
        files = DatasetFiles(name, file, below, dataset=dataset)
        given = {"categories": ("cat", "dog"), "ids": (3, 5), "records": records}
        return Split(files, **given | more)

    return made


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_joined_lists_are_one_in_the_order_given(a_split):
    first = a_split("one", (1, 2), notes=("a",), keypoints=("nose",), objects=7)
    second = a_split("two", (8,), notes=("b",), keypoints=("nose",))
    third = a_split("three", (4,), notes=("c", "d"), keypoints=("nose",))
    both = join([first, second, third])
    assert [record["image_id"] for record in both.records] == [1, 2, 8, 4]
    assert both.notes == ("a", "b", "c", "d")
    assert both.name == "one+two+three"
    assert (both.file, both.more_files) == (first.file, (second.file, third.file))
    assert both.fingerprint == f"one+two+three:{digest_of('onetwothree')}:4"
    # The first is as it was
    assert len(first.records) == 2
    assert join([first]).fingerprint == first.fingerprint == f"one:{digest_of('one')}:2"


def test_unlike_lists_are_not_joined(a_split):
    first = a_split("one")
    others = [{"categories": ("cat", "cow")}, {"ids": (3, 4)}]
    for number, more in enumerate(others):
        other = a_split(f"other{number}", **more)
        with pytest.raises(BadInput) as error:
            join([first, a_split("like"), other])
        said = f"{other.file}: its categories are not those of {first.file}"
        assert str(error.value) == said
    with pytest.raises(BadInput, match="its keypoint 0 is 'nose', and 'nothing' in"):
        join([first, a_split("posed", keypoints=("nose",))])


def test_the_first_keypoint_that_differs_is_named(a_split):
    first = a_split("one", keypoints=("nose", "ear", "eye"))
    refuse_unlike_keypoints(first, a_split("like", keypoints=("nose", "ear", "eye")))
    unlike = {
        ("nose", "eye", "ear"): "its keypoint 1 is 'eye', and 'ear'",
        ("nose", "ear"): "its keypoint 2 is 'nothing', and 'eye'",
        ("nose", "ear", "eye", "tail"): "its keypoint 3 is 'tail', and 'nothing'",
    }
    for names, said in unlike.items():
        other = a_split("other", keypoints=names)
        with pytest.raises(BadInput) as error:
            refuse_unlike_keypoints(first, other)
        assert str(error.value) == (
            f"{other.file}: {said} in {first.file}; give both the same names in one order"
        )


def test_a_list_of_ones_own_is_named_by_what_it_says(a_split):
    split = a_split("own_mine_test", lists_digest="0123456789abcdef0123")
    assert split.fingerprint == "own_mine_test:0123456789abcdef:2"
    assert split.annotations() == b"own_mine_test"
    assert replace(split, content=b"made").annotations() == b"made"


def test_partners_are_stated_or_follow_from_names(a_split):
    split = a_split(keypoints=("left_eye", "right_eye", "nose"))
    assert split.flip == [1, 0, 2]
    assert replace(split, partners=(0, 2, 1)).flip == [0, 2, 1]


def test_the_part_is_the_last_word_that_is_no_number(a_split):
    parts = {"coco_2017_val_100": "val", "voc_2007_trainval": "trainval", "own_x": "x"}
    for name, part in parts.items():
        assert a_split(name).part == part


def test_cocos_lists_alone_have_cocos_name(a_split):
    about = {
        "categories": tuple(coco_lists.CLASSES.values()),
        "ids": tuple(coco_lists.CLASSES),
    }
    assert a_split(**about).dataset == "coco2017"
    assert a_split(**about, dataset="mine").dataset == "mine"
    assert a_split().dataset == "coco"
    assert a_split(folder="VOC2007").dataset == "voc2007"
    assert a_split(folder="scenes", **about).dataset == "scenes"


def test_every_image_and_all_objects_of_a_whole_list_are_cocos():
    names, ids = tuple(coco_lists.CLASSES.values()), tuple(coco_lists.CLASSES)
    are_cocos = coco_lists.are_cocos
    person = (("person",), (1,))
    files = ["000000000009.jpg", "000000000025.jpg"]
    assert are_cocos(*person, files, (9, 25), 3)
    assert not are_cocos(("person",), (2,), files, (9, 25), 3)
    assert not are_cocos(names, ids, files, (9, 26), 3)
    assert not are_cocos(names, ids, files, (9, "000000000025"), 3)
    # What follows the first dot is a format's, or an exporter's
    assert are_cocos(names, ids, ["000000000009.rf.3f.jpg"], (9,), 3)
    every = range(1, 5001)
    whole = [f"{number:012d}.jpg" for number in every]
    assert are_cocos(*person, whole, every, 11004)
    assert not are_cocos(*person, whole, every, 36781)
    assert not are_cocos(names, ids, whole, every, 11004)
    # Some of them have some of the objects
    assert are_cocos(names, ids, whole[1:], every[1:], 36000)


def an_object(*visibilities, iscrowd=0):
    row = {"bbox": [0, 0, 1, 1], "category_id": 0, "iscrowd": iscrowd}
    if visibilities:
        row["keypoints"] = [v for seen in visibilities for v in (9, 9, seen)]
    return row


def test_images_with_an_object_to_learn_are_trained_on(a_split):
    split = a_split(images=range(1, 8))
    objects = [
        [],
        [an_object(0, 0)],
        [an_object(2, 0, iscrowd=1)],
        [an_object(0, 0), an_object(0, 1)],
        [an_object(2, 0, iscrowd=1), an_object()],
        [an_object(0, 2)],
        [],
    ]
    for record, rows in zip(split.records, objects, strict=True):
        record["annotations"] = rows

    def kept(task):
        return [record["image_id"] for record in training_records(split, task)]

    assert kept(FASTER_RCNN) == [2, 4, 5, 6]
    assert kept(KEYPOINT_RCNN) == [4, 6]
    del split.records[3:]
    with pytest.raises(BadInput) as error:
        training_records(split, KEYPOINT_RCNN)
    assert str(error.value) == f"{split.file}: no image has an object to train on"


# ---- In which order they come


def sized(count):
    """Every third image is wide, the others are square or tall."""
    sizes = [(2, 1), (1, 1), (1, 2)]
    keys = ("width", "height")
    return [dict(zip(keys, sizes[i % 3], strict=True)) for i in range(count)]


def batches_of(order, count, first=0):
    stream = order.batches(first)
    return [next(stream) for _ in range(count)]


def stream_of(order, count, first=0):
    return [i for members in batches_of(order, count, first) for i in members]


@pytest.mark.parametrize(("batch", "group"), [(12, 4), (6, 2), (2, 2), (8, 4), (3, 1)])
def test_a_group_is_the_largest_of_at_most_four_that_fills_the_batch(batch, group):
    order = ImageOrder(sized(31), batch, seed=1)
    assert order.group == group
    mixed = 0
    for members in batches_of(order, 30):
        assert len(members) == batch
        groups = [members[i : i + group] for i in range(0, batch, group)]
        for each in groups:
            assert len({i % 3 == 0 for i in each}) == 1
        mixed += len({i % 3 == 0 for each in groups for i in each}) > 1
    assert (mixed > 0) is (batch > group)


def test_ungrouped_passes_are_permutations_one_after_another():
    order = ImageOrder(sized(9), 6, seed=1, grouped=False)
    stream = stream_of(order, 6)
    passes = [stream[start : start + 9] for start in range(0, 36, 9)]
    assert all(sorted(each) == list(range(9)) for each in passes)
    assert len({tuple(each) for each in passes}) == 4
    assert stream[12:] == stream_of(order, 4, first=2)
    other = ImageOrder(sized(9), 6, seed=2, grouped=False)
    assert stream_of(other, 6) != stream


def test_a_group_that_is_incomplete_is_filled_in_the_next_pass():
    """Of nine images three are wide, so four wide ones need a second pass."""
    order = ImageOrder(sized(9), 4, seed=1)
    seen = stream_of(order, 9)
    assert sorted(seen) == sorted([*range(9)] * 4)
    wide = [i for i in seen if i % 3 == 0]
    assert all(sorted(wide[n : n + 3]) == [0, 3, 6] for n in range(0, 12, 3))


def test_a_rank_has_its_own_slots_of_every_batch():
    order = ImageOrder(sized(20), 6, seed=1)
    whole = batches_of(order, 5)
    for rank in range(3):
        slots = Slots(order, first=2, last=5, rank=rank, world=3)
        assert len(slots) == 3
        assert list(slots) == [
            [(i, slot, whole[i][slot]) for slot in (2 * rank, 2 * rank + 1)]
            for i in (2, 3, 4)
        ]
    (only,) = Slots(order, first=0, last=1)
    assert only == [(0, slot, whole[0][slot]) for slot in range(6)]
