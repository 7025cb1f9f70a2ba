"""Bold is what a second training keeps: with seeds, without, and where nothing is trained."""

import dataclasses
import re

import pytest
from support import boards
from support.records import a_result, edit_lines

from backbench.board.board import collect, compare_rows, noise_of, noise_words, standing
from backbench.board.overall import answer, overall
from backbench.cli import program
from backbench.records import store

LINEAR, KNN, FEWSHOT, SEMISUP = boards.DEMO[:4]
COCO = boards.detection("coco2017", "detection-1x-v1", "torchvision")
NAMES = ["one", "two", "three"]
BEST = boards.digest_of("three")


def board_of(folder, kinds, names=NAMES, **how):
    boards.synthetic(folder, names, kinds, **how)
    return collect([folder])


def only_mark(board, column=0):
    return standing(board, board.columns[column])


def test_one_training_each_is_never_bold(tmp_path, capsys):
    boards.synthetic(tmp_path / "runs", NAMES, [boards.PAPER[0], KNN], gap=20)
    files = [f"--{kind}={tmp_path / kind}" for kind in ("html", "markdown", "latex")]
    assert program.main(["leaderboard", str(tmp_path / "runs"), *files, "-q"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("three leads alone over Nearest neighbours")
    assert "est of one training each: three in Linear probe" in said
    lines = (tmp_path / "markdown" / "board.md").read_text().splitlines()
    heads = next(line for line in lines if line.startswith("| checkpoint")).split(" | ")
    first = next(line for line in lines if line.startswith("| three ")).split(" | ")
    cells = {head.split()[0]: cell for head, cell in zip(heads, first)}
    assert "°" in cells["Linear"] and "**" not in cells["Linear"]
    assert "**" in cells["Nearest"] and "°" not in cells["Nearest"]
    for name in ("board", "lorac_table1"):
        table = (tmp_path / "latex" / f"{name}.tex").read_text()
        assert re.search(r"^three &.*\$\^\\circ\$", table, re.MULTILINE)
        assert "best of one training each" in table
    page = (tmp_path / "html").read_text()
    assert '"once"' in page and "two checkpoints with `--seeds 3`" in page
    board = collect([tmp_path / "runs"])
    pairs = compare_rows(board)
    tasks = {board.columns[pair.column].task: pair.difference for pair in pairs}
    assert tasks["knn"].real
    assert tasks["linear"].p < 1e-6 and not tasks["linear"].real


@pytest.mark.parametrize("kind", [LINEAR, SEMISUP, boards.DEMO[5]])
def test_seeds_of_two_checkpoints_are_enough_for_all(tmp_path, kind):
    boards.synthetic(tmp_path, NAMES[:2], [kind], gap=12, seeds=3)
    # One seed, of the third as well
    boards.synthetic(tmp_path / "third", NAMES, [kind], gap=12)
    board = collect([tmp_path])
    assert noise_of(board, board.columns[0]).df == 4
    assert only_mark(board) == {BEST: "best"}
    words = noise_words(noise_of(board, board.columns[0]))
    assert "4 degrees of freedom, seeds measured here" in words


@pytest.mark.parametrize(("seeds", "names"), [(2, 3), (3, 1), (4, 1)])
def test_fewer_than_four_degrees_of_freedom_are_too_few(tmp_path, seeds, names):
    boards.synthetic(tmp_path, NAMES[:names], [LINEAR], gap=20, seeds=seeds)
    boards.synthetic(tmp_path / "all", NAMES, [LINEAR], gap=20)
    board = collect([tmp_path])
    assert only_mark(board) == {BEST: "once"}


def test_what_trainings_move_is_not_called_a_difference(tmp_path):
    """The same gap on the same images; where trainings differ by as much, nobody is bold."""
    calm = board_of(tmp_path / "calm", [SEMISUP], gap=6, seeds=3)
    wild = board_of(tmp_path / "wild", [SEMISUP], gap=6, seeds=3, trainings=6.0)
    assert only_mark(calm) == {BEST: "best"}
    assert set(only_mark(wild).values()) == {"tied"}
    spread = [noise_of(board, board.columns[0]).excess ** 0.5 for board in (calm, wild)]
    assert spread[0] < 1.5 and 2.5 < spread[1] < 12


@pytest.mark.parametrize(("noise", "mark"), [(0.5, {BEST: "best"}), (9.0, None)])
def test_a_choice_that_few_images_made_is_noise_of_the_column(tmp_path, noise, mark):
    boards.synthetic(tmp_path, NAMES, [SEMISUP], gap=6, seeds=3)
    edit_lines(tmp_path, lambda row: row.update(chosen={"choice_noise": noise}))
    board = collect([tmp_path])
    if mark:
        assert only_mark(board) == mark
    else:
        assert set(only_mark(board).values()) == {"tied"}
        assert "choice on few validation images" in noise_words(
            noise_of(board, board.columns[0])
        )


def test_the_noise_of_a_choice_is_of_the_metric_that_chose(tmp_path):
    kinds = [SEMISUP, (SEMISUP[0], SEMISUP[1], "top5", *SEMISUP[3:])]
    boards.synthetic(tmp_path, NAMES, kinds, gap=6, seeds=3)
    edit_lines(tmp_path, lambda row: row.update(chosen={"choice_noise": 9.0}))
    board = collect([tmp_path])
    spread = {c.metric: noise_of(board, c).excess ** 0.5 for c in board.columns}
    assert spread["top1"] >= 9 > spread["top5"]


@pytest.mark.parametrize(
    "kind",
    [
        KNN,
        FEWSHOT,
        ("logreg", "digits", "top1", "logreg-v1", None),
        # The classifier that a model came with
        ("ood", "imagenet-val", "top1", "own-all", None),
    ],
)
def test_what_is_not_trained_by_chance_needs_no_seeds(tmp_path, kind):
    board = board_of(tmp_path, [kind], gap=12)
    assert only_mark(board) == {BEST: "best"}
    assert noise_words(noise_of(board, board.columns[0])) == ""


def test_published_noise_serves_where_nobody_has_seeds(tmp_path):
    """0.15 points of COCO's AP with an R50-FPN; AP50 was published by nobody."""
    far = board_of(tmp_path / "far", COCO[:2], gap=6, images=5000)
    marks = {column.metric: standing(far, column) for column in far.columns}
    assert marks == {"bbox_AP": {BEST: "best"}, "bbox_AP50": {BEST: "once"}}
    assert noise_of(far, far.columns[0]).seed_variance == pytest.approx(0.15**2)
    part = dataclasses.replace(far.columns[0], split="val~n40")
    assert not noise_of(far, part).known, "it was published for the whole split"
    measured = board_of(
        tmp_path / "m", COCO[:1], gap=6, images=5000, seeds=3, trainings=2.0
    )
    assert noise_of(measured, measured.columns[0]).df == 6, "measured seeds go before"


def test_seeds_that_kept_nothing_tell_nothing_of_trainings(tmp_path):
    board = board_of(tmp_path, [LINEAR], gap=20, seeds=3, kept=False)
    noise = noise_of(board, board.columns[0])
    assert noise.df == 0 and not noise.known
    assert set(only_mark(board).values()) == {"unbacked"}


def test_ranks_over_few_columns_count_trainings(tmp_path):
    kinds = [LINEAR, SEMISUP]
    said = {}
    ways = (
        ("once", {}),
        ("calm", {"seeds": 3}),
        ("wild", {"seeds": 3, "trainings": 12.0}),
    )
    for name, how in ways:
        board = board_of(tmp_path / name, kinds, gap=6, seed=1, **how)
        said[name] = answer(board, overall(board))
    assert "too little was measured, trained again or kept" in said["once"]
    assert "three leads alone over all 2 measurements" in said["calm"]
    assert "on other images and trainings" in said["calm"]
    assert "leads alone" not in said["wild"]


NEIGHBOURS = {"task": "knn", "metric": "top1_k20", "protocol": "knn-demo-v1"}
NARROW = ({"value": 60.0, "ci95": (59.0, 61.0)}, {"value": 80.0, "ci95": (79.0, 81.0)})
ALIKE = {"value": 70.0, "ci95": (57.4, 80.1)}


@pytest.mark.parametrize(
    ("rows", "ends", "said"),
    [
        ([{**NEIGHBOURS, **ALIKE}] * 2, (57.4, 80.1), "one measurement"),
        ([ALIKE] * 3, (57.4, 80.1), "mean of 3 seeds"),  # no surer than the images
        # By t's quantile with one degree of freedom
        (NARROW, (-57.06, 197.06), "mean of 2 seeds"),
    ],
)
def test_seeds_that_agree_and_seeds_that_differ(tmp_path, rows, ends, said):
    for seed, row in enumerate(rows):
        store.append(tmp_path / f"s{seed}", [a_result(seed=seed, **row)])
    board = collect([tmp_path])
    (cell,) = [board.cell(board.rows[0], column) for column in board.columns]
    assert (
        cell.value == 70.0
        and cell.ci95 == pytest.approx(ends, abs=0.01)
        and said in cell.note
    )
