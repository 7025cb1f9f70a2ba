"""The lists that rows name: whose sizes are the dataset's own, and what a seed decides."""

import pytest
from support.records import a_result, digest_of

from backbench.records import data_manifests


def lists_of(dataset, *, val, images, drawn="", **more):
    """The lists of a probe's row; `drawn` names the images that its seed has chosen."""
    row = a_result(dataset=dataset)
    manifests = {
        "train": digest_of(f"train {drawn}"),
        "val": digest_of("val" if val == "official" else f"val {drawn}"),
        "test": digest_of("test"),
    }
    counts = dict(zip(("train", "val", "test"), images, strict=True))
    about = {"manifests": manifests, "images": counts, "val": val, **more}
    row = a_result(dataset=dataset, provenance={**row.provenance, **about})
    return data_manifests.of_row(row, has_recipe=True)


HELD_OUT = "held out of train"


@pytest.mark.parametrize(
    ("dataset", "val", "images", "said"),
    [
        ("cifar10", HELD_OUT, (40000, 10000, 10000), ""),
        ("cifar10", HELD_OUT, (45000, 5000, 10000), ""),
        ("cifar10", HELD_OUT, (39999, 10000, 10000), "n49999+10000"),
        ("cifar10", HELD_OUT, (40000, 10000, 9999), "n50000+9999"),
        ("dtd", "official", (1880, 1880, 1880), ""),
        ("dtd", "official", (1000, 1880, 1880), "n1000+1880"),
        ("dtd", "official", (1880, 100, 1880), "n1880+1880"),
        ("dtd", "official", (1880, 1880, None), ""),
        ("a lab's own", HELD_OUT, (1, 2, 3), ""),
    ],
)
def test_other_numbers_of_images_than_the_datasets_are_said(dataset, val, images, said):
    assert lists_of(dataset, val=val, images=images).size == said


def test_a_hold_out_is_the_seeds_and_an_official_val_is_not():
    images = (1000, 100, 50)
    one = lists_of("digits", val=HELD_OUT, drawn="one", images=images)
    other = lists_of("digits", val=HELD_OUT, drawn="other", images=images)
    assert one.fixed == other.fixed and one.drawn != other.drawn
    one = lists_of("digits", val="official", drawn="one", images=images)
    other = lists_of("digits", val="official", drawn="other", images=images)
    assert one.fixed != other.fixed and one.drawn == other.drawn == ""


@pytest.mark.parametrize("val", [HELD_OUT, "official"])
def test_a_list_that_the_seed_draws_is_the_seeds(val):
    """Three seeds of `semisup` without --lists are one column; a list of its own is another."""

    def part(seed, **more):
        told = {"labelled": digest_of(f"labels of {seed}"), **more}
        return lists_of("own", val=val, images=(8, 2, 9), drawn=f"of {seed}", **told)

    def columns(**more):
        drawn = [(part(seed, **more), seed) for seed in (0, 1, 2)]
        return set(data_manifests.digests(drawn).values())

    assert len(columns(labelled_from=data_manifests.OF_THE_SEED)) == 1
    assert len(columns()) == 3
    assert not columns() & columns(labelled_from=data_manifests.OF_THE_SEED)


def test_a_detectors_numbers_of_images_are_cocos():
    def size(train, val):
        facts = {"train": f"coco_2017_train:ab:{train}", "val": f"val:cd:{val}"}
        row = a_result(task="mask_rcnn", dataset="coco2017", provenance=facts)
        return data_manifests.of_row(row, has_recipe=True).size

    assert size(118287, 5000) == ""
    assert size(118287, 100) == "n118287+100"
    assert size(1000, 5000) == "n1000+5000"


def test_a_detectors_numbers_of_images_on_voc_are_trainvals_of_both_years():
    facts = {"train": "voc_0712_trainval:ab:16551", "val": "voc_2007_test:cd:4952"}
    row = a_result(task="faster_rcnn", dataset="voc2007", provenance=facts)
    assert data_manifests.of_row(row, has_recipe=True).size == ""


@pytest.mark.parametrize(
    ("labels", "said"),
    [(12811, ""), (12810, "n12810+50000"), (128116, "n128116+50000")],
)
def test_a_share_of_the_labels_is_as_long_as_its_published_list(labels, said):
    manifests = {name: digest_of(name) for name in ("train", "val", "test")}
    about = {
        "manifests": manifests,
        "images": {"train": labels - 11, "val": 11, "test": 50000},
        "val": HELD_OUT,
        "recipe": {"parts": {"1": {"list": {"lines": 12811}}}},
    }
    row = a_result(task="semi_1pct", dataset="imagenet")
    row = a_result(
        task="semi_1pct",
        dataset="imagenet",
        provenance={**row.provenance, **about},
    )
    assert data_manifests.of_row(row, has_recipe=True).size == said


def test_seeds_that_draw_lists_of_their_own_are_one_kind_of_data():
    one = data_manifests.Lists("the test list", "drawn by 0")
    other = data_manifests.Lists("the test list", "drawn by 1")
    apart = data_manifests.digests([(one, 0), (other, 1)])
    assert apart[one, 0] == apart[other, 1]
    # One seed draws one list: two are of two versions, or of two folders
    same = data_manifests.digests([(one, 0), (other, 0)])
    assert same[one, 0] != same[other, 0]
