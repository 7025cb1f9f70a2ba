"""The page: self-contained, safe, readable, and fast in a real browser."""

import dataclasses
import importlib.metadata
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support import boards
from support.records import a_result
from support.tab import CHROMIUM, tab

from backbench.board import page_records
from backbench.board.board import (
    PUBLISHED,
    Cell,
    Measurement,
    PairedDifference,
    Row,
    collect,
    fill,
)
from backbench.board.page import HERE, SCRIPTS, _newest_day, _Origins, write_page
from backbench.board.page_figures import CURVE_POINTS, collect_figures
from backbench.cli import program
from backbench.published.judge import Judged
from backbench.records import store
from backbench.stats.paired_differences import Difference


def data_of(page):
    script = r'<script type="application/json" id="[a-z]+">(.*?)</script>'
    texts = re.findall(script, page.read_text(), re.DOTALL)
    assert len(texts) == 2
    return json.loads(texts[0]) | json.loads(texts[1])


def browse(page, script="document.documentElement.outerHTML"):
    """What a script sees of the page in a browser, its own scripts having run."""
    with tab() as opened:
        opened.open(page, 1280)
        return opened.see(script)


# Sort the last column at once: when that was done, how long it took, and whether it is sorted
SORT = """(() => {
  const k = columns.length - 1, began = performance.now();
  sortBy(k);
  document.getElementById("board").offsetHeight;
  const done = performance.now(), list = sorted(measured).map(r => valueAt(k, r.i));
  const ok = list.every((v, i) => !i || list[i - 1] >= v);
  const loaded = performance.getEntriesByType("resource");
  const requests = loaded.filter(e => !e.name.startsWith("data:")).length;
  return {sorted_ms: done, sort_ms: done - began, ok, requests};
})()"""


def records(table):
    """The records of a table that the page holds as one list per field."""
    return [dict(zip(table, values)) for values in zip(*table.values(), strict=True)]


def test_the_page_asks_for_nothing(page):
    text = page.read_text()
    assert not re.findall(
        r'(?:src|href|action)\s*=\s*["\']?(?!#|data:|\$\{)[^"\'\s>]+', text
    )
    assert not re.findall(
        r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text
    )
    assert "default-src 'none'" in text


RECORDS = [
    kind
    for kind in vars(page_records).values()
    if dataclasses.is_dataclass(kind) and kind is not page_records.PageFigures
]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_the_scripts_read_every_field_of_the_records_by_its_name(kind):
    scripts = "\n".join((HERE / f"page_{name}.js").read_text() for name in SCRIPTS)
    # one.field, or a field of {one, another} that a statement takes apart
    taken_apart = re.findall(r"\{([\w, ]+)\}", scripts)
    read = {
        *re.findall(r"\.(\w+)", scripts),
        *re.findall(r"\w+", " ".join(taken_apart)),
    }
    # Columns that share a heading are told apart by these
    read |= set(re.findall(r'"(\w+)"', re.search(r"SETTING = .*", scripts)[0]))
    assert not {field.name for field in dataclasses.fields(kind)} - read


def test_the_page_holds_what_was_measured(runs, page):
    data = data_of(page)
    board = collect([runs])
    assert data["rows"]["name"] == [r.name for r in board.rows]
    assert data["columns"]["name"] == [c.name for c in board.columns]
    for column, cells in zip(board.columns, data["cells"], strict=True):
        assert len(cells["row"]) == 5
        for entry in records(cells):
            cell = board.cell(board.rows[entry["row"]], column)
            shown = [entry["value"], entry["low"], entry["high"]]
            assert shown == pytest.approx([cell.value, *cell.ci95], abs=1e-4)
    assert data["numbers"] == 70


def test_the_page_holds_the_paired_differences(runs, page):
    data = data_of(page)
    board = collect([runs])
    pairs = records(data["pairs"])
    assert len(pairs) == len(board.columns) * 10, "all pairs of five"
    for pair in pairs[::7]:
        assert pair["a"] < pair["b"]
        column = board.columns[pair["column"]]
        a, b = (board.cell(board.rows[pair[side]], column) for side in "ab")
        # A detector's difference is the mean over resamples, and not quite that of its values.
        assert pair["value"] == pytest.approx(a.value - b.value, abs=0.2)
        assert pair["low"] < pair["value"] < pair["high"]


