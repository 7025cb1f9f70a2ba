"""Images of several classes: lists from boxes and from VOC, heads as scikit-learn fits them, rows that
are verified."""

import json

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import LinearSVC
from support import own_boxes
from support.records import rows_of

from backbench.cli.program import main
from backbench.datasets import catalog, readers, splits
from backbench.errors import BadInput
from backbench.images.multilabel import ABSENT, IGNORED, PRESENT, mark, table_of
from backbench.records import predictions
from backbench.transfer.features.extractor import Extractor
from backbench.verify import verification

CELLS = ("cell", "plate", "ring")


def boxes(base, *, images=(("train", 14), ("val", 8), ("test", 10))):
    """Write a folder of boxes in COCO's format whose images show some of three classes."""
    rng = np.random.default_rng(0)
    (base / "annotations").mkdir(parents=True)
    for split, count in images:
        (base / "images" / split).mkdir(parents=True)
        about = {"images": [], "annotations": []}
        about["categories"] = [{"id": i + 1, "name": n} for i, n in enumerate(CELLS)]
        for number in range(1, count + 1):
            name = f"{split}_{number}.png"
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            for label in range(3):
                if (number >> label) & 1:
                    pixels[8 * label : 8 * label + 6, :, label] //= 2
                    row = {"id": len(about["annotations"]) + 1, "image_id": number}
                    row |= {"category_id": label + 1, "bbox": [1, 1, 8, 8], "area": 64}
                    about["annotations"].append(row | {"iscrowd": 0})
            Image.fromarray(pixels).save(base / "images" / split / name)
            about["images"].append(
                {"id": number, "file_name": name, "width": 32, "height": 32}
            )
        file = base / "annotations" / f"instances_{split}.json"
        file.write_text(json.dumps(about))
    return base


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "several.yaml"
    keys = {"kind": "multilabel", "protocol": "several-x-v1", "l2": [1, 100, 3]}
    file.write_text(json.dumps({**keys, "geometry": {"resize": 32, "crop": 32}}))
    return file


def command(root, trunks, out, recipe, dataset="mine"):
    line = ["linear", *map(str, trunks), "--datasets", dataset, "--data", str(root)]
    line += ["--workers", "0"]
    return [*line, "--out", str(out), "--protocol", str(recipe), "--accelerator", "cpu"]


def test_marks_say_what_is_shown():
    assert mark([7, 0], [3]) == "0,3?,7"
    assert mark([]) == ""
    table = table_of(["0,3?", ""], 5)
    assert table.tolist() == [[PRESENT, 0, 0, IGNORED, 0], [ABSENT] * 5]


@pytest.mark.parametrize("layout", own_boxes.LAYOUTS)
def test_boxes_in_any_layout_give_the_same_lists(tmp_path, layout):
    own_boxes.LAYOUTS[layout](tmp_path / "mine")
    found = catalog.load("mine", tmp_path, multilabel=True)
    assert found.test.classes == ("cat", "zebra")
    assert not found.held_out
    for split, images in found.items():
        names = [path.rpartition("/")[2] for path in images.paths]
        assert names == [f"{split}_{i}.png" for i in range(1, len(images) + 1)]
        assert images.marks == ("0,1",) * len(images)
    both = found.both()
    assert both.marks == found.train.marks + found.val.marks
    assert splits.manifest(found.test).splitlines()[0].endswith("test_1.png\t0,1")


def voc(root, lists):
    """Write VOC 2007's lists of each class, from split -> image -> what is said of classes 0 and 1."""
    folder = root / "VOCdevkit" / "VOC2007"
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "JPEGImages").mkdir()
    for split, said in lists.items():
        for label, name in enumerate(readers.VOC07_CLASSES):
            lines = []
            for stem, values in said.items():
                value = values[label] if label < len(values) else -1
                lines.append(f"{stem} {value:>2}\n")
            file = folder / "ImageSets" / "Main" / f"{name}_{split}.txt"
            file.write_text("".join(lines))
        for stem in said:
            pixels = np.full((8, 8, 3), len(stem), np.uint8)
            Image.fromarray(pixels).save(folder / "JPEGImages" / f"{stem}.jpg")
    return folder


