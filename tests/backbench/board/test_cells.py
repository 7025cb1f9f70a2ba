"""Cells, marks and facts of a board, from rows whose every part is unlike the others."""

import dataclasses
import functools
from pathlib import Path

import pytest
from support import records, small_boards
from support.boards import digest_of

from backbench.board import board as boards
from backbench.board.board import Board, Cell, Column, Measurement, Row, fill
from backbench.recipes import fast
from backbench.stats.training_noise import NOTHING_TRAINED, TrainingNoise

KNN = {"task": "knn", "metric": "top1_k20", "protocol": "knn-demo-v1"}
# As far as no erratum touches a row
HELD = {"image_contents": None, "pixels": {}}
a_result = functools.partial(records.a_result, ci95=None, provenance=HELD)


def board_of(*rows, run=Path("runs")) -> Board:
    return fill([Measurement(row, run) for row in rows])


def test_a_column_is_named_by_all_its_parts():
    whole = Column("mask_rcnn", "coco2017", "segm_AP", "v1~1a2b", "detectron2", "val")
    assert whole.name == "mask_rcnn/coco2017:val/segm_AP@v1~1a2b+detectron2"
    cut = Column("linear", "digits", "top1", "v1", split="test~n500+50")
    assert cut.name == "linear/digits:test~n500+50/top1@v1"
    odd = Column("linear", "a/b", "top1+x", "v+1", "e@f", "s:1")
    assert odd.name == "linear/a%2Fb:s%3A1/top1%2Bx@v%2B1+e%40f"
    assert whole.without_marks == (
        "mask_rcnn",
        "coco2017",
        "segm_AP",
        "v1",
        "detectron2",
    )
    assert whole.setting == ("mask_rcnn", "coco2017", "val", "v1~1a2b", "detectron2")
    assert cut.setting == ("linear", "digits", "test~n500+50", "v1", "")


def test_columns_stand_by_task_protocol_engine_dataset_split_and_metric():
    ordered = [
        Column("linear", "imagenet", "top1", "a"),
        Column("linear", "imagenet", "top5", "a"),
        # Of LORAC's twelve in its order, and the mean over them
        Column("linear", "cifar10", "top1", "a"),
        Column("linear", "cifar100", "top1", "a"),
        Column("linear", "average", "average", "a"),
        # Others by their names
        Column("linear", "boats", "top1", "a"),
        Column("linear", "boats", "top1", "a", split="val"),
        Column("linear", "coins", "top1", "a"),
        Column("linear", "imagenet", "top1", "a", "one"),
        Column("linear", "imagenet", "top1", "a", "two"),
        Column("linear", "imagenet", "top1", "b"),
        Column("knn", "imagenet", "top1_k5", "a"),
    ]
    assert boards.in_order(ordered[::-1]) == ordered


def test_seeds_make_one_cell_in_the_order_of_the_seeds():
    rows = [
        a_result(seed=2, value=75.0, ci95=(70.0, 79.0)),
        a_result(seed=0, value=70.0, ci95=(60.0, 85.0)),
        a_result(seed=1, value=None),
    ]
    board = board_of(*rows)
    ((_, cell),) = board.cells.items()
    assert [part.result.seed for part in cell.parts] == [0, 1, 2]
    assert (cell.value, cell.values) == (72.5, [70.0, 75.0])
    assert cell.note == "mean of 2 seeds, 3 run"
    # t's 12.7062 times the standard error of two values that lie 5 apart
    half = 12.7062 * 2.5
    assert cell.ci95 == pytest.approx((72.5 - half, 72.5 + half), rel=1e-4)
    assert cell.half_width == pytest.approx(half, rel=1e-4)
    assert Cell(3.0).half_width is None


def test_seeds_that_agree_are_as_sure_as_their_images_in_the_mean():
    rows = [
        a_result(seed=0, value=70.0, ci95=(60.0, 78.0)),
        a_result(seed=1, value=70.1, ci95=(64.0, 79.0)),
        a_result(seed=2, value=70.2),
    ]
    (cell,) = board_of(*rows).cells.values()
    assert cell.note == "mean of 3 seeds"
    assert (cell.value, cell.ci95) == (pytest.approx(70.1), (62.0, 78.5))


def test_an_undefined_number_has_no_mean():
    rows = [a_result(seed=seed, value=None) for seed in range(2)]
    (cell,) = board_of(*rows).cells.values()
    assert (cell.value, cell.ci95, cell.values, cell.note) == (None, None, [], "")
    (one,) = board_of(rows[0]).cells.values()
    assert (one.value, one.note, len(one.parts)) == (None, "", 1)


def test_seeds_of_what_nothing_trains_are_one_measurement_while_they_agree():
    alike = [
        a_result(seed=seed, value=70.0, ci95=(60.0, 80.0), **KNN) for seed in (0, 1)
    ]
    (cell,) = board_of(*alike).cells.values()
    assert cell.note == "2 seeds, one measurement"
    assert (cell.value, cell.ci95) == (70.0, (60.0, 80.0))
    differ = [alike[0], dataclasses.replace(alike[1], value=72.0)]
    (cell,) = board_of(*differ).cells.values()
    assert (cell.note, cell.value) == ("mean of 2 seeds", 71.0)
    trained = [a_result(seed=seed, value=70.0) for seed in (0, 1)]
    (cell,) = board_of(*trained).cells.values()
    assert cell.note == "mean of 2 seeds"


