"""What a run of probes does with its groups: what it says, which pass each is in, which rows it returns."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.records import a_result

from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.records import store
from backbench.requests.probe import LinearRequest
from backbench.runs import price
from backbench.runs.state import StopFlag
from backbench.transfer import linear
from backbench.transfer.assignment import Assignment, identity_of
from backbench.transfer.devices import Machine
from backbench.transfer.linear import ProbeRun, Work
from backbench.transfer.probes.kind import Probe, probe_of
from backbench.transfer.protocol import CropAugment
from backbench.transfer.protocols import all_kinds, load_protocol
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint

ONE = Machine(torch.device("cpu"), 0, 1, 0)


def images(labels, classes=("a", "b", "c")):
    """A list of files that nobody reads."""
    paths = tuple(f"{i}.png" for i in range(len(labels)))
    return ImageList(Path("/d"), paths, tuple(labels), classes)


SPLITS = Splits(
    images([0, 1, 2] * 6 + [0, 1]), images([0, 1, 2, 2]), images([0] * 10), False
)
POINTS = tuple(SimpleNamespace(digest=mark * 64, name=f"model {mark}") for mark in "xy")


def group(recipe, *overrides, dataset="mine", points=POINTS, run=Path("run"), **more):
    p = load_protocol(recipe, all_kinds(), overrides)
    row = Dataset(name=dataset, classes=3, sizes=(None,) * 3, read=None)
    return Assignment(
        run=run,
        task=linear.TASK_OF[p.kind],
        dataset=row,
        splits=SPLITS,
        protocol=p,
        seed=0,
        checkpoints=points,
        **more,
    )


def work(*given, done=(), **more):
    of = group(*given, **more)
    pending = [point for point in of.checkpoints if point.digest not in done]
    return Work(of, probe_of(of.protocol.kind), {key: [] for key in done}, pending)


@pytest.fixture
def said(monkeypatch):
    """said(passes, ...): what was announced, and what would cost less."""
    told = []

    def announce(*parts, work, cheaper):
        told.append((parts, dict(work), cheaper))

    monkeypatch.setattr(price, "announce", announce)

    def ask(*passes, on_cpu=True):
        told.clear()
        linear.announce(passes, on_cpu=on_cpu)
        return told

    return ask


# What it says


AS_KNN = ("geometry.resize=256", "geometry.interpolation=bilinear")


def test_features_that_readings_share_are_paid_once(said):
    done = work("knn", "k=7", done=("x" * 64, "y" * 64))
    ((parts, units, cheaper),) = said(
        [done],
        [work("knn", "k=5,20")],
        [work("logreg", "l2=0.1,10,7", *AS_KNN)],
        [work("fewshot", "draws=3")],
    )
    assert parts == (
        "linear on mine",
        "knn-v1 (k = 5, 20), logreg-v1 (best of 7 penalties by val), fewshot-v1 (3 draws of"
        " 2 labels per class)",
        "2 checkpoints",
    )
    assert units == {"image": 34, "fit": 14}
    assert cheaper == "`--protocol fewshot` costs less (`--protocol list` shows all)"


@pytest.mark.parametrize(
    "other",
    [
        {"overrides": ["geometry.interpolation=bicubic"]},
        {"dataset": "other"},
        {"overrides": ["geometry.crop=32"]},
        {"overrides": ["precision=bf16"]},
        {"overrides": ["head=lphi"]},
        {"done": ("x" * 64,)},
    ],
)
def test_other_features_are_paid_as_well(said, other):
    overrides = other.pop("overrides", [])
    ((parts, units, _),) = said(
        [work("knn", "k=5")], [work("fewshot", *overrides, **other)]
    )
    assert units == {"image": 68}
    assert parts[2] == "2 checkpoints"
    others = "mine, other" if "dataset" in other else "mine"
    assert parts[0] == f"linear on {others}"


def test_test_images_alone_and_views_are_features_of_their_own(said):
    live = ["length.default.iterations=6", "lr=1.0"]
    ((_, units, _),) = said(
        [work("knn", "k=5")], [work("cluster")], [work("lorac", *live)]
    )
    assert units == {"image": 34 + 10 + 10, "step": 6}
    # On features that are computed once, heads are trained on the same ones
    ((_, units, _),) = said(
        [work("knn", "k=5")], [work("lorac", *live, "augment=null")]
    )
    assert units == {"image": 34, "step": 6}
    # A pass of two protocols is paid once, and both are named
    steps = "length.default.iterations=6"
    together = [work("attentive_demo", steps), work("attentive_mean_demo", steps)]
    ((parts, units, _),) = said(together)
    assert units == {"step": 6, "image": 14}
    assert "attentive-demo-v1 (" in parts[1] and "attentive-mean-demo-v1 (" in parts[1]


def test_what_would_cost_less_depends_on_what_is_asked(said):
    ((_, _, cheaper),) = said([work("knn")], [work("fewshot")], [work("seg_demo")])
    assert cheaper == "fewer images or a GPU would cost less"
    ((_, _, cheaper),) = said([work("knn")], on_cpu=False)
    assert cheaper == ""
    assert said([work("knn", done=("x" * 64, "y" * 64))]) == []
    assert said() == []
    ((parts, _, _),) = said([work("knn", done=("y" * 64,))])
    assert parts[2] == "1 checkpoint"


def test_a_trunk_that_is_read_at_its_own_size_is_told_once(said, monkeypatch, caplog):
    caplog.set_level("INFO", "backbench")
    size = SimpleNamespace(told=lambda side: f"read at {side}")
    monkeypatch.setattr(linear, "own_size", lambda point: size)
    small = work("knn_own", points=POINTS[:1], own_size=32)
    large = work("knn_own", points=POINTS[1:], own_size=224)
    again = work("fewshot_own", points=POINTS[:1], own_size=32)
    said([small], [large], [again])
    assert caplog.messages == ["model x: read at 32", "model y: read at 224"]


def test_rows_of_each_reading_are_told_together(monkeypatch):
    asked = []

    def probe(kind):
        def sayings(rows):
            asked.append((kind, [(row.metric, folder.name) for row, folder in rows]))
            return [f"of {kind}"]

        return SimpleNamespace(sayings=sayings)

    monkeypatch.setattr(linear, "probe_of", probe)
    rows = [
        (a_result(task="knn", metric="top1_k5"), Path("a")),
        (a_result(task="calibration", metric="nll"), Path("a")),
        (a_result(task="layers", metric="top1"), Path("a")),
        (a_result(task="knn", metric="top1_k20"), Path("b")),
    ]
    assert linear.sayings(rows) == ["of knn", "of layers"]
    assert asked == [
        ("knn", [("top1_k5", "a"), ("top1_k20", "b")]),
        ("layers", [("top1", "a")]),
    ]


# Which pass each is in


def recorded_row(of, point, metric):
    return a_result(
        task=of.task,
        dataset=of.dataset.name,
        protocol=of.protocol.name,
        checkpoint=point.digest,
        metric=metric,
        seed=of.seed,
    )


def test_protocols_of_one_stream_and_of_the_same_pending_checkpoints_share_a_pass():
    steps = "length.default.iterations=6"
    capi, mean = group("attentive_demo", steps), group("attentive_mean_demo", steps)
    other = group("attentive_q32_demo", steps, dataset="other")
    longer = group("attentive_q32_demo", "length.default.iterations=7")
    knn = group("knn", "k=5,20")
    groups = [knn, capi, longer, mean, other]
    together, alone = linear.passes_of(groups, [])
    assert [[one.group for one in each] for each in together] == [
        [capi, mean],
        [longer],
        [other],
    ]
    assert [one.group for one in alone] == [knn]
    assert all(one.pending == list(POINTS) for one in alone)
    # Of knn, one checkpoint has all of its rows and the other one of two
    first, second = POINTS
    rows = [recorded_row(knn, first, f"top1_k{k}") for k in (5, 20)]
    rows += [recorded_row(knn, second, "top1_k5"), recorded_row(mean, first, "top1")]
    together, (of_knn,) = linear.passes_of(groups, rows)
    assert of_knn.pending == [second]
    assert of_knn.done == {first.digest: rows[:2]}
    assert [[one.group for one in each] for each in together] == [
        [capi],
        [longer],
        [mean],
        [other],
    ]


def test_rows_of_others_are_not_of_an_assignment():
    of = group("knn", "k=5")
    point = POINTS[0]
    mine = recorded_row(of, point, "top1_k5")
    others = []
    for changes in (
        {"task": "logreg"},
        {"dataset": "digits"},
        {"protocol": "knn-v2"},
        {"seed": 1},
        {"checkpoint": "z" * 64},
    ):
        others.append(dataclasses.replace(mine, **changes))
    assert of.done(others, ["top1_k5"]) == {}
    assert of.done([*others, mine], ["top1_k5"]) == {point.digest: [mine]}
    # More than is wanted is fine, less is not
    assert of.done([mine], []) == {POINTS[0].digest: [mine], POINTS[1].digest: []}
    assert of.done([mine], ["top1_k5", "top1_k20"]) == {}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Works of fake probes, whose rows are made in the order of the extractor's trunks."""
    monkeypatch.setattr(linear, "_extractor", lambda one, machine, stop: one)

    def rows_of(of, pending):
        return [recorded_row(of, point, "top1") for point in reversed(pending)]

    def measure(of, extractor, machine, stop):
        return rows_of(of, extractor.pending)

    def measure_several(groups, extractor, machine, stop):
        return [rows_of(of, extractor.pending) for of in groups]

    def make(recipe, *, several=False, done=()):
        of = group(recipe, run=tmp_path)
        probe = Probe(
            protocol=type(of.protocol),
            measure=measure,
            measure_several=measure_several if several else None,
        )
        pending = [point for point in of.checkpoints if point.digest not in done]
        rows = {digest: [a_result(checkpoint=digest)] for digest in done}
        return Work(of, probe, rows, pending)

    return make


