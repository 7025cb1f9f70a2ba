"""The papers' numbers as package data: keys unique, made by the stated rule, and found by it."""

import collections
import csv

import pytest

from backbench.errors import BadInput
from backbench.published import judging_rules, published
from backbench.published.expected_rows import expected_keys_in
from backbench.tasks import TASKS


def key_of(line, ambiguous=()):
    """A line's key, without the pretraining set; `ambiguous` has the keys that several rows share."""
    parts = [
        line[name] for name in ("paper", "table", "model", "arch", "pretrain_epochs")
    ]
    key = ":".join(map(published.slug, parts))
    text = published.variant(line["note"]) if key in ambiguous else None
    return f"{key}:{published.slug(text)}" if text else key


def test_stored_keys_follow_the_rule():
    with published.FILE.open(newline="") as file:
        lines = list(csv.DictReader(file))
    # 1. Rows that share a name get a variant: two numbers of one pretraining cannot be one row's.
    kinds = [
        (key_of(x), x["trained_on"], x["task"], x["dataset"], x["metric"])
        for x in lines
    ]
    count = collections.Counter(kinds)
    ambiguous = {key[0] for key, n in count.items() if n > 1}
    # 2. Models that were pretrained on several sets get the set.
    sets = collections.defaultdict(set)
    for line in lines:
        sets[key_of(line, ambiguous)].add(line["trained_on"])
    several = {key for key, of in sets.items() if len(of) > 1}
    made = []
    for line in lines:
        key = key_of(line, ambiguous)
        made.append(f"{key}:{line['trained_on']}" if key in several else key)
    assert made == [x["key"] for x in lines]


def test_a_key_answers_for_one_pretraining_set_and_each_number_has_a_name():
    rows = published.rows()
    assert len({(r.key, r.task, r.dataset, r.metric) for r in rows}) == len(rows)
    assert len({(r.key, r.trained_on) for r in rows}) == len({r.key for r in rows})
    (row,) = published.lookup("mio:4:mio-a:resnet50:250:stl10")
    assert (row.dataset, row.value, row.trained_on) == ("stl10", 58.1, "stl10")
    assert row.printed_row == "mio:4:mio-a:resnet50:250"


def test_keys_are_named_by_recipes_checkpoints_and_imports():
    provenance = {"recipe": {"expected": ["a", "b"]}, "checkpoint": {"published": "c"}}
    assert expected_keys_in(provenance) == ["a", "b", "c"]


def test_what_is_no_score_of_images_is_counted_and_never_judged():
    others = [r for r in published.rows() if r.task not in TASKS]
    count = collections.Counter((r.table, r.task, r.metric) for r in others)
    assert count == {
        ("2", "text", "accuracy"): 30,
        ("4", "control", "score"): 36,
        ("4", "control", "score_std"): 36,
        ("0.3", "pretraining", "hours"): 24,
    }
    assert all(judging_rules.reason(r) in judging_rules.NO_SCORES for r in others)
    value = {(r.key, r.dataset, r.metric): r.value for r in published.rows()}
    assert value["lorac:1:swav:resnet50:200:3x224+5x96", "imagenet", "top1"] == 72.3
    assert value["lorac:4:random:resnet50:-", "coco2017", "keypoints_AP"] == 63.5
    assert value["cllr:2:cllr-dcl+nuclear:-:-", "mpqa", "accuracy"] == 95.8
    assert value["cllr:4:cllr-hcl+:-:-:easy", "easy", "score"] == 911
    assert value["cllr:4:cllr-hcl+:-:-:easy", "easy", "score_std"] == 85
    key = "cllr:0.3:cllr-simclr+nuclear:resnet50:100:batch-512:cifar10"
    assert value[key, "cifar10", "hours"] == 2.4
    key = "cllr:0.6:cllr:resnet50:400:optimiser-sgd-lr-5e-3"
    assert value[key, "cifar10", "test_error_top5_std"] == 1.3


def test_averages_are_the_mean_of_the_printed_twelve():
    for row in published.rows():
        if row.metric == "average":
            values = [
                r.value for r in published.lookup(row.key) if r.metric != "average"
            ]
            assert len(values) == 12
            assert row.value == pytest.approx(sum(values) / 12, abs=0.06)


def test_unknown_key_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'lorac:1:lorac:resnet50:200'"):
        published.lookup("lorac:1:lorac:resnet50:20")
    with pytest.raises(BadInput, match="keys look like"):
        published.lookup("nothing of the kind")
