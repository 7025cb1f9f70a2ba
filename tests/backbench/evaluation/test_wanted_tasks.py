"""How tasks are read, placed on a folder and given one size; what is refused by its own words."""

from types import SimpleNamespace

import pytest
from support.layouts import picture

from backbench.errors import BadInput
from backbench.evaluation import wanted
from backbench.evaluation.wanted import WantedTask, parse_task, place_tasks


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("knn/cifar10", ("knn", "cifar10", "knn")),
        ("knn/mine", ("knn", "mine", "knn_own")),
        ("knn/mine@knn k=5,20", ("knn", "mine", "knn k=5,20")),
        ("knn/all", ("knn", "all", "knn")),
        # Whose numbers are of the folder's own size, and whose are not
        ("layers/mine", ("layers", "mine", "layers_own")),
        ("loaders/mine", ("loaders", "mine", "loaders_own")),
        ("label_curve/mine", ("label_curve", "mine", "label_curve_own")),
        ("semi_1pct/mine", ("semi_1pct", "mine", "semisup_own")),
        ("semi_10pct/mine", ("semi_10pct", "mine", "semisup_own")),
        ("semi_1pct/imagenet", ("semi_1pct", "imagenet", "semisup")),
        ("multilabel/mine", ("multilabel", "mine", "multilabel_own")),
        ("multilabel_svm/mine", ("multilabel_svm", "mine", "multilabel_svm_own")),
        ("class_retrieval/mine", ("class_retrieval", "mine", "class_retrieval")),
        ("analyze/mine", ("analyze", "mine", "analyze")),
        # Detectors have other known data than classes
        ("faster_rcnn/cars", ("faster_rcnn", "cars", "faster_rcnn_own")),
        ("mask_rcnn/scenes", ("mask_rcnn", "scenes", "mask_rcnn_R_50_FPN_1x")),
        ("faster_rcnn/voc2007", ("faster_rcnn", "voc2007", "faster_rcnn_R_50_FPN_1x")),
        ("keypoint_rcnn/mine", ("keypoint_rcnn", "mine", "keypoint_rcnn_own")),
        ("calibration/mine", ("calibration", "mine", "kept scores")),
    ],
)
def test_a_task_is_read_from_its_text(text, task):
    assert parse_task(text) == task


def test_a_dataset_that_is_named_counts_before_the_folder():
    assert parse_task("knn/digits@knn", "mine").dataset == "digits"
    assert parse_task("knn@knn", "mine").dataset == "mine"
    with pytest.raises(
        BadInput, match=r"task 'knn/': expected task/dataset\[@recipe\]"
    ):
        parse_task("knn/", "mine")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            "clean_test/digits",
            "follows from kept predictions and a list; measure knn or another task, then"
            " `backbench rescore RUNS --list FILE`",
        ),
        (
            "mask_rcnn_errors/mine",
            "follows from kept detections; measure mask_rcnn, then"
            " `backbench errors RUNS --data ROOT`",
        ),
    ],
)
def test_what_follows_from_others_names_the_command_that_makes_it(task, said):
    with pytest.raises(BadInput) as error:
        parse_task(task)
    assert str(error.value) == f"task '{task}': {said}"


@pytest.mark.parametrize(
    ("recipe", "words", "folder"),
    [
        ("knn", ["knn"], "knn-mine-knn"),
        (
            "knn k=5,20 geometry.crop=32",
            ["knn", "k=5,20", "geometry.crop=32"],
            "knn-mine-knn-k_5_20-geometry.crop_32",
        ),
        # A path with a space in it is one word
        ("my own/fast.yaml  k=3", ["my own/fast.yaml", "k=3"], "knn-mine-fast-k_3"),
        ("knn,a/b.yaml", ["knn,a/b.yaml"], "knn-mine-knn-b"),
        ("knn A=3", ["knn A=3"], "knn-mine-knn_A_3"),
    ],
)
def test_a_recipe_and_its_changes_are_words_and_a_folders_name(recipe, words, folder):
    task = WantedTask("knn", "mine", recipe)
    assert task.words == words
    assert task.folder == folder