def test_vocs_difficult_objects_are_ignored(tmp_path, caplog):
    lists = {"train": {"01": (1, -1)}, "val": {"02": (0, 1)}, "test": {"03": (0, 0)}}
    folder = voc(tmp_path, lists)
    found = catalog.load("voc2007", tmp_path, multilabel=True)
    assert [images.marks for _, images in found.items()] == [
        ("0",),
        ("0?,1",),
        ("0?,1?",),
    ]
    assert found.train.classes[0] == "aeroplane" and len(found.train.classes) == 20
    assert not found.held_out
    assert "train has 1 images, not 2501" in caplog.text
    file = folder / "ImageSets" / "Main" / "bird_test.txt"
    file.write_text("03 2\n")
    with pytest.raises(BadInput, match="'2' of image 03 is not 1, 0 or -1"):
        catalog.load("voc2007", tmp_path, multilabel=True)
    file.write_text("04 1\n")
    with pytest.raises(BadInput, match=r"lists other images than aeroplane_test\.txt"):
        catalog.load("voc2007", tmp_path, multilabel=True)


@pytest.fixture
def features_of(monkeypatch):
    """Digest of a trunk -> its features (N, d) of train, val and test, once they were read."""
    features = {}
    of_splits = Extractor.of_splits

    def seen(self, found, name):
        read = of_splits(self, found, name)
        for n, trunk in enumerate(self.trunks):
            features[trunk.checkpoint.digest] = [
                part[n].double().numpy() for part in read
            ]
        return read

    monkeypatch.setattr(Extractor, "of_splits", seen)
    return features


def test_rows_are_those_of_scikit_learn(tmp_path, two_trunks, recipe, features_of):
    boxes(tmp_path / "mine")
    out = tmp_path / "run"
    assert main(command(tmp_path, two_trunks, out, recipe)) == 0
    rows = rows_of(out)
    assert [r.metric for r in rows] == ["map", "map11"] * 2
    found = catalog.load("mine", tmp_path, multilabel=True)
    tables = [images.table() for _, images in found.items()]

    def mean_ap(x, y, of, truth, l2):
        aps = []
        for label in range(len(CELLS)):
            head = LogisticRegression(C=2 / l2, tol=1e-10, max_iter=10_000)
            score = head.fit(x, y[:, label]).decision_function(of)
            aps.append(average_precision_score(truth[:, label], score))
        return 100 * float(np.mean(aps))

    for r in rows[::2]:
        train, val, test = features_of[r.checkpoint]
        by_val = {}
        for l2 in (100, 10, 1):
            by_val[f"{l2:g}"] = mean_ap(train, tables[0], val, tables[1], l2)
        assert r.chosen["scores"] == pytest.approx(by_val, abs=1e-6)
        both = np.concatenate((train, val)), np.concatenate(tables[:2])
        value = mean_ap(*both, test, tables[2], r.chosen["l2"])
        assert r.value == pytest.approx(value, abs=1e-6)
    verdicts = verification.of_run(rows, out)
    assert {v.level for v in verdicts} == {verification.FROM_LIST}
    assert all(r.ci95[0] < r.value < r.ci95[1] for r in rows)
    # Three penalties and the best one again, three classes, two trunks
    note = json.loads((out / "progress.json").read_text())
    assert (note["what"], note["unit"]) == ("mine heads", "fit")
    assert note["done"] == note["total"] == 4 * 3 * 2
    # A finished run is not made again
    assert main(command(tmp_path, two_trunks, out, recipe)) == 0
    assert rows_of(out) == rows


