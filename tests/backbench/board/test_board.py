"""leaderboard.csv as the contract says, what may share a column, and what may be called best."""

import csv
import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import boards, records

from backbench.board import ablation
from backbench.board.board import Board, collect, standing
from backbench.board.export import command_again, write_csv, write_tidy
from backbench.board.overall import overall
from backbench.cli import program
from backbench.datasets.catalog import DATASETS, TWELVE
from backbench.errors import BadInput
from backbench.published import catalogue, judging_rules, published, tables
from backbench.published.board_rows import add_published
from backbench.published.expected_rows import expected_keys
from backbench.published.judge import judge
from backbench.recipes import config, fast
from backbench.records import store

ROOT = Path(__file__).parents[3]
a_result = functools.partial(
    records.a_result,
    name="lorac",
    method="lorac",
    arch="resnet50",
    epochs=200,
    dataset="cifar10",
    protocol="linear-lorac-v1",
)


def board_of(tmp_path, *rows) -> Board:
    store.append(tmp_path / "runs", rows)
    return collect([tmp_path / "runs"])


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_is_the_contract(tmp_path):
    coco = {"task": "mask_rcnn", "dataset": "coco2017", "metric": "segm_AP"}
    detected = a_result(**coco, protocol="detection-1x-v1", engine="detectron2")
    undefined = {"checkpoint": "b" * 64, "epochs": None, "value": None, "ci95": None}
    random = a_result(**undefined, name="random", method="random")
    board = board_of(tmp_path, a_result(), detected, random)
    write_csv(board, tmp_path / "leaderboard.csv")
    assert (tmp_path / "leaderboard.csv").read_text().splitlines() == [
        "checkpoint,name,method,arch,epochs,source,linear/cifar10/top1@linear-lorac-v1,"
        "mask_rcnn/coco2017/segm_AP@detection-1x-v1+detectron2",
        f"{'a' * 64},lorac,lorac,resnet50,200,measured,91.25,91.25",
        f"{'b' * 64},random,random,resnet50,,measured,,",
    ]


def test_the_average_appears_only_when_complete(tmp_path):
    twelve = []
    eleven = []
    for i, name in enumerate(TWELVE):
        measured = {"dataset": name, "metric": DATASETS[name].metric}
        twelve.append(a_result(**measured, value=50.0 + i))
        if name != TWELVE[-1]:
            eleven.append(a_result(**measured, checkpoint="b" * 64, name="b"))
    board = board_of(tmp_path, *twelve, *eleven)
    average = next(c for c in board.columns if c.dataset == "average")
    assert average.name == "linear/average/average@linear-lorac-v1"
    cells = {row.name: board.cell(row, average) for row in board.rows}
    assert cells["lorac"].value == pytest.approx(55.5)
    assert cells["b"] is None
    twelfth = a_result(dataset="sun397", protocol="other-v1", checkpoint="b" * 64)
    other = board_of(tmp_path / "other", *eleven, twelfth)
    assert not [c for c in other.columns if c.dataset == "average"]


def test_the_average_adds_half_widths_in_squares(tmp_path):
    rows = [
        a_result(dataset=d, metric=DATASETS[d].metric, ci95=(90.25, 92.25))
        for d in TWELVE
    ]
    board = board_of(tmp_path, *rows)
    average = next(c for c in board.columns if c.dataset == "average")
    cell = board.cell(board.rows[0], average)
    assert cell.half_width == pytest.approx(1 / 12**0.5)
    assert cell.settled and not cell.backed, "nothing was kept of them"
    # 90 and 92 by two seeds: standard errors of 1, known with a degree of freedom each; t(36) 2.028
    both = ({"seed": 0, "value": 90.0}, {"seed": 1, "value": 92.0})
    seeds = [
        dataclasses.replace(r, **one, ci95=(89.0, 93.0)) for r in rows for one in both
    ]
    cell = board_of(tmp_path / "seeds", *seeds).cells[rows[0].checkpoint, average]
    assert cell.half_width == pytest.approx(2.028 / 12**0.5, rel=1e-3)
    stopped = dataclasses.replace(rows[0], chosen={"converged": False})
    unsettled = board_of(tmp_path / "unsettled", stopped, *rows[1:])
    assert not unsettled.cell(unsettled.rows[0], average).settled
    first = a_result(dataset=TWELVE[0], metric="mean_per_class", ci95=None)
    lacking = board_of(tmp_path / "b", *rows[1:], first)
    cell = lacking.cell(lacking.rows[0], average)
    assert (cell.value, cell.ci95) == (pytest.approx(91.25), None)


