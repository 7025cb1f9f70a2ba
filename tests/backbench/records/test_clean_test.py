"""Kept predictions are scored again without the images that a list names, and never as the full set."""

import csv
import gzip
import hashlib
import json

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, recall_score
from support import forgeries, records

from backbench.cli.program import main
from backbench.errors import EXIT_FAILED, BadInput, nearest
from backbench.evaluation import wanted
from backbench.records import clean_test, predictions, store
from backbench.stats import confidence

LINES = ("0/0036.png\tcopy\t0/0001.png", "0/0048.png\twrong", "9/1795.png\tlabel\t3")


@pytest.fixture
def corpus(tmp_path):
    """A run of the demo with its list of test images, as it was measured long ago."""
    root = tmp_path / "corpus"
    forgeries.copied("knn", root)
    return root


@pytest.fixture
def flaws(tmp_path):
    """Write a list of these lines; return its file."""

    def write(*lines):
        file = tmp_path / "flaws.tsv"
        file.write_text("".join(line + "\n" for line in lines))
        return file

    return write


def rescored(root):
    found, _ = store.read(root)
    return [r for r in found if r.task == clean_test.TASK]


def arrays_of(root, row):
    with np.load(root / "backbench" / "knn" / row.facts["predictions"]) as kept:
        return dict(kept)


def test_old_rows_get_clean_scores_that_sklearn_gives(corpus, flaws, tmp_path, capsys):
    results = corpus / "backbench" / "knn" / "results.jsonl"
    before = results.read_text()
    full = {(r.checkpoint, r.metric): r for r in store.read(corpus)[0]}
    listed = flaws("# three of them", *LINES)
    assert main(["rescore", str(corpus), "--list", str(listed)]) == 0
    told = capsys.readouterr().out
    assert "1 copies and 1 with a wrong label" in told
    assert "no interval: too few images decide" in told
    rows = rescored(corpus)
    assert len(rows) == 2 * len(full)
    # 1. An independent computation, from the predictions of the full row
    for r in rows:
        kind, metric, digest = clean_test.full_metric(r.metric)
        source = full[r.checkpoint, metric]
        kept = arrays_of(corpus, source)
        right = kept["label"].copy()
        right[-1] = 3
        clean = 100 * accuracy_score(right[2:], kept["prediction"][2:])
        value = clean if kind == "clean" else clean - source.value
        assert r.value == pytest.approx(value, abs=1e-9)
        # Three images say too little of how far a change varies
        assert (r.ci95 is None) == (kind == "change")
        if kind == "clean":
            hits = kept["prediction"][2:] == right[2:]
            assert r.ci95 == confidence.of_hits(hits)
        said = r.provenance["left_out"]
        assert said["digest"].startswith(digest) and said["list"] == "flaws.tsv"
        assert (said["copies"], said["wrong"], said["relabelled"]) == (1, 1, 1)
    # 2. Rows are added, once
    after = results.read_text()
    assert after.startswith(before)
    assert main(["rescore", str(corpus), "--list", str(listed)]) == 0
    assert results.read_text() == after
    # 3. They are verified over the list of images, also when merged, and stand in own columns
    table = tmp_path / "board.csv"
    merged = tmp_path / "merged"
    assert main(["leaderboard", str(corpus), "--csv", str(table)]) == 0
    assert main(["merge", f"lab={corpus}", "--out", str(merged)]) == 0
    capsys.readouterr()
    assert main(["verify", str(merged)]) == 0
    assert f"{3 * len(full)} level 3" in capsys.readouterr().out
    with table.open() as file:
        board = list(csv.DictReader(file))
    for line in board:
        value = full[line["checkpoint"], "top1_k5"].value
        assert float(line["knn/digits/top1_k5@knn-demo-v1"]) == pytest.approx(value)
    assert f"clean_test/digits/clean_top1_k5_{digest}@knn-demo-v1" in board[0]


def test_another_list_is_another_column_and_another_order_is_not(corpus, flaws):
    for lines in (LINES, LINES[::-1], LINES[:2]):
        assert main(["rescore", str(corpus), "--list", str(flaws(*lines))]) == 0
    digests = {clean_test.full_metric(r.metric)[2] for r in rescored(corpus)}
    assert len(digests) == 2