def test_a_cell_is_backed_only_if_all_its_seeds_are():
    rows = [a_result(seed=seed, value=70.0 + seed) for seed in range(3)]
    for levels, backed in (
        ((3, 2, 3), True),
        ((3, 1, 3), False),
        ((1,), False),
        ((2,), True),
    ):
        several = [
            dataclasses.replace(row, origin={"verified": level})
            for row, level in zip(rows, levels)
        ]
        (cell,) = board_of(*several).cells.values()
        assert cell.backed == backed


def test_one_stopped_fit_among_seeds_unsettles_the_number():
    stopped = {"chosen": {"converged": False, "gradient": 2e-3}}
    rows = [a_result(seed=0, value=70.0), a_result(seed=1, value=72.0, **stopped)]
    (cell,) = board_of(*rows).cells.values()
    assert not cell.settled
    assert cell.note == (
        "mean of 2 seeds; the fit has not converged: its gradient is 2.0e-03, and more"
        " iterations would move this number"
    )


def test_of_numbers_measured_again_the_last_counts_each():
    def recorded(seed, value, when, name="x"):
        return a_result(seed=seed, value=value, name=name, origin={"recorded": when})

    rows = [
        recorded(0, 70.0, 3.0),
        recorded(1, 60.0, 1.0),
        recorded(0, 71.0, 1.0, "older"),
        recorded(1, 62.0, 2.0),
        # A copy of a line is no second number
        recorded(0, 70.0, 3.0),
        a_result(seed=1, value=61.0),
    ]
    folders = [Path(f"run{number}") for number in range(len(rows))]
    board = fill(
        (Measurement(row, run) for row, run in zip(rows, folders)), ["said before"]
    )
    (cell,) = board.cells.values()
    assert cell.values == [70.0, 62.0]
    assert [part.run.name for part in cell.parts] == ["run4", "run3"]
    column = board.columns[0].name
    # In the order of their times: a line without one is older than all others
    assert board.problems == [
        "said before",
        f"x: {column} was measured twice: 60.0 (run1) counts, recorded after 61.0 (run5)",
        f"x: {column} was measured twice: 62.0 (run3) counts, recorded after 60.0 (run1)",
        f"x: {column} was measured twice: 70.0 (run0) counts, recorded after 71.0 (run2)",
    ]
    assert [row.name for row in board.rows] == ["x"]


def test_a_board_orders_its_rows_by_name_and_a_column_by_value():
    def of(digest, name, value, **more):
        return a_result(checkpoint=digest * 64, name=name, value=value, **more)

    about = {**KNN, "metric": "ece", "task": "calibration"}
    rows = [of("c", "same", 50.0), of("b", "same", 50.0), of("a", "zebra", 60.0)]
    rows += [of("d", "none", None), of("e", "ant", 50.0)]
    rows += [of("a", "zebra", 3.0, **about), of("b", "same", 1.0, **about)]
    board = board_of(*rows)
    assert [row.checkpoint[0] for row in board.rows] == ["e", "d", "b", "c", "a"]
    printed = Row("key", "printed", "m", "a", 1, boards.PUBLISHED)
    accuracy, error = board.columns
    board.rows.append(printed)
    board.cells["key", accuracy] = Cell(99.0)
    found = board.measured(accuracy)
    assert [row.checkpoint[0] for row, _ in found] == ["a", "e", "b", "c"]
    assert [cell.value for _, cell in found] == [60.0, 50.0, 50.0, 50.0]
    # Less is better of an error
    assert [row.checkpoint[0] for row, _ in board.measured(error)] == ["b", "a"]
    board.cells["b" * 64, accuracy].backed = False
    assert [row.checkpoint[0] for row, _ in board.backed(accuracy)] == ["a", "e", "c"]
    assert board.row_index()["a" * 64] == 4


def test_only_measured_ranked_columns_are_main_ones():
    rows = [a_result(metric=metric) for metric in ("top5", "top1")]
    rows += [a_result(metric="top5", dataset="birds", protocol="linear-lorac-v1")]
    rows += [a_result(task="calibration", metric="ece", protocol="linear-demo-v1")]
    rows += [a_result(dataset="boats", split="val"), a_result(dataset="boats")]
    board = board_of(*rows)
    unused = Column("linear", "coins", "top1", "linear-demo-v1")
    board.rows.append(Row("key", "printed", "m", "a", 1, boards.PUBLISHED))
    board.cells["key", unused] = Cell(99.0)
    board.columns = boards.in_order([*board.columns, unused])
    assert [column for column in board.columns if column != unused] == (
        board.measured_columns()
    )
    main = [(c.dataset, c.split, c.metric) for c in board.main_columns()]
    # A setting that has no top-1 is ranked by what it has
    assert main == [
        ("boats", None, "top1"),
        ("boats", "val", "top1"),
        ("digits", None, "top1"),
        ("birds", None, "top5"),
    ]