def test_reading_a_board_is_light(tmp_path):
    store.append(tmp_path, [a_result(), a_result(dataset="dtd")])
    heavy = "('torch', 'torchvision', 'scipy', 'PIL', 'matplotlib')"
    code = (
        "import sys, backbench; from backbench.cli import leaderboard; "
        f"board = backbench.collect([{str(tmp_path)!r}]); "
        f"print(len(board.columns), [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "2 []"


def test_the_last_recorded_of_duplicates_counts_and_is_said(tmp_path):
    old = a_result(value=90.0, origin={"recorded": 1.0})
    new = a_result(value=91.0, origin={"recorded": 2.0})
    store.append(tmp_path / "runs" / "a", [new])
    store.append(
        tmp_path / "runs" / "b", [old, a_result(metric="top5"), a_result(metric="top5")]
    )
    board = collect([tmp_path / "runs", tmp_path / "runs" / "a"])
    assert collect(str(tmp_path / "runs")).rows == board.rows
    assert [c.value for c in board.cells.values()] == [91.0, 91.25]
    assert len(board.problems) == 1
    assert "measured twice: 91.0" in board.problems[0]


def test_one_checkpoint_under_two_names_is_one_row(tmp_path):
    board = board_of(tmp_path, a_result(), a_result(name="renamed", metric="top5"))
    assert [row.name for row in board.rows] == ["renamed"]
    two = board_of(tmp_path / "b", a_result(), a_result(checkpoint="b" * 64))
    assert sorted(two.labels().values()) == ["lorac aaaaaa", "lorac bbbbbb"]


def test_published_rows_stand_beside_marked(tmp_path):
    board = board_of(tmp_path, a_result())
    add_published(board)
    write_csv(board, tmp_path / "l.csv")
    rows = {r["checkpoint"]: r for r in read_csv(tmp_path / "l.csv")}
    column = "linear/cifar10/top1@linear-lorac-v1"
    assert rows["lorac:2:lorac:resnet50:200"]["source"] == "published"
    assert float(rows["lorac:2:lorac:resnet50:200"][column]) == 91.8
    assert rows["a" * 64]["source"] == "measured"
    quoted = rows["lorac:1:byol:resnet50:400"]
    assert quoted["linear/imagenet/top1@lorac-table-1"] == "73.2"
    assert quoted["linear/imagenet/top1@linear-lorac-imagenet-v1"] == ""
    chosen = next(c for c in board.columns if c.name == column)
    assert standing(board, chosen) == {"a" * 64: "unbacked"}
    printed = [r for r in rows.values() if r["source"] == "published"]
    assert all(":" in r["checkpoint"] for r in printed)


def test_the_protocol_of_printed_detections_is_the_shipped_one():
    from backbench.detection import dialect, protocol

    given = dialect.read("mask_rcnn_R_50_FPN_1x", [])
    judgeable = [r for r in published.rows() if judging_rules.reason(r) is None]
    one = next(r for r in judgeable if r.task == "mask_rcnn")
    column = judging_rules.column_of(one)
    assert (column.protocol, column.engine) == (protocol.protocol(given), "detectron2")


def test_tables_of_the_papers(tmp_path):
    names = ["random", "moco_m_200", "lorac_200"]
    boards.synthetic(tmp_path / "runs", names, boards.PAPER, gap=12, seeds=3)
    folders = [f"--latex={tmp_path / 'tex'}", f"--markdown={tmp_path / 'md'}"]
    assert program.main(["leaderboard", str(tmp_path / "runs"), *folders, "-q"]) == 0
    printed = [(item.grid.name, n) for item in catalogue.items() for n in item.numbers]
    unscored = judging_rules.NO_SCORES
    names = {name for name, n in printed if judging_rules.reason(n) not in unscored}
    assert {"lorac_table1", "mio_sec41", "arb_fig7", "cllr_table06"} <= names
    assert {p.stem for p in (tmp_path / "tex").iterdir()} == names | {"board"}
    for name in names:
        tex = (tmp_path / "tex" / f"{name}.tex").read_text()
        assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 1
        width = tex.split(r"\begin{tabular}{")[1].split("}")[0]
        body = [
            row
            for row in tex.splitlines()
            if row.endswith(r"\\") and "multicolumn" not in row
        ]
        assert {line.count(" & ") + 1 for line in body} == {len(width)}, name
        bold = [line for line in body if "textbf" in line]
        assert bold == [line for line in body if line.startswith(r"lorac\_200")]
    for n in (1, 2, 3, 4):
        assert (
            "\nlorac\\_200 &" in (tmp_path / "tex" / f"lorac_table{n}.tex").read_text()
        )
    two = (tmp_path / "tex" / "lorac_table2.tex").read_text()
    assert "LORAC & 200 & 47.8 & 50.9" in two
    assert "Model & Epochs & Aircraft & " in two and "SUN397 & Average" in two
    markdown = (tmp_path / "md" / "lorac_table3.md").read_text()
    assert "| LORAC | 200 | published | 50.0 | 76.3 | 68.0 | 88.9 |" in markdown
    assert "| random |  | measured |" in markdown
    assert (
        "| Source | 1% labels: Top-1 | 1% labels: Top-5 | 10% labels: Top-1 |"
        in markdown
    )
    four = (tmp_path / "md" / "lorac_table4.md").read_text()
    assert "| Source | Faster R-CNN: AP | Faster R-CNN: AP50 |" in four


def test_a_table_of_several_sets_has_its_protocols_side_by_side(tmp_path):
    small = a_result(dataset="cifar10", protocol="linear-mio-v2", value=84.0)
    other = a_result(
        dataset="stl10", protocol="linear-mio-stl10-v2", checkpoint="b" * 64, name="b"
    )
    tables.write(
        board_of(tmp_path, small, other), [], latex=None, markdown=tmp_path / "md"
    )
    text = (tmp_path / "md" / "mio_table4.md").read_text()
    assert "| MIO (A) | 250 | published | 84.3 | 55.3 | 58.1 |" in text
    assert "| lorac | 200 | measured | 84.0 |  |  |" in text
    assert "| b | 200 | measured |  |  | 91.2 |" in text
    errors = (tmp_path / "md" / "cllr_table06.md").read_text()
    assert "| CLLR, optimiser SGD lr 5e-3 | 400 | published | 97.9 | 93.1 |" in errors


def test_unlike_protocols_make_tables_of_their_own(tmp_path):
    here = [a_result(dataset="imagenet", protocol="linear-lorac-imagenet-v1")]
    there = [
        a_result(
            dataset="imagenet", protocol="linear-grid-v1", checkpoint="b" * 64, name="b"
        )
    ]
    board = board_of(tmp_path, *here, *there)
    tables.write(board, [], latex=None, markdown=tmp_path / "md")
    first = (tmp_path / "md" / "lorac_table1.md").read_text()
    assert "| lorac | 200 | measured" in first and "| b |" not in first
    second = (tmp_path / "md" / "lorac_table1_linear-grid-v1.md").read_text()
    assert "| b | 200 | measured" in second


def test_names_do_not_break_latex(tmp_path):
    board = board_of(tmp_path, a_result(dataset="imagenet", name=r"50%_a&b\{}~^"))
    tables.write(board, [], latex=tmp_path / "tex", markdown=None)
    name = r"50\%\_a\&b\textbackslash{}\{\}\textasciitilde{}\textasciicircum{}"
    tex = (tmp_path / "tex" / "lorac_table1.tex").read_text()
    assert f"\n{name} & 200 & 91.2 & -- \\\\\n" in tex


def test_a_trunk_that_was_never_trained_is_not_called_fast(tmp_path):
    told = fast.of_trunk({"recipe": FAST})
    rows = []
    for name, checkpoint, epochs in (("lorac", "a", 200), ("random", "b", 0)):
        one = a_result(name=name, checkpoint=checkpoint * 64, epochs=epochs)
        rows.append(dataclasses.replace(one, provenance={**one.provenance, **told}))
    store.append(tmp_path, rows)
    board = collect([tmp_path])
    assert {board.name(row) for row in board.rows} == {"lorac (fast)", "random"}


PRINTED = config.read_recipe(config.find_recipe("lorac/lorac_imagenet", "pretrain"))
FAST = config.apply_overrides(PRINTED, fast.spelled())
REFERENCE = config.apply_overrides(PRINTED, ["precision=fp32"])


@pytest.mark.parametrize(
    ("recipe", "value", "said"),
    [
        (FAST, 91.9, "within (fast)"),
        (FAST, 89.9, "OUTSIDE (fast)"),
        ({**FAST, "precision": "fp32"}, 91.9, "within (views.pipeline=fast)"),
        (REFERENCE, 91.9, "within 1.5"),
        (None, 91.9, "within 1.5"),
        (None, 89.9, "OUTSIDE 1.5"),
    ],
)
@pytest.mark.parametrize("old_rows", [False, True])
def test_the_reproduction_gate_and_the_word_for_fast_pretraining(
    tmp_path, capsys, caplog, *, recipe, value, said, old_rows
):
    """The rows say it, and where they are older than the word the checkpoint's recipe does."""
    runs = tmp_path / "runs"
    pages = tmp_path / "md"
    row = a_result(value=value)
    told = {} if old_rows else fast.of_trunk({"recipe": recipe})
    row = a_result(value=value, provenance={**row.provenance, **told})
    store.append(runs, [row, a_result(dataset="cars", protocol="another-v1")])
    about = {"expected": [LORAC_KEY], "recipe": recipe}
    records.checkpoint_header(runs / "backbone.safetensors", "a" * 64, **about)
    csv_file = tmp_path / "x.csv"
    options = ["--check", "--csv", str(csv_file), "--markdown", str(pages)]
    with caplog.at_level("INFO", logger="backbench"):
        status = program.main(["leaderboard", str(runs), *options])
    assert status == ("OUTSIDE" in said)
    assert any(r.getMessage().startswith(said) for r in caplog.records), caplog.text
    out = capsys.readouterr().out
    page = (pages / "reproduction.md").read_text()
    assert f"1 published numbers judged, {status} outside" in out
    word = said.partition("(")[2].rstrip(")")
    assert (f"1 not to the letter ({word})" in out) == bool(word)
    assert (f"({word})" in page) == bool(word)
    assert said.split()[0].lower() in page
    name = "lorac (fast)" if recipe is FAST else "lorac"
    assert read_csv(csv_file)[0]["name"] == name
    assert f"\n{name} " in out
    assert program.main(["paper", "lorac:2", str(runs)]) == 0
    verdict = "outside" if status else "within"
    way = f" ({word})" if word else ""
    assert f"{value:.2f} {verdict}{way} (lorac)" in capsys.readouterr().out


def test_a_fast_trunk_is_no_seed_of_the_other_one_of_its_name(tmp_path):
    quick = fast.of_trunk({"recipe": FAST})
    rows = []
    for n, (beta, provenance) in enumerate([(2, {}), (4, {}), (2, quick), (4, quick)]):
        row = a_result(
            checkpoint=str(n) * 64, name=f"lorac beta={beta}", value=90.0 + n
        )
        rows.append(
            dataclasses.replace(row, provenance={**row.provenance, **provenance})
        )
    board = board_of(tmp_path, *rows)
    assert len(board.columns) == 1
    (found,) = ablation.find(board)
    assert {setting.name for setting in found.points} == {"lorac", "lorac (fast)"}
    assert all(len(rows) == 1 for rows in found.points.values())
    labels = sorted(board.labels().values())
    assert labels == [
        "lorac beta=2",
        "lorac beta=2 (fast)",
        "lorac beta=4",
        "lorac beta=4 (fast)",
    ]


LORAC_KEY = "lorac:2:lorac:resnet50:200"
WITHIN = a_result(value=91.9)
FEW = a_result(value=92.0)
FEW.provenance["images"]["test"] = 50


@pytest.mark.parametrize(
    ("key", "rows", "said"),
    [
        ("lorac:2:lorak:resnet50:200", [WITHIN], "no published row 'lorac:2:lorak"),
        (LORAC_KEY, [], "a check that judges nothing fails"),
        (LORAC_KEY, [a_result(value=float("nan"), ci95=None)], "is undefined"),
        (LORAC_KEY, [a_result(value=91.9, arch="resnet18")], "1 of another trunk"),
        (LORAC_KEY, [a_result(value=91.9, epochs=1)], "1 of another trunk"),
        (LORAC_KEY, [a_result(value=91.9, epochs=None)], "1 of another trunk"),
        (LORAC_KEY, [a_result(value=91.9, split="val")], "cifar10:val"),
        # On 50 test images: near the printed number, and no measurement of it
        (LORAC_KEY, [FEW], "not of linear/cifar10:test~n50000+50/top1@linear-lorac-v1"),
        (LORAC_KEY, [FEW], "1 could not be judged: a check that judges nothing fails"),
        (
            LORAC_KEY,
            [a_result(seed=s, value=91.8 if s else None) for s in range(3)],
            "linear/cifar10/top1@linear-lorac-v1 is undefined for 1 of 3 seeds",
        ),
    ],
)
def test_what_cannot_be_judged_fails_the_check(tmp_path, capsys, key, rows, said):
    other = a_result(dataset="digits", protocol="linear-demo-v1")
    store.append(tmp_path / "runs", [*rows, other])
    records.checkpoint_header(
        tmp_path / "runs" / "backbone.safetensors", "a" * 64, expected=[key]
    )
    assert program.main(["leaderboard", str(tmp_path / "runs"), "--check", "-q"]) == 1
    assert said in capsys.readouterr().out


def test_the_gate_reads_what_import_named_and_what_the_command_names(tmp_path):
    file = tmp_path / "elsewhere" / "x.safetensors"
    records.checkpoint_header(file, "a" * 64, published=LORAC_KEY)
    command = "backbench linear elsewhere/x.safetensors --datasets cifar10"
    board = board_of(
        tmp_path, a_result(origin={"command": command, "cwd": str(tmp_path)})
    )
    expected = expected_keys(board, [tmp_path / "runs"])
    assert expected == {"a" * 64: [LORAC_KEY]}
    judged = judge(board, expected)
    assert [(j.published, j.within) for j in judged] == [(91.8, True)]
    judge(board, {"a" * 64: ["lorac:2:lorak:resnet50:200"]})
    assert "did you mean 'lorac:2:lorac:resnet50:200'" in board.problems[-1]


def test_the_command_measures_in_a_folder_of_its_own():
    command = "backbench linear 'my file.safetensors' --data d --out {} --seed 1"
    made = a_result(origin={"command": command.format("runs/x")})
    assert command_again(made) == command.format("runs/again")
    detector = a_result(origin={"command": "python train_net.py --out=x OUTPUT_DIR x"})
    assert command_again(detector).endswith(" --out=runs/again OUTPUT_DIR runs/again")
    assert command_again(a_result()) is None


def test_tidy_has_a_row_per_number(tmp_path):
    board = board_of(tmp_path, a_result(chosen={"lr": 1.0}), a_result(seed=1))
    add_published(board)
    write_tidy(board, tmp_path / "results.csv")
    rows = read_csv(tmp_path / "results.csv")
    own = [r for r in rows if r["source"] == "measured"]
    values = [(r["seed"], r["value"], r["ci95_low"]) for r in own]
    assert values == [("0", "91.25", "90"), ("1", "91.25", "90")]
    assert json.loads(own[0]["chosen"]) == {"lr": 1.0}
    assert {(r["source"], r["split"]) for r in rows} == {
        ("measured", "test"),
        ("published", ""),
    }


def test_nothing_to_show_is_a_mistake(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    assert (
        program.main(
            ["leaderboard", str(tmp_path / "runs"), "--csv", str(tmp_path / "l.csv")]
        )
        == 2
    )
    assert "no results.jsonl below" in capsys.readouterr().err
    assert not (tmp_path / "l.csv").exists()
    with pytest.raises(BadInput, match="no such run folder"):
        collect([tmp_path / "nowhere"])


@pytest.mark.slow
def test_a_hundred_thousand_results_in_a_few_times_their_decoding(tmp_path):
    boards.many(tmp_path / "runs", 1000, 100)
    # The time of this process: other work on the machine is not counted.
    start = time.process_time()
    for file in store.files_below(tmp_path / "runs"):
        decoded = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(decoded) == 10_000
    decoding = time.process_time() - start
    start = time.process_time()
    board = collect([tmp_path / "runs"])
    write_csv(board, tmp_path / "leaderboard.csv")
    took = time.process_time() - start
    assert len(read_csv(tmp_path / "leaderboard.csv")) == 1000
    assert took < 5 * decoding


@pytest.mark.parametrize("highest", ["two", "three"])
def test_a_fit_that_has_not_converged_never_leads(tmp_path, highest):
    kind = ("logreg", "digits", "top1", "logreg-demo-v1", None)
    boards.synthetic(tmp_path / "runs", ["one", "two", "three"], [kind], gap=12)
    stopped = {"chosen": {"converged": False, "gradient": 3e-3, "l2": 1.0}}
    records.edit_lines(
        tmp_path / "runs",
        lambda line: line.update(stopped if line["name"] == highest else {}),
    )
    files = [f"--{kind}={tmp_path / kind}" for kind in ("html", "markdown", "latex")]
    assert program.main(["leaderboard", str(tmp_path / "runs"), *files, "-q"]) == 0
    board = collect([tmp_path / "runs"])
    digest = boards.digest_of(highest)
    marks = standing(board, board.columns[0])
    assert marks[digest] == "unsettled" and "best" not in marks.values()
    assert "3.0e-03" in board.cells[digest, board.columns[0]].note
    assert digest not in [row.checkpoint for row in overall(board)[0].rows]
    page = (tmp_path / "markdown" / "board.md").read_text()
    assert page.count("†") == 2 and "**" not in page.partition("Bold:")[2]
    assert "not converged" in (tmp_path / "html").read_text()