def test_rows_stand_in_the_order_of_protocols_and_checkpoints(measured, tmp_path):
    first, second = POINTS
    alone = measured("knn", done=(second.digest,))
    state = alone.group.state_file
    state.parent.mkdir()
    state.write_text("what an unfinished one goes on from")
    features = tmp_path / "state" / "features"
    features.mkdir()
    (features / "x.npy").write_text("")
    found = linear.measure([alone], ONE, StopFlag())
    made = recorded_row(alone.group, first, "top1")
    assert found == [made, *alone.done[second.digest]]
    assert not state.exists() and not features.exists()
    both = [measured(name, several=True) for name in ("knn", "fewshot")]
    found = linear.measure(both, ONE, StopFlag())
    assert [(row.protocol, row.checkpoint[0]) for row in found] == [
        ("knn-v1", "x"),
        ("knn-v1", "y"),
        ("fewshot-v1", "x"),
        ("fewshot-v1", "y"),
    ]
    # What is all done is read and not measured
    done = measured("knn", done=(first.digest, second.digest))
    state.write_text("another's")
    found = linear.measure([done], ONE, StopFlag())
    assert found == [*done.done[first.digest], *done.done[second.digest]]
    assert state.exists()


def test_each_run_has_its_folder_its_price_and_its_rows(tmp_path, monkeypatch):
    announced = []
    monkeypatch.setattr(
        linear, "announce", lambda passes, *, on_cpu: announced.append((passes, on_cpu))
    )
    monkeypatch.setattr(linear, "identity_of", lambda groups: {"of": len(groups)})
    monkeypatch.setattr(linear, "evaluate", lambda groups, recorded, *_: list(recorded))
    monkeypatch.setattr(linear.splits, "write_manifests", lambda *_: None)
    runs = []
    kept = []
    for name, recipes in (("a", ("knn", "fewshot")), ("b", ("logreg",))):
        groups = tuple(group(recipe, run=tmp_path / name) for recipe in recipes)
        kept.append(recorded_row(groups[0], POINTS[0], "top1"))
        store.append(tmp_path / name, kept[-1:])
        runs.append(ProbeRun(tmp_path / name, "linear", groups))
    assert linear.measure_runs(runs, ONE) == kept
    ((passes, on_cpu),) = announced
    protocols = [[one.group.protocol.name for one in each] for each in passes]
    assert protocols == [["knn-v1"], ["fewshot-v1"], ["logreg-v1"]] and on_cpu
    # Three numbers of neighbours and one metric, and one metric, of two checkpoints each
    assert [store.owed(run.folder) for run in runs] == [8, 2]


