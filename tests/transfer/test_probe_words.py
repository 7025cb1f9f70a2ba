"""What each probe says before it measures: its words, its price, the metrics of its rows, what it refuses."""

import dataclasses
from pathlib import Path

import pytest

from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.images.multilabel import MultiLabelList, mark
from backbench.transfer.probes.kind import probe_of, shipped_kinds
from backbench.transfer.probes.sgd import FinalHead, Sgd, best_heads
from backbench.transfer.protocol import CropAugment, Length
from backbench.transfer.protocols import all_kinds, load_protocol


def images(labels, classes=("a", "b", "c")):
    """A list of files that nobody reads."""
    paths = tuple(f"{i}.png" for i in range(len(labels)))
    return ImageList(Path("/d"), paths, tuple(labels), classes)


# 20 images of train, 4 of val, 10 of test
SPLITS = Splits(
    images([0, 1, 2] * 6 + [0, 1]),
    images([0, 1, 2, 2]),
    images([0, 1] * 5),
    held_out=False,
)
DIGITS = Dataset(name="digits", classes=3, sizes=(20, 4, 10), read=None, top5=True)


def price(kind, *overrides, checkpoints=2, name="digits", recipe=None):
    p = load_protocol(recipe or kind, all_kinds(), overrides)
    return dict(probe_of(p.kind).work(p, name, SPLITS, checkpoints))


def words(recipe, *overrides):
    p = load_protocol(recipe, all_kinds(), overrides)
    return probe_of(p.kind).words(p)


def metrics(recipe, *overrides):
    p = load_protocol(recipe, all_kinds(), overrides)
    return list(probe_of(p.kind).metrics(p, DIGITS))


@pytest.mark.parametrize(
    ("recipe", "overrides", "work"),
    [
        ("knn", [], {"image": 34}),
        ("fewshot", [], {"image": 34}),
        ("layers", [], {"image": 34}),
        ("logreg", ["l2=0.1,10,7"], {"image": 34, "fit": 7 * 2}),
        ("loaders", ["loaders=pil,torch,jpeg75"], {"image": 3 * 34}),
        # Each point of each draw, and all labels once
        ("label_curve", ["labels=1,2,5", "draws=4"], {"image": 34, "fit": 2 * 13}),
        # Each class at each penalty, and again at the best
        ("multilabel", ["l2=0.1,10,4"], {"image": 34, "fit": 5 * 3 * 2}),
        # Each cost in each fold, and the best one on all
        ("multilabel_svm", ["costs=1,10", "folds=5"], {"image": 34, "fit": 11 * 3 * 2}),
        ("class_retrieval", [], {"image": 10}),
        ("cluster", [], {"image": 10}),
    ],
)
def test_the_price_of_a_probe(recipe, overrides, work):
    assert price(recipe, *overrides) == work


LIVE = ["length.default.iterations=6", "lr=0.1,1.0"]
ONCE = [*LIVE, "augment=null"]


@pytest.mark.parametrize(
    ("overrides", "work"),
    [
        # The grid on train and the best one again; val chooses, test is scored
        (LIVE, {"step": 12, "image": 14}),
        ([*LIVE, "lr=0.1"], {"step": 6, "image": 10}),
        ([*LIVE, "lr=0.1", "patience=3"], {"step": 6, "image": 14}),
        # A head that has not seen val has its temperature fitted there
        ([*LIVE, "lr=0.1", "train_only=digits"], {"step": 6, "image": 14}),
        ([*LIVE, "lr=0.1", "train_only=pets"], {"step": 6, "image": 10}),
        # Features that are computed once are those of all images
        (ONCE, {"step": 12, "image": 34}),
        (
            [*LIVE, "lr=0.1", "train_only=", "train_score=true"],
            {"step": 6, "image": 34},
        ),
        # In epochs, what trains counts: 24 images of train and val, 20 of train alone
        (
            [
                "length.default.iterations=null",
                "length.default.epochs=2",
                "batch_size=4",
            ],
            {"step": 10 + 12, "image": 14},
        ),
        (
            [
                "length.default.iterations=null",
                "length.default.epochs=2",
                "batch_size=4",
                "train_only=digits",
            ],
            {"step": 10 + 10, "image": 14},
        ),
    ],
)
def test_the_price_of_heads_that_are_trained(overrides, work):
    assert price("lorac", *overrides) == work


def test_the_price_of_a_rate_that_test_chooses():
    """Every rate trains once, on train and val."""
    assert price("lorac_testsel", *LIVE) == {"step": 6, "image": 10}
    # No temperature is fitted, so that val is not read where it does not train
    work = price("lorac_testsel", *LIVE, "train_only=digits")
    assert work == {"step": 6, "image": 10}


