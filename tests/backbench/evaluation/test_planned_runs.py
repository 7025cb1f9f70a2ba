"""Which runs follow from wanted tasks: their folders, their checkpoints, their recipes and requests."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.evaluation import plan as planning
from backbench.evaluation.plan import EvaluationPlan, make_plan, refuse_places
from backbench.evaluation.wanted import WantedTask, parse_task
from backbench.images.image_list import ImageList
from backbench.recipes import config


def listed(labels, classes=("a", "b", "c")):
    """A list of files that nobody reads."""
    paths = tuple(f"{i}.png" for i in range(len(labels)))
    return ImageList(Path("/d"), paths, tuple(labels), classes)


def with_images(*counts, name="mine"):
    """A plan that has read a dataset with so many images of each class to train on."""
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    classes = tuple("abcdef"[: len(counts)])
    # Some of them are val's
    whole = listed(labels, classes)
    some = list(range(0, len(labels), 3))
    rest = [i for i in range(len(labels)) if i % 3]
    found = Splits(whole.subset(rest), whole.subset(some), whole, held_out=True)
    return EvaluationPlan(
        root=Path("root"),
        out=Path("out"),
        seed=0,
        wanted=(),
        checkpoints=(),
        images={(name, False, False): found},
    )


def a_point(mark, size=None, strides=(4, 8, 16, 32)):
    """A checkpoint, as far as a plan looks at it."""
    blank = SimpleNamespace(size=size, strides=strides)
    about = {"arch": "x", "stem": "imagenet", "reading": "pooled"}
    return SimpleNamespace(digest=mark * 64, blank=lambda: blank, **about)


@pytest.mark.parametrize(
    ("task", "recipe", "counts", "words"),
    [
        ("knn", {"k": [5, 20, 200]}, (10, 10), ["k=5,20"]),
        ("knn", {"k": [5, 20, 200]}, (100, 100), []),
        ("knn", {"k": [20, 5]}, (3, 4), ["k=5"]),
        ("knn", {"k": [5, 20]}, (2, 2), ["k=1"]),
        ("fewshot", {"shots": 2}, (9, 1, 4), ["shots=1"]),
        ("fewshot", {"shots": 2}, (9, 2, 4), []),
        ("logreg", {}, (1, 1), []),
        # As many as each class has are no point of their own: that is the one of all labels
        ("label_curve", {"labels": [1, 2, 5, 10]}, (5, 5), ["labels=1,2"]),
        ("label_curve", {"labels": [1, 2, 5, 10]}, (5, 6), ["labels=1,2,5"]),
        ("label_curve", {"labels": [1, 2, 5]}, (5, 6), []),
        ("label_curve", {"labels": [2, 5]}, (1, 9), ["labels=1"]),
    ],
)
def test_a_recipe_asks_for_no_more_than_there_is(task, recipe, counts, words):
    wanted = WantedTask(task, "mine", f"{task}_own")
    assert planning._fewer(wanted, recipe, with_images(*counts)) == words


def planned(monkeypatch, texts, points, *, files=None, **how):
    """The runs of tasks on a dataset of two classes with four images each."""
    read = with_images(4, 4).images
    found = next(iter(read.values()))
    monkeypatch.setattr(planning.catalog, "load", lambda *_, **__: found)
    wanted = [parse_task(text, "mine") for text in texts]
    if files is None:
        files = {Path("out") / f"{p.digest[:3]}.safetensors": p for p in points}
    return make_plan(wanted, files, root=Path("root"), out=Path("out"), **how)


def test_readings_take_all_checkpoints_and_trainings_one_each(monkeypatch):
    points = [a_point("a"), a_point("b")]
    texts = ["logreg", "calibration", "linear", "analyze", "finetune"]
    plan = planned(monkeypatch, texts, points)
    assert [task.task for task in plan.wanted] == texts
    assert plan.checkpoints == tuple(points)
    runs = [
        (run.task.task, [p.digest[0] for p in run.checkpoints]) for run in plan.runs
    ]
    assert runs == [
        ("logreg", ["a", "b"]),
        ("linear", ["a", "b"]),
        ("analyze", ["a", "b"]),
        ("finetune", ["a"]),
        ("finetune", ["b"]),
    ]
    assert plan.of(plan.wanted[4]) == plan.runs[3:]
    assert plan.of(plan.wanted[1]) == []
    for run in plan.runs:
        digests = "".join(p.digest for p in run.checkpoints)
        mark = hashlib.sha256(digests.encode()).hexdigest()[:8]
        assert run.out == Path("out") / f"{run.task.folder}-{mark}"
        assert run.request.out == run.out
    first, *_, tuned, last = plan.runs
    both = (Path("out/aaa.safetensors"), Path("out/bbb.safetensors"))
    assert first.request.checkpoints == both
    assert (tuned.request.checkpoint, last.request.checkpoint) == both


def test_the_only_checkpoint_of_a_folder_has_plain_names(monkeypatch):
    point = a_point("a")
    files = {Path("out/checkpoint.safetensors"): point}
    (run,) = planned(monkeypatch, ["logreg"], [point], files=files).runs
    assert run.out == Path("out/logreg-mine-logreg_own")
    # Below another folder the same name is another file
    files = {Path("elsewhere/checkpoint.safetensors"): point}
    (run,) = planned(monkeypatch, ["logreg"], [point], files=files).runs
    assert run.out.name.startswith("logreg-mine-logreg_own-")


def test_a_recipe_by_default_is_fitted_and_one_with_changes_is_not(monkeypatch):
    points = [a_point("a"), a_point("b", size=32), a_point("c", size=224)]
    plan = planned(
        monkeypatch,
        [
            "knn@knn",
            "knn@knn_own",
            "knn@knn k=3",
            "knn@knn_demo",
            "linear",
            "label_curve",
        ],
        points,
    )
    said = []
    for run in plan.runs:
        request = run.request
        said.append((request.protocol, request.overrides, len(run.checkpoints)))
    assert said == [
        # Eight images have five neighbours at most; a trunk for 32 pixels reads 32 of 37
        ("knn", ("k=5",), 2),
        ("knn", ("k=5", "geometry.resize=37", "geometry.crop=32"), 1),
        ("knn_own", ("k=5",), 3),
        ("knn", ("k=3",), 3),
        ("knn_demo", (), 3),
        ("linear_own", (), 3),
        ("label_curve_own", ("labels=1,2",), 3),
    ]
    # One size for all is no change of what is read
    (run,) = planned(monkeypatch, ["knn@knn_own geometry.of=64"], points).runs
    assert run.request.overrides == ("geometry.of=64", "k=5")


def test_the_twelve_together_are_not_fitted(monkeypatch):
    (run,) = planned(monkeypatch, ["knn/all"], [a_point("b", size=32)]).runs
    assert (run.request.protocol, run.request.overrides) == ("knn", ())
    assert run.request.datasets == "all"


def test_a_plain_transformer_has_a_pyramid_of_its_own(monkeypatch):
    points = [a_point("a"), a_point("b", strides=(16,)), a_point("c")]
    texts = ["faster_rcnn", "mask_rcnn@mask_rcnn_R_50_FPN_1x"]
    plan = planned(monkeypatch, texts, points, engine="own", seed=2)
    found = []
    for run in plan.runs:
        request = run.request
        about = (request.config_file, run.checkpoints[0].digest[0])
        found.append(about)
        assert (request.dataset, request.engine, request.seed) == ("mine", "own", 2)
        assert request.data == Path("root")
    usual = "mask_rcnn_R_50_FPN_1x"
    assert found == [
        ("faster_rcnn_own", "a"),
        ("faster_rcnn_own", "c"),
        ("faster_rcnn_own_plain", "b"),
        (usual, "a"),
        (usual, "b"),
        (usual, "c"),
    ]


def test_what_is_asked_beside_the_tasks_reaches_each_request(monkeypatch):
    how = {"lists": Path("l"), "accelerator": "cpu", "workers": 3, "seed": 5}
    texts = ["semi_1pct", "semi_10pct", "knn", "faster_rcnn/coco2017"]
    one, ten, knn, boxes = planned(monkeypatch, texts, [a_point("a")], **how).runs
    assert (one.request.percent, ten.request.percent) == (1, 10)
    for run in (one, ten):
        assert (run.request.lists, run.request.dataset) == (Path("l"), "mine")
    for run in (one, ten, knn):
        request = run.request
        assert (request.accelerator, request.workers, request.seed) == ("cpu", 3, 5)
        assert request.data == Path("root")
    # COCO stands in the config
    assert boxes.request.dataset is None


def test_images_are_read_once_for_all_runs(monkeypatch):
    read = []

    def load(name, root, *, seed, multilabel):
        read.append((name, root, seed, multilabel))
        return with_images(4, 4).images["mine", False, False]

    monkeypatch.setattr(planning.catalog, "load", load)
    texts = [
        "knn/mine",
        "fewshot/mine",
        "multilabel/boxes",
        "linear/cifar10,dtd",
        # Trainings read their own, and so do detectors and label maps
        "finetune/cars",
        "faster_rcnn/boxes",
        "segmentation/ade20k",
        "calibration/mine",
        # But what is refused of a folder of one's own is refused first
        "finetune/other",
        "semi_1pct/another",
        "analyze/third",
    ]
    wanted = tuple(parse_task(text) for text in texts)
    plan = EvaluationPlan(
        root=Path("root"), out=Path("out"), seed=4, wanted=wanted, checkpoints=()
    )
    planning.read_lists(plan)
    names = [
        ("mine", False),
        ("boxes", True),
        ("cifar10", False),
        ("dtd", False),
        ("other", False),
        ("another", False),
    ]
    assert read == [(name, Path("root"), 4, several) for name, several in names]


def test_a_recipe_that_is_not_there_is_refused_first(monkeypatch):
    looked = []

    def find(name, kind):
        looked.append((name, kind))
        return config.find_recipe(name, kind)

    monkeypatch.setattr(planning, "config", SimpleNamespace(find_recipe=find))
    texts = ["knn@knn,fewshot k=3", "calibration", "faster_rcnn", "finetune"]
    planning.refuse_recipes([parse_task(text, "mine") for text in texts])
    assert looked == [
        ("knn", "transfer"),
        ("fewshot", "transfer"),
        ("faster_rcnn_own", "detection"),
        ("finetune_own", "transfer"),
    ]
    for text, name in (("knn@knn,nobody", "nobody"), ("finetune@a,b", "a,b")):
        with pytest.raises(BadInput, match=f"no recipe '{name}'"):
            planning.refuse_recipes([parse_task(text, "mine")])


@pytest.mark.parametrize(
    ("accelerator", "workers"), [("cpu", None), ("auto", 0), ("cuda", 2)]
)
def test_detectors_take_no_options_of_place(accelerator, workers):
    others = [parse_task(text, "mine") for text in ("knn", "finetune")]
    boxes = [*others, parse_task("mask_rcnn", "mine")]
    refuse_places(others, accelerator, workers)
    refuse_places(boxes, "auto", None)
    with pytest.raises(
        BadInput, match="mask_rcnn: --accelerator and --workers are for"
    ):
        refuse_places(boxes, accelerator, workers)


@pytest.mark.parametrize(
    "text", ["analyze@analyze augmentations=4", "faster_rcnn@faster_rcnn_own x=1"]
)
def test_changes_that_a_verb_does_not_take_are_refused(text):
    """They would name a folder, and the run would be that of the recipe as it is."""
    task = parse_task(text, "mine")
    with pytest.raises(BadInput, match=f"'{task.words[1]}' after {task.task}@"):
        planning.refuse_recipes([task])