# What a group is read with


def test_trunks_of_unlike_sizes_are_groups_of_their_own(monkeypatch):
    pixels = {"x": 32, "y": 48}
    points = [SimpleNamespace(digest=f"{mark}{n}") for n in (1, 2) for mark in "xy"]
    monkeypatch.setattr(
        linear,
        "own_size",
        lambda point: SimpleNamespace(pixels=pixels[point.digest[0]]),
    )
    of = group("knn_own", points=tuple(points))
    found = linear.of_one_size(of)
    about = [(one.own_size, [p.digest for p in one.checkpoints]) for one in found]
    assert about == [(32, ["x1", "x2"]), (48, ["y1", "y2"])]
    assert [one.geometry.crop for one in found] == [32, 48]
    (one,) = linear.of_one_size(
        group("knn_own", "geometry.of=64", points=tuple(points))
    )
    assert (one.own_size, one.checkpoints) == (64, tuple(points))
    fixed = group("knn")
    assert linear.of_one_size(fixed) == [fixed]
    live = group("linear_own", "augment.size=32")
    said = "linear-own-v1: geometry.of is for readings of pooled features .* kind 'sgd'"
    with pytest.raises(BadInput, match=said):
        linear.of_one_size(live)


@pytest.mark.parametrize(
    ("recipe", "reads"),
    [
        ("knn", True),
        ("logreg", True),
        ("cluster", True),
        ("multilabel", True),
        ("linear_own", True),
        ("lorac", False),
        ("attentive_demo", False),
        ("seg_demo", False),
        ("seg_knn", False),
        ("ood", False),
    ],
)
def test_which_readings_take_pooled_features(recipe, reads):
    assert linear.reads_features(load_protocol(recipe, all_kinds())) == reads


VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"


def test_an_extractor_is_that_of_its_protocol(tmp_path, monkeypatch):
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "cache"))
    state = archs.build_trunk(VIT).state_dict()
    point = Checkpoint(arch=VIT, method="random", state_dict=state)
    small = ["geometry.resize=40", "geometry.crop=32"]
    one = work("knn", *small, "feature_batch=7", "precision=bf16", points=(point,))
    stop = StopFlag()
    made = linear._extractor(one, ONE, stop)
    (trunk,) = made.trunks
    assert (trunk.digest, trunk.precision, trunk.of_layers) == (
        point.digest,
        "bf16",
        None,
    )
    assert (made.batch, made.geometry) == (7, one.group.geometry)
    assert (made.run, made.stop, made.machine) == (one.group.run, stop, ONE)
    assert made.cache.folder == tmp_path / "cache" / "features"
    # Layers are read beside the feature, at the size of the images
    (trunk,) = linear._extractor(
        work("layers", *small, points=(point,)), ONE, stop
    ).trunks
    assert trunk.of_layers is not None and trunk.dim == trunk.of_layers.dim > 12
    # Features of what no file describes stay in the run's own folder
    monkeypatch.setattr(type(point.family), "lasting", lambda *_: False)
    made = linear._extractor(one, ONE, stop)
    assert made.cache.folder == one.group.run / "state" / "features"
    assert made.cache.limit == 50e9


# What an assignment is


def test_an_assignment_names_its_files():
    of = group("knn", dataset="a/b")
    point = SimpleNamespace(digest="0123456789abcdef")
    assert of.stem(point) == "knn-a_b-knn-v1-s0-0123456789ab"
    assert of.stem(point, "_k5") == "knn-a_b-knn-v1_k5-s0-0123456789ab"
    assert of.state_file == Path("run/state/a_b-knn-v1.state")
    sized = dataclasses.replace(of, own_size=48, seed=3)
    assert sized.state_file == Path("run/state/a_b-knn-v1-48px.state")
    assert sized.stem(point).endswith("-s3-0123456789ab")


def test_views_are_of_the_own_size_where_there_is_one():
    augment = CropAugment(size=224)
    assert group("knn").views(augment) is augment
    assert group("knn_own", own_size=112).views(augment).size == 112


def test_a_run_is_what_decides_its_numbers(monkeypatch):
    """One recipe stands by itself, equal ones once; heads count where they are used."""
    monkeypatch.setattr("backbench.images.contents.of_splits", lambda items: "contents")
    knn = group("knn", points=POINTS[:1], own_size=32)
    again = group("knn", points=POINTS[1:], own_size=48)
    found = identity_of([knn, again])
    assert found["recipe"]["protocol"] == "knn-v1"
    assert found["checkpoints"] == [point.digest for point in POINTS]
    assert list(found["datasets"]) == ["mine"]
    assert found["datasets"]["mine"] == knn.hashes
    assert found["seed"] == 0 and "heads" not in found
    head = SimpleNamespace(digest="head")
    other = group("fewshot", dataset="other", found={POINTS[1].digest: head})
    found = identity_of([knn, other])
    assert [recipe["protocol"] for recipe in found["recipe"]] == [
        "knn-v1",
        "fewshot-v1",
    ]
    assert list(found["datasets"]) == ["mine", "other"]
    assert found["image_contents"] == {"mine": "contents", "other": "contents"}
    assert found["heads"] == {POINTS[1].digest: "head"}