def test_draws_of_labels_are_scored_each(tmp_path, flaws, capsys):
    record = forgeries.copied("fewshot", tmp_path / "corpus")
    root = tmp_path / "corpus"
    assert main(["rescore", str(root), "--list", str(flaws(*LINES))]) == 0
    with np.load(record.run / record.line["provenance"]["predictions"]) as kept:
        hits = kept["prediction"][:, 2:] == np.append(kept["label"][2:-1], 3)
    row = next(r for r in rescored(root) if r.checkpoint == record.line["checkpoint"])
    assert row.value == pytest.approx(100 * hits.mean())
    assert main(["verify", str(root)]) == 0
    assert "0 do not fit" in capsys.readouterr().out


def test_means_per_class_follow_the_right_labels():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 4, 400)
    prediction = np.where(rng.random(400) < 0.8, label, rng.integers(0, 4, 400))
    flaw = np.zeros(400, dtype=np.uint8)
    flaw[:20] = clean_test.COPY
    flaw[20:40] = clean_test.RELABELLED
    right = np.where(flaw == clean_test.RELABELLED, (label + 1) % 4, label)
    arrays = {"prediction": prediction, "label": label, "flaw": flaw, "right": right}
    clean = recall_score(right[20:], prediction[20:], average="macro")
    full = recall_score(label, prediction, average="macro")
    value, ci95 = clean_test.value(arrays, "clean_mean_per_class_12345678")
    assert value == pytest.approx(100 * clean)
    assert ci95 == confidence.of_hits((prediction == right)[20:], right[20:])
    change, _ = clean_test.value(arrays, "change_mean_per_class_12345678")
    assert change == pytest.approx(100 * (clean - full))
    # What was not kept, or what no image is left for, is not made up
    hits5 = {**arrays, "hits5": prediction == label}
    assert "five best" in clean_test.unscored(hits5, "top5")
    gone = {**arrays, "flaw": np.where(label == 2, clean_test.WRONG, 0)}
    gone["right"] = label
    assert "class 2 without" in clean_test.unscored(gone, "mean_per_class")


def test_a_change_says_how_well_it_is_known(corpus, flaws, capsys):
    """Enough flawed images give it an interval, and `verify` computes that again."""
    manifest = next((corpus / "lists").glob("*.tsv.gz"))
    with gzip.open(manifest, "rt") as file:
        names = [line.split("\t")[0] for line in file]
    listed = flaws(*(f"{name}\twrong" for name in names[::5]))
    assert main(["rescore", str(corpus), "--list", str(listed)]) == 0
    assert "no interval" not in capsys.readouterr().out
    for row in rescored(corpus):
        assert row.ci95[0] < row.value < row.ci95[1]
    assert main(["verify", str(corpus)]) == 0


def forge(change):
    """Replace arrays in the file of one rescored row."""

    def edit(run, row):
        file = run / row.facts["predictions"]
        with np.load(file) as kept:
            arrays = dict(kept)
        np.savez(file, **{**arrays, **change(arrays)})

    return edit


def changed_line(**changes):
    def edit(run, row):
        file = run / "results.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            same = (line["checkpoint"], line["metric"]) == (row.checkpoint, row.metric)
            if same:
                line.update(changes)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return edit


def only(index, value, of):
    out = of.copy()
    out[index] = value
    return out


@pytest.mark.parametrize(
    "forgery",
    [
        changed_line(value=99.0),
        changed_line(ci95=[0.0, 100.0]),
        changed_line(metric="clean_top1_k5_00000000"),
        changed_line(metric="best_top1_k5_00000000"),
        forge(lambda x: {"flaw": only(5, clean_test.COPY, x["flaw"])}),
        forge(lambda x: {"flaw": x["flaw"] * 0}),
        forge(lambda x: {"right": only(4, 9, x["right"])}),
        forge(lambda x: {"right": x["right"][:-1]}),
        forge(lambda x: {"prediction": x["label"]}),
        forge(lambda x: {"label": x["prediction"], "right": x["prediction"]}),
    ],
)
def test_what_does_not_follow_is_found(forgery, corpus, flaws, capsys):
    assert main(["rescore", str(corpus), "--list", str(flaws(*LINES))]) == 0
    run = corpus / "backbench" / "knn"
    row = next(r for r in rescored(corpus) if r.metric.startswith("clean_top1_k5"))
    forgery(run, row)
    capsys.readouterr()
    assert main(["verify", str(corpus)]) == EXIT_FAILED
    said = capsys.readouterr().out
    assert row.name in said and "cannot be computed again" not in said