@pytest.mark.parametrize("most", [1000, 1])
def test_a_fit_that_has_not_converged_is_said(
    tmp_path, two_trunks, recipe, caplog, most
):
    boxes(tmp_path / "mine")
    recipe.write_text(
        json.dumps(json.loads(recipe.read_text()) | {"max_iterations": most})
    )
    assert main(command(tmp_path, two_trunks[:1], tmp_path / "run", recipe)) == 0
    rows = rows_of(tmp_path / "run")
    assert [r.chosen["converged"] for r in rows] == [most > 1] * 2
    said = [line for line in caplog.messages if "not converged" in line]
    assert len(said) == (most == 1)
    assert all(
        f"within 1 iterations (gradient {rows[0].chosen['gradient']:.1e})" in s
        for s in said
    )
    assert all("max_iterations=10`" in line for line in said)


def svm_recipe(folder, **keys):
    file = folder / "svm.yaml"
    about = {"kind": "svm", "protocol": "svm-x-v1", "costs": [0.01, 1, 100], **keys}
    file.write_text(json.dumps({**about, "geometry": {"resize": 32, "crop": 32}}))
    return file


def test_svms_are_scikit_learns(tmp_path, two_trunks, features_of):
    """Folds, costs and mean AP, by LIBLINEAR in another order of the images."""
    boxes(tmp_path / "mine")
    recipe = svm_recipe(tmp_path, tolerance=1e-9, max_iterations=1_000_000)
    out = tmp_path / "run"
    assert main(command(tmp_path, two_trunks, out, recipe)) == 0
    found = catalog.load("mine", tmp_path, multilabel=True)
    train, val, test = (images.table() for _, images in found.items())
    y = np.concatenate([train, val])
    rows = rows_of(out)
    for r in rows[::2]:
        parts = features_of[r.checkpoint]
        unit = [x / (np.linalg.norm(x, axis=1)[:, None] + 1e-5) for x in parts]
        x = np.concatenate(unit[:2])
        aps = []
        for label, name in enumerate(CELLS):

            def head(cost, chosen, x=x, label=label):
                svm = LinearSVC(C=cost, class_weight={0: 1, 1: 2}, tol=1e-9)
                svm.set_params(max_iter=1_000_000, random_state=7)
                return svm.fit(x[chosen], y[chosen, label])

            by_cost = {}
            for cost in (0.01, 1, 100):
                of_folds = []
                for part, left in StratifiedKFold(3).split(x, y[:, label]):
                    score = head(cost, part).decision_function(x[left])
                    of_folds.append(average_precision_score(y[left, label], score))
                by_cost[cost] = np.mean(of_folds)
            best = max(by_cost, key=by_cost.get)
            assert r.chosen["costs"][name] == best
            score = head(best, slice(None)).decision_function(unit[2])
            aps.append(average_precision_score(test[:, label], score))
        assert r.value == pytest.approx(100 * np.mean(aps), abs=1e-6)
        assert r.chosen["converged"]
    verdicts = verification.of_run(rows, out)
    assert {v.level for v in verdicts} == {verification.FROM_LIST}


def test_an_svm_that_did_not_converge_says_so(tmp_path, trunk, caplog):
    boxes(tmp_path / "mine")
    recipe = svm_recipe(tmp_path, costs=[1000], tolerance=1e-9, max_iterations=3)
    assert main(command(tmp_path, [trunk], tmp_path / "run", recipe)) == 0
    rows = rows_of(tmp_path / "run")
    assert [r.chosen["converged"] for r in rows] == [False, False]
    assert "max_iterations=30` may help" in caplog.text


def test_a_class_that_is_too_rare_for_folds_is_refused(tmp_path, trunk, bad_input):
    boxes(tmp_path / "mine")
    recipe = svm_recipe(tmp_path, folds=12)
    status = main(command(tmp_path, [trunk], tmp_path / "run", recipe))
    bad_input(status, "mine: class 'cell' is shown by 11 of 22 images of train and val")
    assert not (tmp_path / "run").exists()


