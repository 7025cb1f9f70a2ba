"""The lists that rows name: whose sizes are the dataset's own, and what a seed decides."""

import pytest
from support.records import a_result, digest_of

from backbench.records import column_keys, data_manifests, protocol_fingerprints


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


@pytest.mark.parametrize("val", [HELD_OUT, "official"])
@pytest.mark.parametrize("part", ["train", "val"])
def test_either_list_of_the_training_tells_rows_apart(val, part):
    def lists(**changes):
        manifests = {"train": "a", "val": "b", "test": "c", **changes}
        about = {
            "manifests": manifests,
            "images": dict.fromkeys(manifests, 9),
            "val": val,
        }
        row = a_result(provenance=about)
        return data_manifests.of_row(row, has_recipe=True)

    assert lists() == lists() != lists(**{part: "other"})
    assert (lists().fixed == lists(**{part: "other"}).fixed) == (val == HELD_OUT)
    assert data_manifests.scored_list(a_result(provenance={"manifest": "x"})) == "x"


def test_a_detectors_list_is_its_file_of_annotations():
    facts = {"train": "t:ab:3", "val": "v:cd:2", "manifest": "x"}
    found = data_manifests.scored_list(a_result(task="mask_rcnn", provenance=facts))
    assert found == digest_of("v:cd:2")


def of_rows_that_tell(*told):
    """What rows say of the orders of lists: dataset, digests by part, the digests in path order."""
    rows = []
    for dataset, lists, in_path_order in told:
        about = {"in_path_order": in_path_order}
        about["manifests"] = {k: v for k, v in lists.items() if k != "image_contents"}
        about["image_contents"] = lists.get("image_contents")
        rows.append(a_result(dataset=dataset, provenance=about))
    return data_manifests.one_order(rows)


def test_lists_of_the_same_images_have_the_first_digest_of_all_orders():
    rows = [
        ("d", {"test": "t2", "train": "a"}, {"test": "S", "train": "Q", "val": "V"}),
        (
            "d",
            {"test": "t1", "image_contents": "c1"},
            {"test": "S", "image_contents": "K"},
        ),
        ("d", {"test": "t3", "image_contents": "c2"}, {"image_contents": "K"}),
        # The same files as another dataset are none of this one's
        ("e", {"test": "t2"}, {"test": "S"}),
    ]
    found = {
        ("d", "t1"): "t1",
        ("d", "t2"): "t1",
        ("d", "a"): "a",
        ("d", "c1"): "c1",
        ("d", "c2"): "c1",
        ("e", "t2"): "t2",
    }
    assert of_rows_that_tell(*rows) == found
    # Of t1 two rows tell unlike things, so nobody is like it
    unlike = ("d", {"test": "t1"}, {"test": "S2"})
    del found["d", "t1"]
    assert of_rows_that_tell(*rows, unlike) == found | {("d", "t2"): "t2"}
    assert data_manifests.one_order([a_result(provenance={})]) == {}


def test_orders_and_contents_of_a_probes_lists_are_those_of_the_images():
    manifests = {"train": "a", "val": "b", "test": "t2"}
    about = {"manifests": manifests, "images": {"train": 4, "val": 2, "test": 3}}
    row = a_result(provenance={**about, "image_contents": "c2"})

    def lists(row, **orders):
        known = {("digits", own): digest for own, digest in orders.items()}
        return data_manifests.of_row(row, has_recipe=True, orders=known)

    first = {**manifests, "test": "t1"}
    other = a_result(provenance={**about, "manifests": first, "image_contents": "c1"})
    assert lists(row, t2="t1", c2="c1") == lists(other)
    assert lists(row).fixed != lists(other).fixed and lists(row).contents == "c2"
    missing = a_result(provenance={**about, "manifests": {**manifests, "val": None}})
    assert lists(missing).contents == ""
    detected = {"train": "t:ab:3", "val": "v:cd:2", "image_contents": "c2"}
    detector = a_result(task="mask_rcnn", provenance=detected)
    assert lists(detector, c2="c1").contents == "c1"
    assert lists(detector).size == "", "nobody knows the usual numbers of digits"