@pytest.mark.parametrize("recipe", ["attentive_demo", "seg_demo"])
def test_the_price_of_heads_on_tokens(recipe):
    """A part that is held out is scored as well, where there is a choice."""
    steps = "length.default.iterations=6"
    assert price(recipe, steps, "lr=0.1,1.0") == {"step": 6, "image": 14}
    assert price(recipe, steps, "lr=0.1") == {"step": 6, "image": 10}


def test_an_attentive_probe_holds_its_share_of_train_out_where_there_is_no_val():
    p = load_protocol("attentive_demo", all_kinds(), ["holdout=0.25"])
    held = dataclasses.replace(SPLITS, held_out=True)
    # A quarter of eight images of each class, of train and val
    assert probe_of("attentive").work(p, "digits", held, 1)["image"] == 10 + 6


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("knn", ["k=5,20"], "k = 5, 20"),
        ("fewshot", ["draws=3", "shots=4"], "3 draws of 4 labels per class"),
        ("logreg", ["l2=0.1,10,7"], "best of 7 penalties by val"),
        ("loaders", ["loaders=pil,torch"], "by pil, torch, k = 20"),
        (
            "label_curve",
            ["labels=1,5", "draws=4"],
            "1, 5 and all labels per class, 4 draws",
        ),
        (
            "layers",
            ["l2=1,2,3"],
            "the best layer and pooling by val, 3 penalties for each",
        ),
        (
            "multilabel",
            ["l2=0.1,10,4"],
            "each class against all others, best of 4 penalties",
        ),
        (
            "multilabel_svm",
            ["costs=1,10", "folds=5"],
            "an SVM of each class against all others, best of 2 costs by 5 folds",
        ),
        ("class_retrieval", [], "each test image among the others"),
        ("cluster", ["restarts=6"], "k-means, the best of 6 starts"),
        ("seg_knn", ["k=1,3", "distances=l2,cosine"], "k = 1, 3 by l2 and cosine"),
        (
            "seg_demo",
            ["lr=0.1,1.0", "batch_size=6"],
            "2 learning rates, 6 crops a step",
        ),
        (
            "attentive_demo",
            ["lr=0.1,1.0", "weight_decays=0,1,2", "batch_size=6"],
            "capi, 6 heads, 6 images a step",
        ),
        ("lorac", ["batch_size=6", "lr=0.1"], "6 images a step"),
        (
            "lorac",
            ["batch_size=6", "lr=0.1,1.0"],
            "best of 2 learning rates by val, 6 images a step",
        ),
        (
            "lorac_testsel",
            ["batch_size=6", "lr=0.1,1.0"],
            "best of 2 learning rates by test, 6 images a step",
        ),
        ("ood", ["of=x-v1", "rule=all"], "x-v1, rule all"),
    ],
)
def test_the_words_of_a_probe(recipe, overrides, said):
    assert words(recipe, *overrides) == said


def test_the_metrics_of_a_probes_rows():
    assert metrics("logreg") == ["top1", "top5"]
    assert metrics("fewshot") == ["top1"]
    assert metrics("knn", "k=5,20") == ["top1_k5", "top5_k5", "top1_k20", "top5_k20"]
    assert metrics("loaders", "loaders=pil,torch") == [
        "top1_pil",
        "top5_pil",
        "top1_torch",
        "top5_torch",
    ]
    assert metrics("label_curve", "labels=1,5") == [
        "top1_labels1",
        "top1_labels5",
        "top1_labels_all",
    ]
    assert metrics("layers") == ["top1", "top5", "top1_usual", "top5_usual"]
    assert metrics("class_retrieval") == ["r1", "map_r"]
    assert metrics("cluster") == ["nmi", "ari", "cluster_acc"]
    assert metrics("lorac") == ["top1", "top5"]
    assert metrics("lorac", "lr=1.0", "train_score=true", "train_only=[]") == [
        "top1",
        "top5",
        "train_top1",
    ]


def test_which_probes_read_which_images():
    """And which train in all processes together."""
    found = {"only_test": set(), "dense": set(), "multilabel": set(), "together": set()}
    for kind in shipped_kinds():
        for name, kinds in found.items():
            if getattr(probe_of(kind), name):
                kinds.add(kind)
    assert found == {
        "only_test": {"class_retrieval", "cluster"},
        "dense": {"seg", "seg_knn"},
        "multilabel": {"multilabel", "svm"},
        "together": {"attentive", "ood", "seg", "seg_knn", "sgd"},
    }
    with pytest.raises(BadInput, match="no probe 'knm'; did you mean 'knn'"):
        probe_of("knm")
    with pytest.raises(BadInput, match="no probe 'kind'"):
        probe_of("kind")


# What is refused