# ---- what rows say of checkpoints


def test_rows_say_how_a_checkpoint_was_trained_and_where_it_was_measured():
    recipe = {**fast.KEYS, "epochs": 4}
    sizes = [(32, 32), (64, 32), (96, 32), (32, None), (None, 64)]
    rows = []
    for number, (measured, trained) in enumerate(sizes):
        size = {"measured": measured, "trained": trained}
        labs = {"lab": f"north{number % 2}"}
        if number == 1:
            labs["also"] = [{"lab": "south"}, {"value": 3.0}, {"lab": "y" * 61}]
        rows.append(
            a_result(
                seed=number,
                provenance={
                    **HELD,
                    "size": size,
                    fast.PRETRAINING: {**recipe, "n": number},
                },
                origin=labs,
            )
        )
    never = [dataclasses.replace(row, checkpoint="b" * 64, epochs=0) for row in rows]
    plain = a_result(checkpoint="c" * 64)
    board = board_of(*rows, *never, plain)
    a, b = "a" * 64, "b" * 64
    assert board.ways == {a: fast.WORD}
    assert board.recipes == {key: {**recipe, "n": 0} for key in (a, b)}
    assert board.trained == {a: 32}
    assert board.resized == {a: {64, 96}}
    heard = ["north0", "north1", "south", "y" * 60 + "..."]
    assert {key: list(labs) for key, labs in board.labs.items()} == {a: heard, b: heard}


def test_a_number_that_ranks_nobody_was_measured_at_no_odd_size():
    size = {"measured": 64, "trained": 32}
    row = a_result(
        task="calibration",
        metric="ece",
        provenance={**HELD, "size": size},
    )
    board = board_of(row)
    assert (board.trained, board.resized) == ({"a" * 64: 32}, {})


# ---- tests between rows


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (NOTHING_TRAINED, ""),
        (
            TrainingNoise(0.0625, 0.01, 4, "seeds measured here"),
            "±0.25 points (4 degrees of freedom, seeds measured here)",
        ),
        (
            TrainingNoise(1.0, 0.01, 3),
            "not known: 3 degrees of freedom of the 4 that two checkpoints with `--seeds 3` give",
        ),
    ],
)
def test_the_noise_of_trainings_is_told(noise, words):
    assert boards.noise_words(noise) == words


@pytest.mark.parametrize(
    ("of_a", "of_b", "expected"),
    [
        ([70.0, 72.0, 80.0], [60.0, 63.0, 90.0], 9.5),
        ([70.0, None, 80.0], [60.0, 63.0, 90.0], None),
        ([70.0, 72.0, 80.0], [None, None, 90.0], None),
        # The third seeds are not compared
        ([70.0, 72.0, None], [60.0, 63.0, None], 9.5),
    ],
)
def test_a_difference_of_numbers_is_of_the_seeds_that_are_compared(
    of_a, of_b, expected
):
    cells = []
    for values in (of_a, of_b):
        rows = [a_result(seed=seed, value=value) for seed, value in enumerate(values)]
        cells.append(Cell(None, parts=[Measurement(row, Path()) for row in rows]))
    found = boards._plain_difference(*cells, [0, 1], [0, 1])
    assert found == expected
    assert boards._plain_difference(*cells, [0], []) is None


def test_above_the_most_pairs_each_columns_best_row_is_compared(tmp_path, monkeypatch):
    knn = ("knn", "digits", "top1_k20", "knn-demo-v1", None)
    kept_by_few = ("fewshot", "digits", "top1", "fewshot-demo-v1", None)
    table = {
        "a": {knn: 50.0, kept_by_few: 60.0},
        "b": {knn: 80.0, kept_by_few: small_boards.bare(90.0)},
        "c": {knn: 65.0, kept_by_few: 70.0},
    }
    board = small_boards.board_of(tmp_path, table)

    def pairs():
        return [
            (
                board.columns[pair.column].task,
                pair.a,
                pair.b,
                round(pair.difference.value),
            )
            for pair in boards.compare_rows(board)
        ]

    few = ("fewshot", 0, 2, -10)
    assert pairs() == [("knn", 1, 2, 15), ("knn", 0, 1, -30), ("knn", 0, 2, -15), few]
    monkeypatch.setattr(boards, "MOST_PAIRS", 4)
    assert len(pairs()) == 4
    monkeypatch.setattr(boards, "MOST_PAIRS", 3)
    assert pairs() == [("knn", 1, 2, 15), ("knn", 0, 1, -30), few]
    monkeypatch.setattr(boards, "MOST_PAIRS", 2)
    assert pairs() == [("knn", 1, 2, 15), ("knn", 0, 1, -30)]
    assert [row.checkpoint for row in board.rows] == [digest_of(name) for name in "abc"]