# One size for all


def test_one_size_is_a_change_of_the_protocol():
    task = WantedTask("knn", "mine", "knn_own k=5")
    assert wanted.at_size(task, 64) == ("knn", "mine", "knn_own k=5 geometry.of=64")
    calibration = WantedTask("calibration", "mine", "kept scores")
    assert wanted.at_size(calibration, 64) is calibration
    for task, named in (
        (WantedTask("knn", "mine", "knn"), "knn@knn_own"),
        (WantedTask("semi_1pct", "mine", "semisup"), "semi_1pct@semisup_own"),
        (WantedTask("faster_rcnn", "mine", "faster_rcnn_own"), "knn@knn_own"),
    ):
        said = f"--size 64: {task.task}'s protocol {task.recipe} has a size of its own"
        with pytest.raises(BadInput, match=f"{said}; .* folder, as {named}$"):
            wanted.at_size(task, 64)


# The folder of --data


@pytest.fixture
def mine(tmp_path):
    """Two classes of three pictures each."""
    for seed, name in enumerate(3 * ["cat", "dog"]):
        picture(tmp_path / "data" / "mine" / name / f"{seed}.png", seed)
    return tmp_path / "data" / "mine"


def test_tasks_without_a_dataset_are_of_the_folder(mine, tmp_path):
    out = tmp_path / "runs"
    root, found = place_tasks(None, mine, out)
    assert root == mine.parent
    names = ("knn", "fewshot", "logreg")
    assert found == [(name, "mine", f"{name}_own") for name in names]
    assert place_tasks("knn", mine, out) == (root, found[:1])
    # Where one of several names its dataset, the folder is still that of the other
    root, both = place_tasks(["knn/cifar10", "knn"], mine, out)
    assert (root, both) == (mine.parent, [("knn", "cifar10", "knn"), found[0]])
    # An iterator is read once, and a recipe may have a slash
    _, one = place_tasks(iter(["knn@a/b.yaml"]), mine, out)
    assert one == [("knn", "mine", "a/b.yaml")]
    _, sized = place_tasks(None, mine, out, size=48)
    assert {task.recipe.partition(" ")[2] for task in sized} == {"geometry.of=48"}


def test_tasks_that_name_their_datasets_lie_below_the_root(mine, tmp_path):
    root, found = place_tasks(["knn/mine", "knn/digits"], mine.parent, tmp_path / "o")
    assert root == mine.parent
    assert [task.dataset for task in found] == ["mine", "digits"]
    with pytest.raises(BadInput, match="lies in the dataset"):
        place_tasks(["knn/digits", "knn/mine"], mine.parent, mine / "runs")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BadInput, match=f"{file}: is a file; --out needs a folder"):
        place_tasks(["knn/mine"], mine.parent, file)
    with pytest.raises(BadInput, match="no tasks given; a task is task/dataset"):
        place_tasks([], mine, tmp_path / "o")


def test_a_folder_that_is_no_dataset_is_refused_by_its_own_words(mine, tmp_path):
    """The name, the link and the part of a dataset."""
    link = tmp_path / "linked"
    link.symlink_to(mine)
    assert wanted.dataset_folder(link) == link, "a link has the name that is given"
    for name in ("a,b", "all"):
        wrong = mine.rename(mine.with_name(name))
        with pytest.raises(BadInput, match="has no comma and is not 'all'; rename it"):
            wanted.dataset_folder(wrong)
        wrong.rename(mine)
    with pytest.raises(BadInput, match=f"--data {tmp_path / 'no'}: .*mine/<class>/"):
        wanted.dataset_folder(tmp_path / "no")
    divided = tmp_path / "divided"
    for seed, split in enumerate(("train", "test")):
        for label in ("cat", "dog"):
            picture(divided / split / label / "0.png", 10 * seed + len(label))
    for part in (divided / "train" / "cat", divided / "test" / "dog"):
        said = f"--data {part}: lies inside the dataset {divided}; give {divided}"
        with pytest.raises(BadInput) as error:
            wanted.dataset_folder(part)
        assert str(error.value) == said