def test_an_interval_of_an_older_version_is_mended_as_verify_says(
    corpus, flaws, capsys
):
    """`rescore` alone adds nothing to a number that is known."""
    words = ["rescore", str(corpus), "--list", str(flaws(*LINES))]
    assert main(words) == 0
    run = corpus / "backbench" / "knn"
    row = next(r for r in rescored(corpus) if r.metric.startswith("clean_top1_k5"))
    changed_line(ci95=[0.0, 100.0])(run, row)
    capsys.readouterr()
    assert main(["verify", str(corpus)]) == EXIT_FAILED
    said = capsys.readouterr().out
    assert "take this line out of the file and `backbench rescore` again" in said
    assert str(run / "results.jsonl") in said
    file = run / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "[0.0, 100.0]" not in line))
    assert len(file.read_text().splitlines()) == len(lines) - 1
    assert main(words) == 0
    assert main(["verify", str(corpus)]) == 0


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((), "names no image"),
        (("# only a remark",), "names no image"),
        (("0/0036.png",), "is not image, tab, copy"),
        (("0/0036.png\tgone",), "is not image, tab, copy"),
        (("0/9999.png\tcopy",), "flaws.tsv:1: '0/9999.png' is not in the test set"),
        ((LINES[0], "0/0036.png\twrong"), "flaws.tsv:2: '0/0036.png' stands in line 1"),
        (("0/0036.png\tlabel",), "no right label behind"),
        (("0/0036.png\tlabel\t10",), "'10' is no class of digits"),
        (("0/0036.png\tlabel\t-1",), "'-1' is no class of digits"),
        (("0/0036.png\tlabel\t0",), "'0' is the label that 0/0036.png has"),
        (("TestID,TrainID,Distance,Judgment", "7,8,0.1,1"), "CIFAR's own files"),
    ],
)
def test_a_wrong_list_is_refused_in_a_line(lines, words, corpus, flaws, bad_input):
    results = corpus / "backbench" / "knn" / "results.jsonl"
    before = results.read_text()
    kept = sorted(corpus.rglob("*"))
    said = bad_input(
        main(["rescore", str(corpus), "--list", str(flaws(*lines))]), words
    )
    assert len(said.splitlines()) == 1
    assert results.read_text() == before and sorted(corpus.rglob("*")) == kept


def test_a_list_that_leaves_nothing_is_refused(corpus, flaws, bad_input):
    (listed,) = (corpus / "lists").iterdir()
    images = all_wrong(listed)
    status = main(["rescore", str(corpus), "--list", str(flaws(*images))])
    bad_input(status, "leaves no test image")


def all_wrong(listed):
    """A list that calls the labels of all test images wrong."""
    lines = gzip.decompress(listed.read_bytes()).decode().splitlines()
    paths = [line.rpartition("\t")[0] for line in lines]
    return [f"{path}\twrong" for path in paths]


def test_rows_without_predictions_or_lists_are_named(
    corpus, flaws, bad_input, caplog, monkeypatch
):
    words = ["rescore", str(corpus), "--list", str(flaws(*LINES))]
    run = corpus / "backbench" / "knn"
    first = sorted((run / "predictions").iterdir())[0]
    first.unlink()
    with caplog.at_level("WARNING", logger="backbench"):
        assert main(words) == 0
    named = [r.getMessage() for r in caplog.records]
    assert len(named) == 1 and "were not kept; measure it again" in named[0]
    monkeypatch.setattr(predictions, "_latest", predictions._Latest())
    for file in (run / "predictions").iterdir():
        file.unlink()
    bad_input(main(words), "no number has kept predictions")


def test_other_datasets_and_files_are_refused(corpus, flaws, tmp_path, bad_input):
    listed = flaws(*LINES)
    words = ["rescore", str(corpus), "--list"]
    bad_input(main([*words, str(tmp_path / "none.tsv")]), "none.tsv: No such file")
    status = main([*words, str(listed), "--dataset", "cifar10"])
    bad_input(status, "--dataset cifar10", "digits")
    listed.write_bytes(b"\xff\xfe\x00")
    bad_input(main([*words, str(listed)]), "is no text")
    with pytest.raises(BadInput, match="backbench rescore RUNS --list FILE"):
        wanted.parse_task("clean_test/digits")


def test_cifairs_csv_names_places_in_cifars_own_files(tmp_path):
    file = tmp_path / "duplicates.csv"
    file.write_text(
        "TestID,TrainID,Distance,Judgment\n2,9,0.1,1\n0,4,0.2,2\n2,7,0.3,1\n"
    )
    read = clean_test.read_list(file)
    content = "".join(f"test/{i:05}\t{i % 2}\n" for i in range(4)).encode()
    images = clean_test.TestImages.of("0" * 64, content)
    said = clean_test.place(read, images, "cifar10")
    assert said["flaw"].tolist() == [clean_test.COPY, 0, clean_test.COPY, 0]


