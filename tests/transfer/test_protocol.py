"""What protocols share, by numbers worked out by hand: rates, lengths, sizes, names; their loading."""

import math

import pytest

from backbench.errors import BadInput
from backbench.recipes import config
from backbench.records import protocol_fingerprints
from backbench.transfer import protocols
from backbench.transfer.protocol import (
    CropAugment,
    Geometry,
    Length,
    Protocol,
    RateSchedule,
    ScaledRates,
    TrunkGeometry,
)


@pytest.mark.parametrize(
    ("length", "images", "batch", "steps"),
    [
        (Length(iterations=7), 1000, 10, 7),
        (Length(epochs=2), 1000, 250, 8),
        (Length(epochs=1.5), 1000, 300, 5),
        (Length(epochs=0.001), 100, 100, 1),
    ],
)
def test_a_length_is_so_many_steps(length, images, batch, steps):
    assert length.steps(images, batch) == steps


@pytest.mark.parametrize("both", [{}, {"epochs": 1, "iterations": 1}])
def test_a_length_has_one_unit(both):
    with pytest.raises(ValueError, match="either epochs or iterations"):
        Length(**both)


def half_cosine(share):
    return 0.5 * (1 + math.cos(math.pi * share))


STEPS = {"name": "step", "milestones": (0.5, 0.75)}
DINOV3 = {"name": "dinov3", "warmup": 0.2}


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        ({}, 0, 1.0),
        ({}, 5, 0.5),
        ({}, 9, half_cosine(0.9)),
        # The cosine runs over the steps after the warm-up
        ({"warmup": 0.2}, 0, 0.5),
        ({"warmup": 0.2}, 1, 1.0),
        ({"warmup": 0.2}, 2, 1.0),
        ({"warmup": 0.2}, 6, 0.5),
        (STEPS, 4, 1.0),
        (STEPS, 5, 0.1),
        (STEPS, 7, 0.1),
        (STEPS, 8, 0.01),
        ({**STEPS, "gamma": 0.2}, 8, 0.04),
        # Steps 0, 1 and 2 are the first epoch, of 2.5 steps
        ({"name": "epoch_decay", "gamma": 0.5}, 2, 1.0),
        ({"name": "epoch_decay", "gamma": 0.5}, 3, 0.5),
        ({"name": "epoch_decay", "gamma": 0.5}, 5, 0.25),
        ({"name": "constant"}, 9, 1.0),
        (DINOV3, 0, 1e-6),
        (DINOV3, 1, (0.5 + 0.5e-6) * 0.9),
        (DINOV3, 4, 0.5),
    ],
)
def test_the_factor_of_each_schedule(schedule, step, factor):
    found = RateSchedule(**schedule).factor(step, 10, 2.5)
    assert found == pytest.approx(factor, rel=1e-9)


def test_a_geometry_grows_with_the_trunks_own_size():
    fixed = {"interpolation": "bicubic", "square": True}
    geometry = TrunkGeometry(resize=256, crop=224, of="trunk", **fixed)
    assert geometry.size(448) == 448
    assert geometry.at(448) == Geometry(resize=512, crop=448, **fixed)
    assert geometry.at(112) == Geometry(resize=128, crop=112, **fixed)
    assert TrunkGeometry(of=320).size(448) == 320
    assert CropAugment(size=224).at(448) == CropAugment(size=448)


@pytest.mark.parametrize(
    "wrong", [{"scale": (0.5, 0.4)}, {"scale": (0, 1)}, {"ratio": (2, 1)}]
)
def test_ranges_of_crops_increase(wrong):
    with pytest.raises(ValueError, match="must be positive and increasing"):
        CropAugment(**wrong)
    assert CropAugment(scale=(0.5, 0.5)).scale == (0.5, 0.5)


def test_a_rate_is_that_of_the_reference_batch():
    protocol = ScaledRates(
        kind="sgd", protocol="p-v1", reference_batch=256, batch_size=64
    )
    assert protocol.used(0.2) == pytest.approx(0.05)


def test_the_name_says_precision_and_head():
    assert Protocol(kind="knn", protocol="p-v1").name == "p-v1"
    with_head = Protocol(kind="knn", protocol="p-v1", precision="bf16", head="lphi")
    assert with_head.name == "p-v1-bf16-lphi"
    assert with_head.space == "lphi"
    assert Protocol(kind="knn", protocol="p-v1").space == "trunk"


@pytest.mark.parametrize("value", ["5,20", "[5,20]"])
def test_a_list_is_changed_with_and_without_brackets(value):
    changed = protocols.load_protocol("knn", ["knn"], [f"k={value}"])
    assert changed.k == (5, 20)
    assert protocols.changes(changed).startswith("k is [5, 20], not [")
    assert protocols.changes(protocols.load_protocol("knn", ["knn"])) == ""


def test_one_value_of_a_list_is_a_list():
    assert protocols.load_protocol("knn", ["knn"], ["k=7"]).k == (7,)


def test_another_kind_is_refused_by_name():
    with pytest.raises(BadInput, match=r"kind 'knn'; this command runs sgd"):
        protocols.load_protocol("knn", ["sgd"])


