"""Ablation curves, from results with known answers."""

import csv
from pathlib import Path
from xml.etree import ElementTree

from support.records import a_result

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
