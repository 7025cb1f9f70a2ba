"""The papers' numbers as package data: keys unique, made by the stated rule, and found by it."""

import collections
import csv

import pytest

from backbench.errors import BadInput
from backbench.results import published


def test_every_number_has_its_own_name():
    names = collections.Counter((r.key, r.task, r.dataset, r.metric) for r in published.rows())
    assert max(names.values()) == 1
    assert len(published.rows()) == 692


def test_stored_keys_follow_the_rule():
    with published.FILE.open(newline="") as file:
        lines = list(csv.DictReader(file))
    count = collections.Counter(
        (published.key_of(x), x["task"], x["dataset"], x["metric"]) for x in lines
    )
    ambiguous = {key[0] for key, n in count.items() if n > 1}
    assert [published.key_of(x, ambiguous) for x in lines] == [x["key"] for x in lines]


@pytest.mark.parametrize(
    ("key", "task", "dataset", "metric", "value"),
    [
        ("lorac:1:lorac:resnet50:200", "linear", "imagenet", "top1", 73.2),
        ("lorac:1:swav:resnet50:200:3x224+5x96", "linear", "imagenet", "top1", 72.3),
        ("lorac:2:lorac:resnet50:200", "linear", "average", "average", 72.4),
        ("lorac:3:moco-m:resnet50:200", "semi_10pct", "imagenet", "top5", 88.5),
        ("lorac:4:random:resnet50:-", "keypoint_rcnn", "coco2017", "keypoints_AP", 63.5),
        ("jcl:1:moco-v2:resnet50:200", "linear", "imagenet", "top1", 67.5),
        ("arb:2:arb:resnet50:100:projector-dim-8192", "linear", "imagenet", "top1", 68.21),
    ],
)
def test_lookup(key, task, dataset, metric, value):
    assert [
        r.value
        for r in published.lookup(key)
        if (r.task, r.dataset, r.metric) == (task, dataset, metric)
    ] == [value]


def test_only_vision():
    assert {r.task for r in published.rows()} == {
        "linear", "knn", "semi_1pct", "semi_10pct", "faster_rcnn", "mask_rcnn", "keypoint_rcnn"
    }  # fmt: skip


def test_averages_are_the_mean_of_the_printed_twelve():
    for row in published.rows():
        if row.metric == "average":
            values = [r.value for r in published.lookup(row.key) if r.metric != "average"]
            assert len(values) == 12
            assert row.value == pytest.approx(sum(values) / 12, abs=0.06)


def test_unknown_key_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'lorac:1:lorac:resnet50:200'"):
        published.lookup("lorac:1:lorac:resnet50:20")
    with pytest.raises(BadInput, match="keys look like"):
        published.lookup("nothing of the kind")