def refused(recipe, splits, *overrides):
    p = load_protocol(recipe, all_kinds(), overrides)
    with pytest.raises(BadInput) as error:
        probe_of(p.kind).refuse(p, "mine", splits)
    return str(error.value)


def accepted(recipe, splits, *overrides):
    p = load_protocol(recipe, all_kinds(), overrides)
    probe_of(p.kind).refuse(p, "mine", splits)


def test_as_many_neighbours_as_images_are_allowed():
    said = refused("knn", SPLITS, "k=5,24,25")
    assert said == (
        "mine: k = 25 neighbours of 24 images; write k=5,24 behind the protocol"
    )
    accepted("knn", SPLITS, "k=24,5")
    assert refused("knn", SPLITS, "k=25").endswith("write k=1 behind the protocol")
    said = refused("loaders", SPLITS, "k=25")
    assert said == "mine: k = 25 neighbours of 24 images; write k=5 behind the protocol"
    accepted("loaders", SPLITS, "k=24")
    few = dataclasses.replace(SPLITS, train=images([0, 1]), val=images([2]))
    assert refused("loaders", few, "k=4").endswith("write k=3 behind the protocol")


def test_as_many_labels_as_the_rarest_class_has_are_allowed():
    """Class a has eight images of train and val, b eight and c eight."""
    accepted("fewshot", SPLITS, "shots=8")
    accepted("label_curve", SPLITS, "labels=2,8")
    assert "9 shots needs 9 images of class 'a', found 8" in refused(
        "fewshot", SPLITS, "shots=9"
    )
    rare = dataclasses.replace(SPLITS, train=images([0] * 5 + [1] * 2 + [2] * 9))
    said = refused("label_curve", rare, "labels=1,3,4")
    assert said == (
        "mine: labels = 4 of each class, and 'b' has 3 images;"
        " write --protocol label_curve labels=1,3"
    )
    assert refused("label_curve", rare, "labels=4").endswith(" labels=1")


def test_two_test_images_of_a_class_are_a_query_and_its_answer():
    two = dataclasses.replace(SPLITS, test=images([0, 1, 1]))
    accepted("class_retrieval", two)
    alone = dataclasses.replace(SPLITS, test=images([0, 1, 2]))
    assert refused("class_retrieval", alone).startswith("mine: no class has two test")
    accepted("cluster", two)
    one = dataclasses.replace(SPLITS, test=images([1, 1]))
    assert refused("cluster", one).startswith("mine: its test images are of one class")


def shown(*labels):
    """Images that show such classes of three."""
    paths = tuple(f"{i}.png" for i in range(len(labels)))
    marks = tuple(mark(each) for each in labels)
    return MultiLabelList(Path("/d"), paths, (0,) * len(labels), ("a", "b", "c"), marks)


def test_folds_need_images_with_and_without_each_class():
    """In three folds: three images that show it, or none, and two that do not."""
    test = shown([0], [])
    whole = Splits(shown([0], [0], [], []), shown([0], []), test, held_out=False)
    accepted("multilabel_svm", whole)
    rare = Splits(shown([0], [], [], []), shown([0], []), test, held_out=False)
    assert refused("multilabel_svm", rare) == (
        "mine: class 'a' is shown by 2 of 6 images of train and val, and 3 folds need 3 that"
        " show it and 2 others; take --protocol multilabel"
    )
    # One that every image shows is told by none; one that all but one show has no folds
    every = Splits(
        shown([0, 1], [0, 1], [1], [1]), shown([0, 1], [1]), test, held_out=False
    )
    accepted("multilabel_svm", every)
    most = Splits(
        shown([0, 1], [0, 1], [1], [1]), shown([0, 1], []), test, held_out=False
    )
    assert "class 'b' is shown by 5 of 6 images" in refused("multilabel_svm", most)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_each_split_must_show_something_that_can_be_told(split):
    parts = dict.fromkeys(("train", "val", "test"), shown([0], []))
    for wrong, content in (
        (shown([], []), "no image shows a class"),
        (shown([0, 1], [0, 1]), "each class is in all images or in none"),
    ):
        splits = Splits(**{**parts, split: wrong}, held_out=False)
        said = refused("multilabel", splits)
        assert said.startswith(f"mine: {split}: {content}, so there is nothing to tell")


# The protocol of trained heads