def test_every_number_leads_to_a_command(page):
    data = data_of(page)
    texts = data["texts"]
    parts = records(data["parts"])
    wanted = {"chosen", "recipe", "manifest", "code", "versions", "hardware", "run"}
    for column in data["cells"]:
        for entry in records(column):
            assert entry["parts"]
            for n in entry["parts"]:
                keys = [texts[key] for key in data["keys"][parts[n]["keys"]]]
                values = [texts[value] for value in parts[n]["texts"]]
                about = dict(zip(keys, values, strict=True))
                assert about["command"].startswith("backbench ")
                assert about["command"].endswith("--out runs/again")
                assert wanted <= set(about)


def test_curves_and_pictures(page):
    data = data_of(page)
    # `two_steps` too has a log, but two points are no curve
    assert sorted(c["name"] for c in data["curves"]) == ["lorac", "moco_m", "simclr"]
    for curve in data["curves"]:
        assert len(curve["x"]) == len(curve["y"]["loss"]) <= CURVE_POINTS
        assert curve["x"][-1] == 999
    # LORAC's prior begins half-way; MoCo-M, the same recipe without a prior, has no such mark
    marks = {
        c["name"]: [(m["x"], m["text"]) for m in c["marks"]] for c in data["curves"]
    }
    assert marks == {"lorac": [(500, "prior on")], "moco_m": [], "simclr": []}
    assert len(data["pictures"]) == 5
    assert {(p["width"], p["height"]) for p in data["pictures"]} == {(720, 240)}
    for picture in data["pictures"]:
        assert picture["src"].startswith("data:image/webp;base64,")
        assert len(picture["src"]) < 100_000


def test_hostile_names_stay_text(tmp_path):
    name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>/*ORIGINS*/"
    store.append(tmp_path / "runs", [a_result(name=name, method=name)])
    board = collect([tmp_path / "runs"])
    boards.write_whole_page(board, tmp_path / "l.html", runs=[tmp_path / "runs"])
    assert name not in (tmp_path / "l.html").read_text()
    assert data_of(tmp_path / "l.html")["rows"]["name"] == [name]
    if CHROMIUM:
        shown = browse(tmp_path / "l.html")
        table = shown[shown.index('id="board"') : shown.index('id="more"')]
        assert "<img" not in table
        assert "&lt;img" in table


def test_the_verdict_is_the_gates_own(tmp_path):
    """Another trunk's number is not called outside a tolerance that it is within."""
    store.append(tmp_path / "runs", [a_result()])
    board = collect([tmp_path / "runs"])
    within = Judged(
        board.rows[0], board.columns[0], "paper:1:x", 91.0, 91.25, None, 1.0, "a CPU"
    )
    other = "arch <b>resnet18</b> instead of resnet50"
    judged = [
        within,
        replace(within, measured=80.0),
        replace(within, other_trunk=(other,)),
    ]
    page = tmp_path / "l.html"
    boards.write_whole_page(board, page, judged=[one.on_page() for one in judged])
    verdicts = ["within", "outside", "another"]
    assert [found["verdict"] for found in data_of(page)["judged"]] == verdicts
    if CHROMIUM:
        shown = browse(page)
        table = shown[shown.index('id="judged"') :]
        tags = re.findall(r'<span class="tag (\w+)">(\w+)</span>', table)
        assert tags == [("pos", "within"), ("neg", "outside"), ("neg", "another")]
        assert "arch &lt;b&gt;resnet18&lt;/b&gt; instead of resnet50" in table


def test_an_undefined_number_and_problems_are_shown(tmp_path):
    detected = {"task": "faster_rcnn", "metric": "bbox_AP", "engine": "torchvision"}
    rows = [a_result(checkpoint="a" * 64, value=None, ci95=None, **detected)]
    rows.append(a_result(checkpoint="b" * 64, value=3.0, **detected))
    store.append(tmp_path / "runs", rows)
    with (tmp_path / "runs" / "results.jsonl").open("a") as file:
        file.write("torn")
    html = tmp_path / "l.html"
    assert (
        program.main(["leaderboard", str(tmp_path / "runs"), "--html", str(html), "-q"])
        == 0
    )
    data = data_of(html)
    assert data["cells"][0]["value"] == [None, 3.0]
    assert "truncated line" in data["problems"][0]


