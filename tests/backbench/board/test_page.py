"""The page: self-contained, safe, readable, and fast in a real browser."""

import dataclasses
import json
import os
import re
from dataclasses import replace

import pytest
from support import boards
from support.records import a_result
from support.tab import CHROMIUM, tab

from backbench.board import page_records
from backbench.board.board import collect
from backbench.board.page import HERE, SCRIPTS
from backbench.board.page_figures import CURVE_POINTS
from backbench.cli import program
from backbench.published.judge import Judged
from backbench.records import store


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