def test_a_listed_protocol_is_told_by_its_comment_or_by_its_rows_name():
    told = dict(line.split(maxsplit=1) for line in protocols.listing("finetune"))
    assert told["finetune"] == "All layers on the whole train split of any dataset"
    assert told["finetune_demo"] == "finetune-demo-v1"


def test_each_verb_lists_its_own_protocols():
    listed = {}
    for verb in ("linear", "finetune", "semisup"):
        listed[verb] = {line.split()[0] for line in protocols.listing(verb)}
    assert "knn" in listed["linear"] and "semisup" in listed["semisup"]
    assert "finetune" in listed["finetune"]
    assert not listed["finetune"] & listed["semisup"]
    assert not listed["linear"] & (listed["finetune"] | listed["semisup"])
    for verb, whole in (("finetune", True), ("semisup", False)):
        for name in listed[verb]:
            parts = protocols.load_protocol(name, ["finetune"]).parts
            assert ("100" in parts) == whole, name


def test_all_keys_that_differ_are_told_and_what_changes_no_number_is_not():
    known = protocols.load_protocol("knn", ["knn"])
    changed = protocols.load_protocol("knn", ["knn"], ["k=5", "temperature=0.1"])
    said = protocols.changes(changed)
    assert said.startswith(
        "k is [5], not [5, 20, 200]; temperature is 0.1, not 0.07 as in the shipped knn;"
        " its columns have a name of their own, knn-v1~"
    )
    assert len(said.rpartition("~")[2]) == protocol_fingerprints.DIGITS
    free = protocols.load_protocol("knn", ["knn"], ["feature_batch=3"])
    assert free != known and protocols.changes(free) == ""
    mixed = protocols.load_protocol("knn", ["knn"], ["feature_batch=3", "k=5"])
    assert protocols.changes(mixed).startswith("k is [5], not [5, 20, 200] as in")
    # A name of its own is bound to nothing
    own = protocols.load_protocol("knn", ["knn"], ["k=5", "protocol=mine-v1"])
    assert protocols.changes(own) == ""
    # Another of the shipped names is compared with its own recipe
    other = protocols.load_protocol("knn_own", ["knn"], ["k=5"])
    assert "as in the shipped knn_own; its columns" in protocols.changes(other)


def test_the_name_that_is_told_is_that_of_the_column_on_this_dataset():
    changed = protocols.load_protocol("semisup_own", ["finetune"], ["geometry.of=32"])
    marks = {}
    for dataset in ("cats", "dogs"):
        row = {**config.to_dict(changed), "dataset": dataset}
        mark = protocol_fingerprints.of_recipe(
            "semi_10pct", "semisup-own-v1", row, "val"
        )
        name = f"semisup-own-v1~{mark[: protocol_fingerprints.DIGITS]}"
        assert protocols.changes(changed, dataset).endswith(
            f"; its columns have a name of their own, {name}"
        )
        marks[dataset] = mark
    assert marks["cats"] != marks["dogs"]
    # What measures any dataset by its shipped keys is no other protocol
    same = protocols.load_protocol("semisup_own", ["finetune"])
    assert protocols.changes(same, "cats") == ""


def test_a_text_a_list_and_nothing_are_written_as_they_are():
    def changed(name, kinds, *overrides):
        return protocols.load_protocol(name, kinds, overrides)

    assert changed("lorac", ["sgd"], "lr=null", "lr=0.5").lr == (0.5,)
    assert changed("lorac", ["sgd"], "augment=null").augment is None
    assert changed("lorac", ["sgd"], "augment.scale=0.2,0.4").augment.scale == (
        0.2,
        0.4,
    )
    assert changed("knn", ["knn"], "geometry.crop=32").geometry.crop == 32
    with pytest.raises(BadInput, match=r"^--protocol knn kk=3 k=5: unknown key 'kk'"):
        changed("knn", ["knn"], "kk=3", "k=5")


def test_kinds_are_listed_once():
    kinds = protocols.all_kinds()
    assert len(set(kinds)) == len(kinds)
    assert {"sgd", "knn", "finetune", "ood", "seg"} <= set(kinds)
    assert protocols.class_of("finetune").__name__ == "Finetune"
    assert protocols.class_of("knn").__name__ == "Knn"


@pytest.mark.parametrize(
    ("size", "resize", "crop"), [(224, 256, 224), (192, 219, 192), (33, 38, 33)]
)
def test_sides_at_another_size_are_rounded(size, resize, crop):
    geometry = TrunkGeometry(of="trunk").at(size)
    assert (geometry.resize, geometry.crop) == (resize, crop)
    assert CropAugment(size=176).at(size).size == round(176 * size / 224)


def test_the_recipe_that_a_message_names_is_that_of_the_folder():
    own = TrunkGeometry(of="trunk")
    assert Protocol(kind="knn", protocol="p-v1").recipe == "knn"
    assert Protocol(kind="knn", protocol="p-v1", geometry=own).recipe == "knn_own"