def test_forgeries_are_named(tmp_path, trunk, recipe):
    boxes(tmp_path / "mine")
    out = tmp_path / "run"
    assert main(command(tmp_path, [trunk], out, recipe)) == 0
    rows = rows_of(out)
    (file,) = (out / "predictions").glob("*.npz")
    with np.load(file) as kept:
        arrays = dict(kept)

    def why(**changed):
        np.savez(file, **{**arrays, **changed})
        predictions._latest.held.clear()
        return verification.of_run(rows, out)[0].why

    other = arrays["table"].copy()
    other[0] = 1 - other[0]
    assert why() == ""
    assert "are not those of its scores" in why(table=other)
    assert "no two tables of one shape" in why(score=arrays["score"][:-1])
    assert "are not those of its scores" in why(
        bootstrap_map=arrays["bootstrap_map"] / 2
    )
    assert "no numbers of images" in why(score=arrays["score"] * np.nan)
    # Without its list of images the scores alone are held against it
    assert why() == ""
    (out / "manifests" / "mine-test.tsv").unlink()
    levels = {verdict.level for verdict in verification.of_run(rows, out)}
    assert levels == {verification.FROM_KEPT}


def test_an_ignored_image_is_in_no_fit_and_in_no_score(
    tmp_path, trunk, recipe, monkeypatch
):
    """Marking an image of train and one of test as difficult equals leaving them out."""
    boxes(tmp_path / "mine")
    whole = catalog.boxes_as_labels("mine").read
    values = []
    for kind in ("ignored", "left out"):

        def read(root, seed, kind=kind):
            found = whole(root, seed)
            parts = dict(found.items())
            for name in ("train", "test"):
                images = parts[name]
                if kind == "ignored":
                    marks = (mark([], range(len(CELLS))), *images.marks[1:])
                    parts[name] = type(images)(
                        images.root, images.paths, images.labels, images.classes, marks
                    )
                else:
                    parts[name] = images.subset(range(1, len(images)))
            return splits.Splits(**parts, held_out=False)

        about = catalog.boxes_as_labels("mine")
        changed = type(about)(
            name="mine", classes=None, sizes=(None,) * 3, metric="map", read=read
        )
        monkeypatch.setattr(catalog, "boxes_as_labels", lambda name, row=changed: row)
        out = tmp_path / kind
        assert main(command(tmp_path, [trunk], out, recipe)) == 0
        values.append([r.value for r in rows_of(out)])
    assert values[0] == pytest.approx(values[1], abs=1e-6)


def test_what_cannot_be_told_apart_is_refused(
    tmp_path, trunk, recipe, bad_input, monkeypatch
):
    own_boxes.coco(tmp_path / "same")
    status = main(command(tmp_path, [trunk], tmp_path / "run", recipe, "same"))
    bad_input(status, "same: train: each class is in all images or in none")
    boxes(tmp_path / "mine")
    few = tmp_path / "knn.yaml"
    few.write_text('{"kind": "knn", "protocol": "x-v1"}')
    status = main(command(tmp_path, [trunk], tmp_path / "run", few))
    bad_input(status, "mine")
    assert not (tmp_path / "run").exists()


def test_evaluate_takes_a_folder_of_boxes(tmp_path, trunk, monkeypatch):
    boxes(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    task = "multilabel@multilabel_own l2=1,100,3"
    line = ["evaluate", str(trunk), task, "--data", "mine", "--out", "out"]
    assert main([*line, "--size", "32", "--workers", "0"]) == 0
    rows = rows_of(tmp_path / "out")
    assert [(r.task, r.metric) for r in rows] == [
        ("multilabel", "map"),
        ("multilabel", "map11"),
    ]


def test_data_check_counts_the_classes_that_images_show(tmp_path, capsys):
    lists = {"train": {"01": (1, -1)}, "val": {"02": (1, 1)}, "test": {"03": (0, 1)}}
    voc(tmp_path, lists)
    main(["data", "check", "voc2007", "--data", str(tmp_path)])
    said = capsys.readouterr().out
    assert "train has no image of 19 classes, 'bicycle' first" in said
    assert "val has no image of 18 classes, 'bird' first" in said
    assert "test has no image of 19 classes, 'aeroplane' first" in said