def test_a_container_that_is_refused_says_why(tmp_path, monkeypatch):
    file = tmp_path / "mine"
    why = f"{file}.tar: holds no images; give another"
    monkeypatch.setattr(wanted.finding, "refused", lambda folder: why)
    with pytest.raises(BadInput) as error:
        wanted.dataset_folder(file)
    assert str(error.value) == f"--data {why}"


# Boxes


def boxed(monkeypatch, *, outlines=False):
    """Let every folder hold boxes in COCO's layout."""
    boxes = SimpleNamespace(layout="COCO", has_outlines=lambda: outlines)
    monkeypatch.setattr(wanted.box_folders, "find", lambda base: boxes)
    monkeypatch.setattr(wanted.box_folders, "looks_like_boxes", lambda base: True)
    return boxes


def test_a_folder_of_boxes_is_for_detectors_and_for_its_classes(mine, monkeypatch):
    assert wanted.boxes_in(mine, ["knn"]) is None
    boxes = boxed(monkeypatch)
    fits = ["faster_rcnn@x", "multilabel", "multilabel_svm", "mask_rcnn_errors"]
    assert wanted.boxes_in(mine, fits) is boxes
    assert wanted.boxes_in(mine, None) is boxes
    for other in ("logreg", "knn/mine@x", "nobody"):
        kind = other.partition("/")[0]
        said = (
            f"{mine}: holds boxes (COCO's layout), and {kind} reads one class an image;"
        )
        with pytest.raises(BadInput) as error:
            wanted.boxes_in(mine, ["faster_rcnn", other])
        assert str(error.value).startswith(said)


@pytest.mark.parametrize("outlines", [False, True])
def test_detectors_are_wanted_where_boxes_are(mine, tmp_path, monkeypatch, outlines):
    boxed(monkeypatch, outlines=outlines)
    root, found = place_tasks(None, mine, tmp_path / "runs")
    assert root == mine.parent
    detectors = ["faster_rcnn", "mask_rcnn"] if outlines else ["faster_rcnn"]
    assert found == [(name, "mine", f"{name}_own") for name in detectors]
    # What is named counts
    _, found = place_tasks("multilabel", mine, tmp_path / "runs")
    assert [task.task for task in found] == ["multilabel"]


@pytest.mark.parametrize("name", ["cifar10", "coco2017", "scenes"])
def test_boxes_have_no_known_datasets_name(tmp_path, monkeypatch, name):
    boxed(monkeypatch)
    folder = tmp_path / name
    folder.mkdir()
    said = f"has the name of the known dataset {name}; rename the folder"
    with pytest.raises(BadInput, match=said):
        wanted.dataset_folder(folder, detects=True)


def test_boxes_have_a_name_that_can_be_printed(tmp_path, monkeypatch):
    boxed(monkeypatch)
    folder = tmp_path / "a\x07b"
    folder.mkdir()
    with pytest.raises(BadInput) as error:
        wanted.dataset_folder(folder, detects=True)
    assert str(error.value) == (
        f"--data {tmp_path}/a\\x07b: a dataset's name has no control character, as"
        " '\\x07'; rename it"
    )


def test_boxes_of_ones_own_are_looked_at_before_a_detector_trains(
    monkeypatch, tmp_path
):
    from backbench.detection import lint

    looked = []
    monkeypatch.setattr(
        lint, "check_folder", lambda base, task: looked.append((base, task.name))
    )
    tasks = [
        parse_task(text)
        for text in ("knn/mine", "faster_rcnn/coco2017", "mask_rcnn/a", "faster_rcnn/b")
    ]
    wanted.refuse_boxes(tmp_path, tasks)
    assert looked == [(tmp_path / "a", "mask_rcnn"), (tmp_path / "b", "faster_rcnn")]