def test_a_protocol_of_heads_says_what_does_not_go_together():
    p = load_protocol("lorac", all_kinds())
    wrong = [
        ({"select": "test"}, "select: test needs a protocol name that says so"),
        ({"length": {"dtd": Length(iterations=1)}}, "length needs a `default`"),
        ({"optimizer": "adamw"}, "adamw and lars are for maps and tokens"),
        ({"optimizer": "lars"}, "adamw and lars are for maps and tokens"),
    ]
    scored = {"train_score": True, "lr": (1.0,), "train_only": ()}
    assert dataclasses.replace(p, **scored).train_score
    for more in ({"lr": (1.0, 2.0)}, {"patience": 0}, {"train_only": ("dtd",)}):
        wrong.append(({**scored, **more}, "train_score needs one rate, no patience"))
    for changes, said in wrong:
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(p, **changes)
    of_tokens = load_protocol("attentive_demo", all_kinds())
    wrong = [
        ({"optimizer": "sgd"}, "`optimizer: adamw` or lars, no patience, no head"),
        ({"patience": 0}, "`optimizer: adamw` or lars, no patience, no head"),
        ({"head": "lphi"}, "`optimizer: adamw` or lars, no patience, no head"),
        ({"train_only": ("dtd",)}, "no select, train_score or train_only"),
        (
            {"select": "test", "protocol": "testsel-v1"},
            "no select, train_score or train_only",
        ),
        ({"train_score": True, "lr": (1.0,)}, "no select, train_score or train_only"),
        ({"augment": None}, "attentive heads train on views: give `augment`"),
    ]
    for changes, said in wrong:
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(of_tokens, **changes)
    assert dataclasses.replace(of_tokens, optimizer="lars").optimizer == "lars"


def test_segmentation_cuts_within_its_images():
    p = load_protocol("seg_demo", all_kinds())
    crop = p.geometry.crop
    said = "geometry.crop may be at most resize, stride at most geometry.crop"
    for changes in ({"stride": crop + 1}, {"sides": {"other": crop - 1}}):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(p, **changes)
    fits = dataclasses.replace(p, stride=crop, sides={"other": crop})
    assert (fits.side("other"), fits.side("scenes")) == (crop, p.geometry.resize)
    for changes in ({"optimizer": "lars"}, {"augment": CropAugment()}):
        with pytest.raises(
            ValueError, match="segmentation has `optimizer: adamw`, and"
        ):
            dataclasses.replace(p, **changes)


def test_whose_val_trains():
    p = load_protocol("lorac", all_kinds())
    assert p.trains_on_val("dtd") and not p.trains_on_val("birdsnap")
    assert not dataclasses.replace(p, patience=0).trains_on_val("dtd")
    tokens = load_protocol("attentive_demo", all_kinds())
    assert not tokens.trains_on_val("dtd")
    assert dataclasses.replace(tokens, lr=(1.0,)).trains_on_val("dtd")
    assert p.steps("dtd", 1) == 5000 and p.steps("cars", 1) == 30000


def test_a_grid_is_each_rate_by_each_decay():
    p = load_protocol("attentive_demo", all_kinds(), ["lr=0.1,0.2", "weight_decay=7"])
    assert p.grid == [(0.1, 7.0), (0.2, 7.0)]
    both = dataclasses.replace(p, weight_decays=(0.0, 3.0))
    assert both.grid == [(0.1, 0.0), (0.1, 3.0), (0.2, 0.0), (0.2, 3.0)]
    sgd = load_protocol("lorac", all_kinds(), ["lr=0.1,0.2", "weight_decay=7"])
    assert isinstance(sgd, Sgd) and sgd.grid == [(0.1, 7.0), (0.2, 7.0)]
    # The best of each trunk's scores, with the rate of its place; the first of equal ones
    finals = best_heads(both, ["x", "y"], [[1.0, 5.0, 5.0, 2.0], [0.0, 0.0, 0.0, 3.0]])
    assert finals == [
        FinalHead("x", 1, 0.1, [1.0, 5.0, 5.0, 2.0]),
        FinalHead("y", 3, 0.2, [0.0, 0.0, 0.0, 3.0]),
    ]
    assert best_heads(both, ["x"], None) == [FinalHead("x", 0, 0.1)]


def test_protocols_of_one_stream_differ_in_their_heads_alone():
    p = load_protocol("attentive_demo", all_kinds())
    stream = probe_of("attentive").stream
    of_heads = {
        "protocol": "other-v1",
        "pool": "mean",
        "optimizer": "lars",
        "lr": (1.0, 2.0),
        "weight_decay": 0.5,
        "weight_decays": (0.1, 0.2),
        "momentum": 0.1,
        "beta2": 0.1,
    }
    for name, value in of_heads.items():
        assert stream(dataclasses.replace(p, **{name: value})) == stream(p), name
    others = {
        "batch_size": 3,
        "length": {"default": Length(iterations=3)},
        "augment": CropAugment(size=8),
        "holdout": 0.3,
        "precision": "bf16",
        "lr": (1.0,),  # which holds nothing out
    }
    for name, value in others.items():
        assert stream(dataclasses.replace(p, **{name: value})) != stream(p), name