def test_a_class_may_be_named_by_its_folder(tmp_path):
    file = tmp_path / "flaws.tsv"
    file.write_text("cat/1.png\tlabel\tdog\n")
    images = clean_test.TestImages.of("0" * 64, b"cat/1.png\t0\ndog/2.png\t1\n")
    said = clean_test.place(clean_test.read_list(file), images, "pets")
    assert said["right"].tolist() == [1, 1]


def test_a_digest_is_of_the_images_left_out_and_of_the_other_labels():
    """Why an image is left out changes no score, and which label it has instead does."""

    def digest_of(flaw, right, manifest="m"):
        said = {"flaw": np.array(flaw), "right": np.array(right)}
        return clean_test.digest(manifest, said)

    copy, wrong, relabelled = clean_test.COPY, clean_test.WRONG, clean_test.RELABELLED
    first = digest_of([0, copy, relabelled], [0, 1, 2])
    assert digest_of([0, wrong, relabelled], [0, 1, 2]) == first
    text = "m\n1\tout\n2\t2"
    assert first == hashlib.sha256(text.encode()).hexdigest()
    others = [
        digest_of([0, copy, relabelled], [0, 1, 3]),
        digest_of([0, copy, copy], [0, 1, 2]),
        digest_of([copy, 0, relabelled], [0, 1, 2]),
        digest_of([0, copy, relabelled], [0, 1, 2], "n"),
    ]
    assert len({first, *others}) == 5


def test_a_metric_and_a_file_are_named_by_the_lists_first_digits():
    of_list = "0123456789abcdef"
    name = clean_test.metric_name("change", "mean_per_class_k5", of_list)
    assert name == "change_mean_per_class_k5_01234567"
    assert clean_test.full_metric(name) == ("change", "mean_per_class_k5", "01234567")
    assert clean_test.file_stem(of_list, "top1-s0") == "clean-01234567-top1-s0"


def of_images(**changes):
    """A row of `clean_test` and the arrays that it follows from, as a stranger may change them."""
    arrays = {
        "manifest": "m",
        "prediction": np.array([0, 1, 1, 0]),
        "label": np.array([0, 1, 0, 0]),
        "flaw": np.array([0, 1, 3, 2], dtype=np.uint8),
        "right": np.array([0, 1, 1, 0]),
    }
    digits = clean_test.digest("m", arrays)[:8]
    said = {"copies": 1, "wrong": 1, "relabelled": 1, "of": 4, "list": "x"}
    row = records.a_result(
        task="clean_test",
        metric=changes.pop("metric", f"clean_top1_{digits}"),
        provenance={"left_out": changes.pop("said", said)},
    )
    whole = {**arrays, **changes}
    return {name: each for name, each in whole.items() if each is not None}, row


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"metric": "best_top1_x"}, "'best_top1_x' is no metric of clean_test"),
        ({"flaw": None}, "its file says no 'flaw' of the images"),
        ({"right": np.array([0.0, 1, 1, 0])}, "its file says no 'right' of the images"),
        ({"label": np.array([[0, 1, 0, 0]])}, "its file says no 'label' of the images"),
        ({"right": np.array([0, 1, 1])}, "what its file says of the images is no list"),
        (
            {"flaw": np.array([0, 1, 4, 2])},
            "what its file says of the images is no list",
        ),
        (
            {"flaw": np.array([0, 1, -1, 2])},
            "what its file says of the images is no list",
        ),
        (
            {"right": np.array([1, 1, 1, 0])},
            "its file changes labels that its list does not",
        ),
        (
            {"flaw": np.array([1, 1, 2, 2]), "right": np.array([0, 1, 0, 0])},
            "its file changes labels that its list does not",
        ),
        (
            {"metric": "clean_top1_00000000"},
            "its images are not those that list 00000000 leaves",
        ),
        (
            {"said": None},
            "it says another number of images that are left out than its file",
        ),
        (
            {"said": {"copies": 1, "wrong": 1, "relabelled": 1, "of": 5}},
            "it says another number of images that are left out than its file",
        ),
        (
            {"said": {"copies": 1, "relabelled": 1, "of": 4}},
            "it says another number of images that are left out than its file",
        ),
        (
            {"prediction": None},
            "its predictions of each image were not kept; measure it again",
        ),
    ],
)
def test_what_does_not_fit_a_list_is_said_in_words(changes, says):
    assert clean_test.fault(*of_images(**changes)) == says


