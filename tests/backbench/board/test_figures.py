"""Ablation curves, from results with known answers."""

import base64
import csv
import hashlib
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from support import fake_verbs
from support.records import a_result

from backbench import charts
from backbench.board import ablation, page_figures
from backbench.board.board import Board, Measurement, fill
from backbench.records.store import Result


def row(digest, name, value, *, task="linear", metric="top1") -> Result:
    protocol = f"{task}-test-v1"
    where = {"task": task, "metric": metric, "protocol": protocol, "provenance": {}}
    return a_result(checkpoint=digest, name=name, value=value, ci95=None, **where)


def board_of(rows: list[Result]) -> Board:
    return fill(Measurement(r, Path("runs")) for r in rows)


def test_names_of_varied_recipes_are_read() -> None:
    assert ablation.parse("lorac demo beta=2.0") == ("lorac demo", {"beta": "2.0"})
    two = {"lam": "4", "temperature": "0.2"}
    assert ablation.parse("jcl lam=4 temperature=0.2") == ("jcl", two)
    listed = {"scale": "[0.2, 1.0]", "beta": "inf"}
    assert ablation.parse("x scale=[0.2, 1.0] beta=inf") == ("x", listed)
    assert ablation.parse("lorac") is None and ablation.parse("beta=2") is None


def test_the_curve_is_the_mean_over_seeds(tmp_path) -> None:
    rows = []
    for beta in ("inf", "0.5", "2", "16"):
        for tau in ("0.1", "0.2"):
            for seed in range(3):
                value = 50 + (5 if tau == "0.2" else 0) + seed
                digest = f"{beta}-{tau}-{seed}"
                name = f"lorac beta={beta} temperature={tau}"
                rows.append(row(digest, name, value))
                rows.append(
                    row(digest, name, 8.0, task="analyze", metric="nuclear_norm")
                )
    rows.append(row("other", "moco", 40.0))
    board = board_of(rows)
    (found,) = ablation.find(board)
    assert found.keys == ("beta", "temperature") and len(found.points) == 8
    (top1, norm) = ablation.columns(found, board)
    assert (top1.task, norm.task) == ("linear", "analyze")
    assert ablation.measure(found, board, top1)["lorac", ("2", "0.2")] == [
        55.0,
        56.0,
        57.0,
    ]
    ((title, svg),) = ablation.write(board, tmp_path)
    assert title == "lorac: beta and temperature"
    assert svg.exists() and svg.with_suffix(".png").exists()
    on_page = page_figures.collect_figures(board, []).figures
    assert [figure.title for figure in on_page] == [title]
    assert on_page[0].src.startswith("data:image/svg+xml;base64,")
    # The page keeps that much room before it has drawn the picture
    drawn = ElementTree.parse(svg).getroot()
    for side in ("width", "height"):
        points = float(drawn.get(side).removesuffix("pt"))
        assert getattr(on_page[0], side) == int(points)
    with svg.with_suffix(".csv").open() as file:
        lines = list(csv.DictReader(file))
    first = [
        line
        for line in lines
        if line["column"] == top1.name and line["temperature"] == "0.1"
    ]
    # By size, not by letter
    assert [line["beta"] for line in first] == ["0.5", "2", "16", "inf"]
    assert {line["mean"] for line in first} == {"51"} and {
        line["std"] for line in first
    } == {"1"}