def test_the_images_of_an_analysis_are_drawn_by_the_seed_where_it_takes_some():
    def lists(manifest, drawn, **more):
        about = {"manifest": manifest, "recipe": {"images": drawn}, **more}
        row = a_result(task="analyze", provenance=about)
        return data_manifests.of_row(row, has_recipe=True)

    one, other = lists("a", 100), lists("b", 100)
    assert (one.fixed, one.drawn, other.drawn) == (other.fixed, "a", "b")
    assert lists("a", 100, images=7).fixed != one.fixed
    one, other = lists("a", None), lists("b", None)
    assert one.fixed != other.fixed and one.drawn == other.drawn == ""
    assert lists("a", None, temperature=2).fixed != one.fixed
    # A row that names no list has none, but what says how it was measured
    assert data_manifests.of_row(a_result(provenance={}), has_recipe=True) is None
    shots = a_result(provenance={"shots": 2})
    assert data_manifests.of_row(shots, has_recipe=True).fixed


@pytest.mark.parametrize(
    ("change", "apart"),
    [
        ({"mine": 1}, True),
        ({"shots": 3}, True),
        ({"predictions": "x"}, False),
        ({"size": {"measured": 3}}, False),
        # How many draws there were counts, and not what they gave
        ({"draws": [3.0, 4.0]}, False),
        ({"draws": [1.0, 2.0, 3.0]}, True),
        ({"draws": 7}, True),
    ],
)
def test_what_a_row_without_a_recipe_holds_tells_it_apart(change, apart):
    def lists(provenance, chosen=None):
        row = a_result(provenance=provenance, chosen=chosen)
        return data_manifests.of_row(row, has_recipe=False)

    whole = {"shots": 2, "draws": [1.0, 2.0], "predictions": "y"}
    assert (lists(whole) != lists(whole | change)) == apart
    # Of a choice the grid counts, and not what was chosen of it
    chosen = {"lr": 1.0, "scores": {"1": 2.0, "3": 4.0}}
    assert lists(whole, chosen) == lists(whole, {"lr": 3, "scores": {"3": 1.0, "1": 0}})
    assert lists(whole, chosen) != lists(whole, {"scores": {"1": 2.0}})
    assert lists(whole, chosen) != lists(whole, {**chosen, "kernel": "rbf"})
    assert lists(whole, {}) == lists(whole, {"lr": 1.0}) == lists(whole)


def test_a_fingerprint_is_of_what_decides_and_is_no_default():
    recipe = {"a": {"b": 1.0, "c": {}}, "d": (1.0, [2.5]), "e": 2.5, "chunk": 9}
    leaves = {"a.b": 1, "a.c": {}, "d": [1, [2.5]], "e": 2.5, "chunk": 9}
    assert protocol_fingerprints.leaves(recipe) == leaves
    defaults = {"sgd": {"a.b": 1, "e": 3, "parts.*.list": None}}
    more = {**recipe, "parts": {"10": {"list": None}, "1": {"list": "x"}}, "batch": 3}
    decisive = {"a.c": {}, "d": [1, [2.5]], "e": 2.5, "parts.1.list": "x"}
    found = protocol_fingerprints.decisive(more, "sgd", defaults)
    assert found == {**decisive, "batch": 3}
    of_analysis = protocol_fingerprints.decisive(more, "analyze", defaults)
    assert "batch" not in of_analysis and of_analysis["a.b"] == 1
    digest = protocol_fingerprints.digest({"x": 1, "y": [2]})
    assert digest == protocol_fingerprints.digest({"y": [2], "x": 1})
    assert len(digest) == 12 and digest != protocol_fingerprints.digest({"x": 1})


@pytest.mark.parametrize(
    ("protocol", "split", "unmarked"),
    [
        ("a", None, True),
        ("a", "val", True),
        ("a~1a2b", None, False),
        ("a", "test~n5+5", False),
        ("a~1a2b", "val~1a2b", False),
    ],
)
def test_a_mark_of_either_part_marks_a_column(protocol, split, unmarked):
    assert column_keys.ColumnKey(protocol, split).unmarked == unmarked