def test_counts_and_scores_are_of_the_images_that_a_list_names():
    arrays, _ = of_images()
    assert clean_test.counts(arrays) == {
        "copies": 1,
        "wrong": 1,
        "relabelled": 1,
        "of": 4,
    }
    # The first and the third are scored, by the right labels: both are right. In all, three of four
    assert clean_test.value(arrays, "clean_top1_x")[0] == 100
    assert clean_test.value(arrays, "change_top1_x")[0] == 25
    top5 = {**arrays, "hits5": np.array([True, True, True, False])}
    assert clean_test.unscored(top5, "top5_k5") == (
        "whether another label is among the five best was not kept; write 'wrong' in place"
        " of 'label' to have it"
    )
    # Without another label the five best are known
    top5["flaw"] = np.array([0, 1, 2, 2])
    assert clean_test.unscored(top5, "top5_k5") == ""
    assert clean_test.value(top5, "clean_top5_x")[0] == 100
    assert clean_test.value(top5, "change_top5_x")[0] == 25
    gone = {**arrays, "flaw": np.array([0, 1, 2, 2]), "right": arrays["label"]}
    assert clean_test.unscored(gone, "mean_per_class") == (
        "the list leaves class 1 without a test image"
    )
    assert clean_test.unscored(gone, "top1") == ""


def test_a_class_is_named_by_its_number_or_by_a_folder_of_it_alone():
    lines = ["test/3/a.png\t0", "test/3/b.png\t0", "cat/a.png\t12", "mixed/a.png\t0"]
    content = "\n".join([*lines, "mixed/b.png\t12", "plain.png\t5\n"]).encode()
    images = clean_test.TestImages.of("m", content)
    assert images.paths[-1] == "plain.png" and images.labels.tolist()[2:] == [
        12,
        0,
        12,
        5,
    ]
    # A folder called 3 is the class of that name, which has the number 0
    numbers = {"0": 0, "12": 12, "5": 5, "3": 0, "cat": 12}
    assert clean_test._class_numbers(images) == numbers


def test_a_list_says_where_it_is_wrong_and_what_to_write(tmp_path):
    file = tmp_path / "x.tsv"
    images = clean_test.TestImages.of("m", b"cat/1.png\t0\ndog/2.png\t1\n")

    def refused(text):
        file.write_text(text)
        with pytest.raises(BadInput) as caught:
            clean_test.place(clean_test.read_list(file), images, "pets")
        return str(caught.value)

    assert refused("\ufeff# a remark\n\ncat/3.png\tcopy") == (
        f"--list {file}:3: 'cat/3.png' is not in the test set of pets; write paths as in"
        " RUN/manifests, such as 'cat/1.png'"
    )
    assert refused("cat/1.png\tlabel\tdogs") == (
        f"--list {file}:1: 'dogs' is no class of pets; {nearest('dogs', ['dog'])}"
    )
    assert refused("dog/2.png\tlabel\tdog") == (
        f"--list {file}:1: 'dog' is the label that dog/2.png has; remove the line"
    )
    assert refused("cat/1.png\twrong\ndog/2.png\tcopy") == (
        f"--list {file}: leaves no test image of pets; shorten it"
    )
    twice = "cat/1.png\twrong\ndog/2.png\tcopy\ncat/1.png\tcopy"
    assert refused(twice) == (
        f"--list {file}:3: 'cat/1.png' stands in line 1, too; leave one of them"
    )
    by_place = "TestID,TrainID,Distance,Judgment\n7,8,0.1,1\n"
    assert refused(by_place) == (
        f"--list {file}:2: 'test/00007' is not in the test set of pets; ciFAIR's numbers are"
        " places in CIFAR's own files: name the images by their paths instead"
    )
    assert refused("cat/1.png wrong") == (
        f"--list {file}:1: 'cat/1.png wrong' is not image, tab, copy | wrong | label, tab,"
        " right label"
    )


@pytest.mark.parametrize(("flawed", "known"), [(20, True), (19, False)])
def test_a_change_is_known_by_twenty_flawed_images(flawed, known):
    rng = np.random.default_rng(4)
    label = np.zeros(600, int)
    wrong = rng.random(600) < 0.2
    wrong[:20] = True
    arrays = {
        "prediction": 1 * wrong,
        "label": label,
        "right": label,
        "flaw": np.where(np.arange(600) < flawed, clean_test.WRONG, 0),
    }
    value, ci95 = clean_test.value(arrays, "change_top1_x")
    assert value == pytest.approx(100 * (wrong.mean() - wrong[flawed:].mean()))
    assert (ci95 is not None) == known