def test_the_page_holds_each_row_column_and_note_as_the_board_has_them(tmp_path):
    held = {"image_contents": None, "pixels": {}, "trunk": {"parameters": 5, "side": 8}}
    origin = {"recorded": 200_000.0, "verified": 3, "lab": "north"}
    other = {"checkpoint": "b" * 64, "name": "y", "method": "m", "arch": "vit"}
    rows = [
        a_result(seed=0, value=70.12345, ci95=(69.0, 71.98765), provenance=held),
        a_result(seed=1, value=72.0, ci95=None, provenance=held, origin=origin),
        a_result(value=None, ci95=None, provenance=held, epochs=7, **other),
        a_result(metric="top5", value=90.0, provenance=held, epochs=7, **other),
    ]
    # Metrics that rank nobody stand beside one another
    for metric in ("ece", "nll"):
        about = {"task": "calibration", "metric": metric}
        rows.append(a_result(value=1.0, provenance=held, epochs=7, **other, **about))
    board = fill((Measurement(row, Path("run")) for row in rows), ["a problem"])
    board.rows.append(Row("paper:1", "y", "printed", "r50", 9, PUBLISHED))
    top5 = next(column for column in board.columns if column.metric == "top5")
    board.cells["paper:1", top5] = Cell(88.0)
    page = tmp_path / "l.html"
    pair = Difference(1.23456, (0.5, math.inf), 0.00123456, "images", 40)
    write_page(
        board,
        page,
        pairs=[PairedDifference(1, 0, 1, pair)],
        figures=collect_figures(board, []),
        answer=["One.", "Two."],
        sets=[],
        claims=["A claim."],
    )
    data = data_of(page)
    assert (data["answer"], data["claims"]) == (["One.", "Two."], ["A claim."])
    assert (data["problems"], data["numbers"], data["newest"]) == (
        ["a problem"],
        6,
        "1970-01-03",
    )
    assert data["version"] == importlib.metadata.version("backbench")
    assert data["tasks"]["calibration"] == "Calibration (less is better)"
    assert data["sizes"] == "APs, APm and APl: small, medium and large objects"
    x, y, printed = records(data["rows"])
    assert x == {
        "checkpoint": "a" * 64,
        "name": "x",
        "method": "simclr",
        "arch": "resnet18",
        "epochs": 2,
        "published": False,
        "label": "x",
        "labs": ["north"],
        "trained": None,
        # All trunks are of one size
        "cost": "",
        "hardware": "",
    }
    assert (y["label"], y["published"], y["epochs"]) == ("y", False, 7)
    assert (printed["label"], printed["published"]) == ("y", True)
    columns = {column["metric"]: column for column in records(data["columns"])}
    assert columns["top1"] == {
        "name": "linear/digits/top1@linear-demo-v1~unknown",
        "task": "linear",
        "dataset": "digits",
        "metric": "top1",
        "heading": "top-1",
        "decimals": 1,
        "ranks": True,
        "by_size": False,
        "protocol": "linear-demo-v1~unknown",
        "engine": None,
        "split": None,
        "measured": 1,
        "main": True,
        "noise": "not known: 1 degrees of freedom of the 4 that two checkpoints with"
        " `--seeds 3` give",
    }
    assert [columns[m]["main"] for m in ("top5", "ece", "nll")] == [False, True, True]
    assert [columns[m]["measured"] for m in ("top5", "ece")] == [1, 1]
    top1, of_top5, *_ = (records(cells) for cells in data["cells"])
    half = 12.7062 * (72.0 - 70.12345) / 2
    mean = (72.0 + 70.12345) / 2
    first = {"row": 0, "mark": "", "note": 1, "parts": [0, 1]}
    assert top1 == [
        {
            **first,
            "value": round(mean, 4),
            "low": pytest.approx(mean - half, abs=2e-4),
            "high": pytest.approx(mean + half, abs=2e-4),
        },
        {
            "row": 1,
            "value": None,
            "low": None,
            "high": None,
            "mark": "",
            "note": 0,
            "parts": [2],
        },
    ]
    assert [(one["row"], one["value"], one["parts"]) for one in of_top5] == [
        (1, 90.0, [3]),
        (2, 88.0, []),
    ]
    assert data["notes"] == ["", "mean of 2 seeds"]
    assert records(data["pairs"]) == [
        {
            "column": 1,
            "a": 0,
            "b": 1,
            "value": 1.2346,
            "low": 0.5,
            "high": None,
            "p": 0.00123,
            "real": True,
            "known": True,
            "paired": "images",
            "n": 40,
        }
    ]


