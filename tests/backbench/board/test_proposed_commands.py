"""The commands that a board proposes: those that measured its numbers, for others or more seeds."""

from pathlib import Path

import pytest
from support.records import a_result

from backbench.board import commands
from backbench.board.board import Column, Measurement, fill
from backbench.requests import parsing

A, B = "a" * 64, "b" * 64
LINEAR = "backbench linear ck/a.safetensors --datasets dtd --data ROOT7 --protocol lorac --out runs/a-linear"


def a_row(digest=A, name="a", command=LINEAR, **about):
    given = {"task": "linear", "dataset": "dtd", "protocol": "linear-lorac-v1", **about}
    origin = {} if command is None else {"command": command, "recorded": 5.0}
    return a_result(checkpoint=digest, name=name, origin=origin, **given)


def proposed(*rows, measure=(0,), **more):
    """The request of the command that measures these rows of the board."""
    board = fill(Measurement(row, Path("runs")) for row in rows)
    column = board.columns[0]
    by_digest = {row.checkpoint: row for row in board.rows}
    wanted = [by_digest[rows[i].checkpoint] for i in measure]
    command = commands.measuring(board, column, wanted, **more)
    assert command.startswith("backbench ")
    return parsing.parse(command.split()[1:])


def test_others_are_measured_by_the_command_that_was_recorded():
    other = LINEAR.replace("ck/a.safetensors", "ck/b.safetensors")
    request = proposed(
        a_row(), a_row(B, "b", other, task="knn", protocol="knn-x"), measure=(1,)
    )
    assert request.verb == "linear"
    assert request.checkpoints == (Path("ck/b.safetensors"),)
    assert (request.protocol, request.datasets, request.data) == (
        "lorac",
        "dtd",
        Path("ROOT7"),
    )
    assert request.out == Path("runs/b-linear")
    assert (request.seeds, request.seed) == (1, 0)


def test_more_seeds_have_a_folder_of_their_own():
    request = proposed(a_row(command=f"{LINEAR} --seed 4"), seeds=3)
    assert (request.seeds, request.seed) == (3, 0)
    assert request.out == Path("runs/seeds-linear")


def test_the_newest_command_counts_that_can_be_read():
    """One of another program, of another release or of another verb measures nothing here."""
    for odd in (
        "python mine.py",
        "backbench linear --no-such-flag",
        "backbench knn a.pth",
    ):
        request = proposed(a_row(command=odd), a_row(B, "b"), measure=(0,))
        assert request.data == Path("ROOT7")
    request = proposed(a_row(command="python mine.py"))
    assert (request.data, request.out) == (Path("ROOT"), Path("runs/a-linear"))
    assert request.protocol == "lorac" and request.datasets == "dtd"
    assert request.checkpoints == (Path("a.safetensors"),)


def test_words_of_a_recorded_list_are_one_command():
    words = LINEAR.split()
    assert proposed(a_row(command=words)).data == Path("ROOT7")


def test_evaluate_is_proposed_with_its_models_and_tasks():
    command = "backbench evaluate ck/a.safetensors ck/c.safetensors linear knn --data mine --out runs"
    other = "backbench evaluate ck/b.safetensors --data mine --out elsewhere"
    request = proposed(
        a_row(command=command),
        a_row(B, "b", other, task="knn", protocol="k"),
        measure=(1,),
    )
    assert request.verb == "evaluate"
    models = ("ck/a.safetensors", "ck/c.safetensors", "ck/b.safetensors")
    assert request.words == (*models, "linear", "knn")
    # More seeds of a task that trains are the task's own command
    request = proposed(a_row(command=command, dataset="mine"), seeds=3)
    assert request.verb == "linear" and request.seeds == 3


DETECT = "backbench detect --config-file faster_rcnn_R_50_FPN_1x --checkpoint ck/a.safetensors --resume"
DETECT += " --data ROOT7 OUTPUT_DIR runs/old SOLVER.MAX_ITER 9"


def test_a_detectors_folder_is_named_anew():
    about = {
        "task": "faster_rcnn",
        "dataset": "coco2017",
        "split": "val",
        "metric": "bbox_AP",
    }
    request = proposed(
        a_row(command=DETECT, **about, protocol="faster_rcnn-x"), seeds=3
    )
    assert request.verb == "detect"
    assert (request.resume, request.seeds, request.seed) == (False, 3, None)
    assert request.opts == ("SOLVER.MAX_ITER", "9")
    assert request.checkpoint == Path("ck/a.safetensors")
    # As other checkpoints are trained by commands of their own
    assert request.out.name == "seeds-a-faster_rcnn"