# What a request plans


def sized(mark, size=None):
    """A checkpoint whose trunk takes images of one size alone."""

    def refuse_size(height, width):
        if size not in (None, height):
            raise BadInput(f"{mark} takes {size} pixels, not {height} x {width}")

    blank = SimpleNamespace(refuse_size=refuse_size)
    about = {"arch": "x", "stem": "imagenet", "reading": "pooled"}
    return SimpleNamespace(digest=mark * 64, blank=lambda: blank, **about)


@pytest.fixture
def asked(monkeypatch):
    """asked(...): what a request plans on datasets that are read already."""
    looked = []
    monkeypatch.setattr(
        linear.splits, "refuse_untrainable", lambda name, _: looked.append(name)
    )

    def plan(datasets, protocol, *overrides, points=POINTS, few=()):
        request = LinearRequest(
            checkpoints=("x", "y"),
            datasets=datasets,
            protocol=protocol,
            overrides=overrides,
            data=Path("data"),
            out=Path("out"),
            seed=3,
        )
        little = dataclasses.replace(SPLITS, train=images([0, 1]), val=images([2]))
        there = {}
        for name in datasets.split(","):
            there[name, False, False] = little if name in few else SPLITS
        looked.clear()
        return linear.plan_run(request, points, there), looked

    return plan


def test_each_dataset_is_read_by_each_protocol(asked):
    points = (sized("x"), sized("y"))
    both = "knn_demo,fewshot"
    run, looked = asked("mine,other", both, "feature_batch=7", points=points)
    assert (run.folder, run.verb) == (Path("out"), "linear")
    found = [(of.dataset.name, of.task, of.protocol.name) for of in run.groups]
    assert found == [
        ("mine", "knn", "knn-demo-v1"),
        ("mine", "fewshot", "fewshot-v1"),
        ("other", "knn", "knn-demo-v1"),
        ("other", "fewshot", "fewshot-v1"),
    ]
    assert looked == ["mine", "mine", "other", "other"]
    for of in run.groups:
        assert (of.run, of.seed, of.checkpoints) == (Path("out"), 3, points)
        assert of.protocol.feature_batch == 7 and of.heads is None
        assert of.splits is SPLITS


def test_what_the_last_group_cannot_do_is_refused_before_anything_is_measured(asked):
    points = (sized("x"), sized("y"))
    with pytest.raises(BadInput, match="other: k = 5 neighbours of 3 images"):
        asked("mine,other", "knn", "k=5", points=points, few=("other",))
    with pytest.raises(BadInput, match="y takes 32 pixels, not 224 x 224"):
        asked("mine", "knn", points=(sized("x"), sized("y", 32)))
    # Heads on views are for one size, and their trunks take what they take
    run, _ = asked("mine", "lorac", points=(sized("x"), sized("y", 32)))
    assert [of.protocol.kind for of in run.groups] == ["sgd"]


def test_checkpoints_of_one_own_probe_are_measured_together(monkeypatch, caplog):
    caplog.set_level("INFO", "backbench")
    probes = {"x": "knn", "y": "lorac", "z": "knn"}
    asked = []

    def of_checkpoint(name, method, provenance, dataset):
        asked.append((name, method, provenance, dataset))
        return probes[name]

    monkeypatch.setattr(linear.own_probe, "of_checkpoint", of_checkpoint)
    points = [
        SimpleNamespace(name=name, method=f"by {name}", provenance={"of": name})
        for name in "xyz"
    ]
    groups = linear.own_groups(points, "mine")
    assert [(name, p.kind, those) for name, p, those in groups] == [
        ("mine", "knn", (points[0], points[2])),
        ("mine", "sgd", (points[1],)),
    ]
    assert asked == [(each, f"by {each}", {"of": each}, "mine") for each in "xyz"]
    assert caplog.messages == [
        f"{each}: mine by its own probe, {probes[each]}" for each in "xyz"
    ]