def test_origins_hold_each_text_once_and_cut_what_is_long():
    origins = _Origins(longest=6)
    line = "backbench linear x --out runs/x"
    rows = [
        a_result(
            seed=seed,
            value=50.0 + seed,
            ci95=(1.0, 60.0),
            chosen=None,
            split="val",
            provenance={"b": "1234567", "a": {"z": 1, "y": 2}, "n": None},
            origin={"command": line, "verified": 2},
        )
        for seed in (1, 2)
    ]
    other = a_result(split="123456", ci95=None, chosen={"lr": 1}, provenance={})
    found = [origins.add(Measurement(row, Path("r"))) for row in (*rows, other)]
    assert found == [0, 1, 2]
    block = origins.block()
    texts = block.texts
    assert len(texts) == len(set(texts))
    parts = records(block.parts)
    told = []
    for part in parts:
        keys = [texts[key] for key in block.keys[part["keys"]]]
        told.append(
            dict(zip(keys, (texts[text] for text in part["texts"]), strict=True))
        )
    more = " ... (the whole is in the run folder)"
    assert (
        told[0]
        == told[1]
        == {
            "b": f"123456{more}",
            "a": f'{{"y": {more}',
            "command": "backbench linear x --out runs/again",
            "verified": f"value {more}",
            "run": "r",
        }
    )
    assert told[2] == {"chosen": f'{{"lr":{more}', "run": "r"}
    assert [texts[part["split"]] for part in parts] == ["val", "val", "123456"]
    assert [part["keys"] for part in parts] == [0, 0, 1]
    values = [
        (part["seed"], part["value"], part["low"], part["high"]) for part in parts
    ]
    assert values == [
        (1, 51.0, 1.0, 60.0),
        (2, 52.0, 1.0, 60.0),
        (0, 91.25, None, None),
    ]


@pytest.mark.parametrize(
    ("recorded", "day"),
    [
        ([], ""),
        ([None, 86_399.0], "1970-01-01"),
        ([86_400.0, 5.0], "1970-01-02"),
        # No calendar knows it
        ([5.0, 1e11], ""),
    ],
)
def test_the_day_of_a_page_is_that_of_its_newest_number(recorded, day):
    rows = [a_result(seed=n, provenance={}) for n in range(len(recorded))]
    for row, when in zip(rows, recorded):
        row.origin.update({} if when is None else {"recorded": when})
    board = fill(Measurement(row, Path("run")) for row in rows)
    assert _newest_day(board) == day


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.slow
def test_a_hundred_thousand_results_sort_within_two_seconds(tmp_path):
    boards.many(tmp_path / "runs", 1000, 100)
    board = collect([tmp_path / "runs"])
    boards.write_whole_page(board, tmp_path / "l.html", runs=[tmp_path / "runs"])
    size = (tmp_path / "l.html").stat().st_size / 1e6
    # Other work on the machine costs time
    probes = [browse(tmp_path / "l.html", SORT) for _ in range(3)]
    best = min(p["sorted_ms"] for p in probes)
    alone = min(p["sort_ms"] for p in probes)
    assert size < 20
    assert all(p["ok"] and p["requests"] == 0 for p in probes)
    load = os.getloadavg()[0]
    if (best >= 2000 or alone >= 1000) and load > (os.cpu_count() or 1):
        pytest.skip(
            f"{best / 1000:.1f} s with a load of {load:.0f}: the limit is for a machine that has a core free"
        )
    assert best < 2000
    assert alone < 1000