def test_one_point_is_no_ablation(tmp_path) -> None:
    board = board_of([row("a", "lorac beta=2", 50.0), row("b", "moco", 40.0)])
    assert ablation.find(board) == []
    assert ablation.write(board, tmp_path) == []


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved: the name of a file -> the axes, the title and the legend."""
    figures = {}

    def save(figure, stem, legend=()):
        figures[stem.name] = figure.axes, figure.get_suptitle(), legend
        return stem.with_suffix(".svg")

    monkeypatch.setattr(charts, "save", save)
    return figures


def panels(axes):
    return [ax for ax in axes if ax.get_visible() and ax.get_title()]


def test_a_curve_has_bars_over_seeds_and_a_dot_for_each(tmp_path, drawn) -> None:
    rows = []
    for tau in ("0.1", "0.2"):
        for place, beta in enumerate(("2", "16", "inf")):
            for seed in range(3):
                if (tau, beta) != ("0.2", "16"):
                    value = 50 + 10 * place + seed
                    name = f"lorac beta={beta} tau={tau}"
                    rows.append(row(f"{beta}-{tau}-{seed}", name, value))
    ((title, _),) = ablation.write(board_of(rows), tmp_path)
    ((axes, heading, legend),) = drawn.values()
    assert title == "lorac: beta and tau"
    assert heading == f"{title} (mean and standard deviation over 3 seeds)"
    colors = charts.colors(2)
    assert legend == [("lorac tau=0.1", colors[0]), ("lorac tau=0.2", colors[1])]
    (ax,) = panels(axes)
    assert ax.get_title() == "linear, digits: top1"
    assert ax.get_xlabel() == "beta"
    assert ax.get_ylabel().startswith("linear-test-v1")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["2", "16", "inf"]
    first, second = (container.lines[0] for container in ax.containers)
    assert list(first.get_ydata()) == [51.0, 61.0, 71.0]
    assert list(second.get_ydata()) == [51.0, 71.0]
    # Two curves stand a little to the left and to the right, so that bars do not cover each other
    left, right = first.get_xdata()[0], second.get_xdata()[0]
    assert left == pytest.approx(-right) and 0 < right < 0.2
    assert list(second.get_xdata() - right) == pytest.approx([0, 2])
    (bars,) = ax.containers[0].lines[2]
    low, high = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((50.0, 52.0))
    dots = [line for line in ax.lines if line.get_marker() == "."]
    assert [list(line.get_ydata()) for line in dots[:2]] == [[50, 51, 52], [60, 61, 62]]


def test_one_seed_has_no_bar_and_says_so(tmp_path, drawn) -> None:
    rows = [
        row("a", "lorac beta=2", 50.0),
        row("b", "lorac beta=averylongvalueindeed", 60.0),
    ]
    ablation.write(board_of(rows), tmp_path)
    ((axes, heading, legend),) = drawn.values()
    assert heading == "lorac: beta (one seed)"
    assert [words for words, _ in legend] == ["lorac"]
    (ax,) = panels(axes)
    ticks = [tick.get_text() for tick in ax.get_xticklabels()]
    assert (
        ticks[0] == "2" and ticks[1].startswith("averylong") and ticks[1].endswith("…")
    )
    assert len(ticks[1]) == ablation.TICK
    (bars,) = ax.containers[0].lines[2]
    assert all(
        low == high for low, high in (part[:, 1] for part in bars.get_segments())
    )
    file = next(tmp_path.glob("*.csv"))
    with file.open() as lines:
        first, _ = csv.DictReader(lines)
    assert (first["seeds"], first["std"], first["values"]) == ("1", "", "50")


def test_accuracy_over_the_norm_is_the_last_panel(tmp_path, drawn) -> None:
    rows = []
    for beta, value, norm in (("2", 50.0, 8.0), ("16", 60.0, 9.0), ("inf", 70.0, None)):
        name = f"lorac beta={beta}"
        rows.append(row(beta, name, value))
        rows.append(row(beta, name, value + 20, metric="top5"))
        if norm is not None:
            rows.append(row(beta, name, norm, task="analyze", metric="nuclear_norm"))
        rows.append(row(beta, name, 0.5, task="analyze", metric="alignment"))
        rows.append(row(beta, name, 30.0, task="analyze", metric="rankme"))
    board = board_of(rows)
    ablation.write(board, tmp_path)
    ((axes, _, _),) = drawn.values()
    titles = [ax.get_title() for ax in panels(axes)]
    assert titles == [
        "linear, digits: top1",
        "analyze, digits: nuclear_norm",
        "analyze, digits: rankme",
        "linear over nuclear norm",
    ]
    last = panels(axes)[-1]
    assert (last.get_xlabel(), last.get_ylabel()) == ("nuclear norm", "top1")
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in last.lines]
    assert sorted(dots) == [(8.0, 50.0), (9.0, 60.0)]
    assert sorted(text.get_text() for text in last.texts) == ["16", "2"]
    # The csv has everything
    with next(tmp_path.glob("*.csv")).open() as lines:
        columns = {line["column"] for line in csv.DictReader(lines)}
    assert len(columns) == 5


def test_statistics_keep_two_panels_beside_many_accuracies() -> None:
    rows = []
    for beta in ("2", "16"):
        for number in range(12):
            rows.append(row(beta, f"x beta={beta}", 50.0, metric=f"top1_k{number}"))
        for metric in ("class_overlap", "rankme", "view_cosine", "alignment"):
            rows.append(row(beta, f"x beta={beta}", 1.0, task="analyze", metric=metric))
    board = board_of(rows)
    (found,) = ablation.find(board)
    chosen = ablation._panels(ablation.columns(found, board))
    assert len(chosen) == 8
    assert [c.metric for c in chosen if c.task == "analyze"] == [
        "view_cosine",
        "rankme",
    ]


def test_the_csv_of_an_ablation_has_every_point_of_every_column(
    tmp_path, drawn
) -> None:
    rows = []
    for name, beta, tau, values in (
        ("moco", "inf", "x", [50.0, 51.5]),
        ("moco", "2", "x", [40.25, None]),
        ("lorac", "10", "y", [1 / 3]),
        ("lorac", "10", "x", [70.0, 72.0, 77.0]),
    ):
        for seed, value in enumerate(values):
            digest = f"{name}{beta}{tau}{seed}"
            whole = f"{name} beta={beta} tau={tau}"
            rows.append(row(digest, whole, value))
            if beta != "2" and seed == 0:
                # Statistics stand behind accuracies
                rows.append(row(digest, whole, 5.0, task="analyze", metric="rankme"))
    rows.append(row("other", "moco beta=3", 9.0))
    board = board_of(rows)
    ((title, file),) = ablation.write(board, tmp_path)
    assert title == "lorac, moco: beta and tau"
    assert file.name == "ablation-lorac-moco-beta-and-tau.svg"
    top1 = "linear/digits/top1@linear-test-v1~unknown"
    rankme = "analyze/digits/rankme@analyze-test-v1~unknown"
    (text,) = (path.read_text() for path in tmp_path.glob("*.csv"))
    # The spread of 70, 72 and 77 is the root of 13
    assert text.splitlines() == [
        "name,beta,tau,column,seeds,mean,std,values",
        f"lorac,10,x,{top1},3,73,3.60555,70 72 77",
        f"lorac,10,y,{top1},1,0.333333,,0.333333",
        f"moco,2,x,{top1},1,40.25,,40.25",
        f"moco,inf,x,{top1},2,50.75,1.06066,50 51.5",
        f"lorac,10,x,{rankme},1,5,,5",
        f"lorac,10,y,{rankme},1,5,,5",
        f"moco,inf,x,{rankme},1,5,,5",
    ]
    ((axes, heading, legend),) = drawn.values()
    assert heading == f"{title} (mean and standard deviation over 3 seeds)"
    assert [words for words, _ in legend] == [
        "lorac tau=x",
        "lorac tau=y",
        "moco tau=x",
    ]
    accuracy, statistic = panels(axes)
    ticks = [tick.get_text() for tick in accuracy.get_xticklabels()]
    assert ticks == ["2", "10", "inf"]
    points = [container.lines[0] for container in accuracy.containers]
    assert [list(line.get_ydata()) for line in points] == [
        [73.0],
        [1 / 3],
        [40.25, 50.75],
    ]
    # Three curves share 0.12 of a tick around each place
    places = [list(line.get_xdata()) for line in points]
    assert places == [pytest.approx([0.94]), [1.0], pytest.approx([0.06, 2.06])]
    assert statistic.get_title() == "analyze, digits: rankme"
    assert [line.get_color() for line in points] == charts.colors(3)


def test_names_that_are_cut_to_one_are_told_apart_by_number(tmp_path, drawn) -> None:
    rows = []
    for key in ("one", "other"):
        for value in ("1", "2"):
            name = f"{'long ' * 30}{key}={value}"
            rows.append(row(f"{key}{value}", name, 50.0))
    written = ablation.write(board_of(rows), tmp_path)
    names = [file.name for _, file in written]
    assert len(set(names)) == 2
    assert names[1] == names[0].removesuffix(".svg") + "-1.svg"
    assert len(names[0]) <= 104 and names[0].startswith("ablation-long-long-")
    assert {file.parent for _, file in written} == {tmp_path}


def test_what_one_point_alone_has_is_no_column() -> None:
    rows = [row("a", "x beta=2", 50.0), row("b", "x beta=3", 60.0)]
    rows.append(row("a", "x beta=2", 70.0, metric="top5"))
    rows.append(row("b", "x beta=3", None, metric="top5"))
    board = board_of(rows)
    (found,) = ablation.find(board)
    assert [column.metric for column in ablation.columns(found, board)] == ["top1"]


# An analysis's own figures


def test_an_analysis_shows_its_overviews_on_the_page(tmp_path) -> None:
    run = tmp_path / "analyze"
    (run / "pictures").mkdir(parents=True)
    overviews = list(page_figures.OVERVIEWS.items())
    for name, _ in overviews[:2]:
        svg = '<svg viewBox="0 0 320.5 200.25"></svg>'
        (run / "pictures" / f"{name}.svg").write_text(svg)
    spaces = [{"name": "b"}, {"name": "a"}, {"name": "b"}]
    about = {"dataset": "digits", "spaces": spaces}
    (run / "analysis.json").write_text(json.dumps(about))
    result = row("a" * 64, "a", 8.0, task="analyze", metric="nuclear_norm")
    board = fill([Measurement(result, run), Measurement(row("a" * 64, "a", 5.0), run)])
    figures = page_figures.collect_figures(board, []).figures
    titles = [f"Features on digits: b, a ({note})" for _, note in overviews[:2]]
    assert [figure.title for figure in figures] == titles
    assert (figures[0].width, figures[0].height) == (320, 200)
    # The page goes without the figures of a run whose file is damaged
    for damaged in ("{", "{}", "[]", '{"spaces": 3}'):
        (run / "analysis.json").write_text(damaged)
        assert page_figures.collect_figures(board, []).figures == []


# Curves of a pretraining


def pretraining(folder, lines, **about):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"verb": "pretrain", **about}))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def test_curves_are_thinned_to_means(tmp_path) -> None:
    count = 4 * page_figures.CURVE_POINTS
    lines = [{"step": n, "loss": float(n), "epoch": n / 100} for n in range(count)]
    for n in (0, 1, 2, 3):
        lines[n]["rare"] = 1.0
    pretraining(tmp_path / "lorac", lines)
    (curve,) = page_figures.collect_figures(board_of([]), [tmp_path]).curves
    assert (curve.name, curve.row, curve.marks) == ("lorac", None, [])
    assert curve.x == list(range(3, count, 4))
    assert curve.y["loss"][:3] == [1.5, 5.5, 9.5]
    assert "rare" not in curve.y and "step" not in curve.y


def test_what_has_no_curve_is_left_out(tmp_path) -> None:
    lines = [{"step": n, "loss": 1.0} for n in range(50)]
    pretraining(tmp_path / "a", lines[:1])
    pretraining(tmp_path / "b", lines, verb="detect")
    pretraining(tmp_path / "c", [{"step": n} for n in range(50)])
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metrics.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in lines)
    )
    pretraining(tmp_path / "e", lines)
    found = page_figures.collect_figures(board_of([]), [tmp_path, tmp_path / "nowhere"])
    assert [curve.name for curve in found.curves] == ["e"]


def test_a_curve_has_its_checkpoints_name_and_the_step_of_its_prior(tmp_path) -> None:
    lines = [{"step": n, "loss": 1.0, "epoch": n / 10} for n in range(50)]
    for name, prior in (("with", "lorac"), ("without", "none")):
        method = {"prior": prior, "prior_from": 0.5}
        identity = {"recipe": {"method": method, "epochs": 4}}
        pretraining(tmp_path / name, lines, identity=identity)
    digest = hashlib.sha256(b"with").hexdigest()
    fake_verbs.write_checkpoint(tmp_path / "with" / "backbone.safetensors", "with")
    named = {"provenance": {"name": "its own name"}}
    file = tmp_path / "without" / "backbone.safetensors"
    fake_verbs.write_checkpoint(file, "without", **named)
    board = board_of([row("b" * 64, "other", 4.0), row(digest, "of the board", 5.0)])
    first, second = page_figures.collect_figures(board, [tmp_path]).curves
    assert first.name == board.labels()[digest]
    assert board.rows[first.row].checkpoint == digest
    assert [(mark.x, mark.text) for mark in first.marks] == [(20, "prior on")]
    assert (second.name, second.row, second.marks) == ("its own name", None, [])


def test_a_log_is_read_once_and_thinned_where_it_is_longer_than_the_page(
    tmp_path,
) -> None:
    count = page_figures.CURVE_POINTS
    lines = [{"step": n, "loss": 1.0, "epoch": n / 10} for n in range(count)]
    # Three means make a line, two do not; what is no number is left out of a mean
    for n in (4, 5, 9):
        lines[n] |= {"thrice": 2.0, "twice": 3.0}
    lines[9]["twice"] = float("nan")
    pretraining(tmp_path / "b", lines)
    pretraining(tmp_path / "a", [*lines, {"step": count, "loss": 3.12345678}])
    pretraining(tmp_path / "three", lines[:3])
    (tmp_path / "link").symlink_to(tmp_path / "b")
    runs = [tmp_path, tmp_path / "link"]
    long, short, three = page_figures.collect_figures(board_of([]), runs).curves
    assert [long.name, three.name] == ["a", "three"]
    assert short.x == list(range(count)) and short.y.keys() == {
        "loss",
        "epoch",
        "thrice",
    }
    found = {n: value for n, value in enumerate(short.y["thrice"]) if value is not None}
    assert found == {4: 2.0, 5: 2.0, 9: 2.0}
    # One line more than fits, so bins are of two
    assert long.x == [*range(1, count, 2), count]
    assert long.y["loss"][-2:] == [1.0, 3.1235]
    assert "thrice" not in long.y, "two bins have it"
    assert three.x == [0, 1, 2]


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ({"prior": "lorac", "prior_from": 0.25}, 10),
        ({"prior": "lorac", "prior_from": 0.26}, 11),
        ({"prior": "lorac", "prior_from": 0.0}, None),
        ({"prior": "none", "prior_from": 0.25}, None),
        ({"prior": "lorac"}, None),
    ],
)
def test_a_prior_begins_at_the_first_step_of_its_share_of_epochs(
    tmp_path, method, at
) -> None:
    lines = [{"step": n, "loss": 1.0, "epoch": n / 10} for n in range(40)]
    identity = {"recipe": {"method": method, "epochs": 4}}
    pretraining(tmp_path / "x", lines, identity=identity)
    (curve,) = page_figures.collect_figures(board_of([]), [tmp_path]).curves
    assert [mark.x for mark in curve.marks] == ([] if at is None else [at])


# Pictures


def test_the_first_picture_of_every_run_comes_before_the_second_of_any(
    tmp_path, monkeypatch
) -> None:
    detector = {"dataset": "cells", "metric": "bbox_AP", "protocol": "detect-v1"}
    of_masks = {"task": "mask_rcnn", "engine": "detectron2", **detector}
    rows = [
        a_result(name="zebra", checkpoint="a" * 64, provenance={}, **of_masks),
        a_result(name="ant", checkpoint="b" * 64, provenance={}, **of_masks),
        a_result(
            name="zebra",
            checkpoint="a" * 64,
            task="segmentation",
            dataset="voc",
            metric="miou",
            protocol="seg-v1",
            provenance={"picture": "maps/zebra.png"},
        ),
        # A row beside it shows nothing
        a_result(name="ant", checkpoint="b" * 64, provenance={}),
    ]
    runs = [tmp_path / f"run{number}" for number in range(len(rows))]
    sizes = {"1.png": (1440, 200), "2.jpg": (10, 6), "3.png": (8, 8), "4.txt": (4, 4)}
    for run in runs[:2]:
        (run / "pictures").mkdir(parents=True)
        for name, size in sizes.items():
            Image.new("RGB", size).save(run / "pictures" / name, "PNG")
    (runs[2] / "maps").mkdir(parents=True)
    Image.new("RGB", (2000, 1)).save(runs[2] / "maps" / "zebra.png")
    (runs[1] / "pictures" / "1.png").write_text("no image")
    board = fill(Measurement(row, run) for row, run in zip(rows, runs))
    found = page_figures.collect_figures(board, []).pictures
    masks = "Mask R-CNN, cells, detect-v1 + detectron2"
    alt = "{} on image {}: ground truth left, detected right"
    told = [(one.title, one.note, one.alt, one.width, one.height) for one in found]
    assert told == [
        ("zebra", masks, alt.format("Mask R-CNN of zebra", 1), 720, 100),
        (
            "zebra",
            "Segmentation, voc, seg-v1",
            alt.format("Segmentation of zebra", "zebra"),
            720,
            1,
        ),
        ("ant", masks, alt.format("Mask R-CNN of ant", 2), 10, 6),
        ("zebra", masks, alt.format("Mask R-CNN of zebra", 2), 10, 6),
    ]
    packed = base64.b64decode(found[0].src.removeprefix("data:image/webp;base64,"))
    assert Image.open(io.BytesIO(packed)).size == (720, 100)
    monkeypatch.setattr(page_figures, "MOST_PICTURES", 3)
    few = page_figures.collect_figures(board, []).pictures
    assert few == found[:3]


def test_a_strip_is_squeezed_to_ten_times_the_width_of_the_page(tmp_path) -> None:
    Image.new("RGB", (2, 9000)).save(tmp_path / "strip.png")
    small = page_figures._small_image(tmp_path / "strip.png")
    assert (small.width, small.height) == (2, 7200)


def test_as_many_analyses_are_shown_as_the_page_takes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(page_figures, "MOST_ANALYSES", 2)
    measurements = []
    for number in range(3):
        run = tmp_path / str(number)
        (run / "pictures").mkdir(parents=True)
        (run / "pictures" / "training.svg").write_text("<svg></svg>")
        about = {"dataset": f"set{number}", "spaces": [{"name": "trunk"}]}
        (run / "analysis.json").write_text(json.dumps(about))
        for metric in ("nuclear_norm", "rankme"):
            one = row(str(number) * 64, "a", 8.0, task="analyze", metric=metric)
            measurements.append(Measurement(one, run))
    (tmp_path / "0" / "analysis.json").write_text("{")
    (figure,) = page_figures.collect_figures(fill(measurements), []).figures
    assert figure.title == "Features on set1: trunk (training)"
    # A drawing that does not state its size has one of four to three
    assert (figure.width, figure.height) == (4, 3)
    assert base64.b64decode(figure.src.partition(",")[2]) == b"<svg></svg>"