@pytest.mark.parametrize(
    ("dataset", "protocol", "config", "named"),
    [
        ("cells", "detect-own-v1", "mask_rcnn_own", "cells"),
        ("cells", "detect-own-plain-v1", "mask_rcnn_own_plain", "cells"),
        ("coco2017", "detection-1x-v1", "mask_rcnn_R_50_FPN_1x", None),
        ("coco2017", "detection-vit-b-1x-v1", "mask_rcnn_ViT_B_SFP_1x", None),
        ("scenes", "detection-demo-frozen-v1", "demo_mask_rcnn_frozen", None),
        ("cells", "detection-0123456789ab", "mask_rcnn_own", "cells"),
        ("scenes", "detection-0123456789ab", "mask_rcnn_R_50_FPN_1x", None),
    ],
)
def test_a_detector_of_evaluate_is_trained_by_its_protocols_config(
    dataset, protocol, config, named
):
    """By another config its numbers would stand in another column, and take days."""
    about = {"task": "mask_rcnn", "dataset": dataset, "metric": "segm_AP"}
    command = EVALUATE.format(f"here/{dataset}").replace("linear", "mask_rcnn")
    row = a_row(command=command, **about, protocol=protocol)
    request = proposed(row, seeds=3)
    assert (request.verb, request.config_file) == ("detect", config)
    assert (request.dataset, request.checkpoint) == (named, Path("ck/a.safetensors"))
    assert request.out == Path("runs/seeds-a-mask_rcnn")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mine", "ck/a.safetensors"),
        ("a", "ck/a.safetensors"),
        ("lorac demo/2", "ck/a.safetensors"),
    ],
)
def test_a_file_is_the_only_one_of_its_command(name, file):
    assert proposed(a_row(name=name)).checkpoints == (Path(file),)


def test_of_several_files_the_one_of_the_rows_name_is_its():
    both = LINEAR.replace(
        "ck/a.safetensors", "ck/x.safetensors runs/b/backbone.safetensors"
    )
    assert proposed(a_row(name="b", command=both)).checkpoints == (
        Path("runs/b/backbone.safetensors"),
    )
    assert proposed(a_row(name="x", command=both)).checkpoints == (
        Path("ck/x.safetensors"),
    )
    # Nobody knows which: its name stands for it
    unknown = proposed(a_row(name="a b!", command=both))
    assert unknown.checkpoints == (Path("a-b.safetensors"),)


def test_columns_of_one_command_are_measured_together():
    rows = [a_row(), a_row(dataset="flowers", command=LINEAR.replace("dtd", "flowers"))]
    board = fill(Measurement(row, Path("runs")) for row in rows)
    first, other = board.columns[:2]
    command = commands.measuring(board, first, board.rows[:1], also=(other, first))
    request = parsing.parse(command.split()[1:])
    assert sorted(request.datasets.split(",")) == ["dtd", "flowers"]
    assert commands.takes_several(first)


def recorded(command, when, digest=A, name="a", **about):
    row = a_row(digest, name, command, **about)
    row.origin["recorded"] = when
    return row


def test_of_several_commands_the_one_recorded_last_is_proposed():
    older = recorded(LINEAR.replace("ROOT7", "OLD"), 3.0)
    newest = recorded(LINEAR.replace("ROOT7", "NEW"), 9.0, B, "b")
    between = recorded(LINEAR, 5.0, "c" * 64, "c")
    for rows in ((older, newest, between), (newest, between, older)):
        assert proposed(*rows).data == Path("NEW")
    # One that names no checkpoint measures nothing
    without = "backbench detect --config-file x --data ROOT7 --out runs/y"
    about = {"task": "faster_rcnn", "metric": "bbox_AP", "dataset": "cells"}
    request = proposed(recorded(without, 5.0, protocol="x", **about))
    assert (request.data, request.checkpoint) == (Path("ROOT"), Path("a.safetensors"))


EVALUATE = (
    "backbench evaluate ck/a.safetensors ck/c.safetensors linear --data {} --out runs"
)


@pytest.mark.parametrize(
    ("data", "root"), [("here/mine", "here"), ("here/others", "here/others")]
)
def test_a_task_that_evaluate_measured_has_its_data_and_folder(data, root):
    row = a_row(command=EVALUATE.format(data), dataset="mine")
    request = proposed(row, seeds=2)
    assert (request.data, request.datasets) == (Path(root), "mine")
    assert request.out == Path("runs/seeds-linear")
    assert request.checkpoints == (Path("ck/a.safetensors"),)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("c", "ck/c.safetensors"),
        ("ck/c.safetensors", "ck/c.safetensors"),
        # Nobody knows which, so it is the copy that `evaluate` keeps
        ("mine", f"runs/checkpoint-{'a' * 12}.safetensors"),
    ],
)
def test_a_model_of_evaluate_is_known_by_its_name_or_its_digest(name, file):
    row = a_row(name=name, command=EVALUATE.format("x"))
    assert proposed(row, seeds=2).checkpoints == (Path(file),)


@pytest.mark.parametrize(
    ("name", "folder", "file"),
    [
        # Every pretraining's file has this name, so its folder tells it
        ("lorac", "runs/run/", "runs/run/backbone.safetensors"),
        ("run", "runs/run/", "runs/run/backbone.safetensors"),
        ("lorac", "", "lorac.safetensors"),
        (".- under/x y", "", "under-x-y.safetensors"),
        ("...", "", f"{'a' * 12}.safetensors"),
    ],
)
def test_a_pretrainings_file_is_known_by_its_folder(name, folder, file):
    command = LINEAR.replace("ck/a.safetensors", f"{folder}backbone.safetensors")
    assert proposed(a_row(name=name, command=command)).checkpoints == (Path(file),)


@pytest.mark.parametrize(
    ("task", "several"),
    [("linear", True), ("knn", True), ("ood", True), ("finetune", False)],
)
def test_some_commands_measure_several_checkpoints(task, several):
    assert commands.takes_several(Column(task, "x", "top1", "v1")) == several


def test_a_detectors_folder_may_stand_anywhere_or_nowhere():
    opts = ("A", "1", "OUTPUT_DIR", "runs/x", "B", "2")
    assert commands._without_folder(opts) == ("A", "1", "B", "2")
    assert commands._without_folder(opts[:2]) == ("A", "1")
