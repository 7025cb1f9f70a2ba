"""The page under real keys and clicks, on a desk and on a phone, in a real browser."""

import json
import re
import time

import pytest
from support import boards
from support.tab import CHROMIUM, tab

from backbench.board.board import collect

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

# How far a section's heading is from the window's top, once nothing moves any more
TOP = "Math.round(document.getElementById({name}).getBoundingClientRect().top)"
BOXES = """[...document.querySelectorAll({which})].map(e => {{
  const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }})"""
FOCUS = "document.activeElement.closest({which}) !== null"
ROWS = "document.querySelectorAll('#board tbody tr').length"
FIRST = "document.querySelector('#board tbody th').innerText.split('\\n')[0]"


@pytest.fixture(scope="module")
def browser():
    with tab() as opened:
        yield opened


def overlapping(browser, which):
    """How many boxes there are, and which of them cover another one."""
    found = browser.see(BOXES.format(which=json.dumps(which)))
    pairs = [(a, b) for n, a in enumerate(found) for b in found[:n]]
    beside = [(a, b) for a, b in pairs if a[0] < b[2] and b[0] < a[2]]
    return len(found), [(a, b) for a, b in beside if a[1] < b[3] and b[1] < a[3]]


def tab_to(browser, which, most=60):
    """Tab until the focus is there, as somebody without a mouse does."""
    for _ in range(most):
        browser.press("Tab")
        if browser.see(FOCUS.format(which=json.dumps(which))):
            return
    raise AssertionError(f"{which} is not reached by Tab")


SECTIONS = (
    "[...document.querySelectorAll('section')].filter(s => !s.hidden).map(s => s.id)"
)
DRAWN = {  # what a section draws -> how often, for five checkpoints of which three were pretrained
    "#curve-chart path": 3,
    "#rank-chart g.s": 5,
    "#transfer-chart circle": 5,
}


@pytest.mark.parametrize("width", [1280, 390])
def test_every_section_is_drawn_and_a_number_leads_to_its_command(browser, page, width):
    browser.open(page, width)
    wanted = {"table", "ranks", "transfer", "compare", "curves", "detections", "notes"}
    assert wanted <= set(browser.see(SECTIONS))
    browser.see("paintAll()")
    for which, count in DRAWN.items():
        assert (
            browser.see(f"document.querySelectorAll({json.dumps(which)}).length")
            == count
        )
    assert browser.see("document.querySelectorAll('.real').length") > 0
    browser.see(
        "document.querySelectorAll('#pictures img').forEach(i => { i.loading = 'eager'; })"
    )
    loaded = "[...document.querySelectorAll('#pictures img')].filter(i => i.naturalWidth).length"
    end = time.monotonic() + 10
    while browser.see(loaded) < 5:
        assert time.monotonic() < end, "a picture is not shown"
        time.sleep(0.05)
    browser.click(".v")
    assert "backbench" in browser.see(
        "document.querySelector('#detail .cmd').textContent"
    )
    assert browser.asked == []


def test_dark_and_light(browser, page):
    background = []
    for dark in (False, True):
        browser.open(page, 1280, dark=dark)
        color = browser.see("getComputedStyle(document.body).backgroundColor")
        background.append([int(part) for part in re.findall(r"\d+", color)[:3]])
    light, dark = background
    assert min(light) > 240 and max(dark) < 40


@pytest.mark.parametrize("width", [1280, 390])
def test_links_land_where_they_say(browser, page, width):
    browser.open(page, width)
    links = "[...document.querySelectorAll('#nav a')].map(a => a.getAttribute('href').slice(1))"
    sections = browser.see(links)
    assert {"table", "overall", "compare", "curves", "detections"} <= set(sections)
    for name in sections:
        browser.see("scrollTo(0, 0)")
        browser.click(f'#nav a[href="#{name}"]')
        # Pictures near the window are read in only now: what is above must not move.
        browser.see("new Promise(done => setTimeout(done, 50))")
        # The last sections cannot come up to the top
        left = browser.see(
            "document.documentElement.scrollHeight - innerHeight - scrollY"
        )
        top = browser.see(TOP.format(name=json.dumps(name)))
        assert 30 <= top <= (120 if left > 2 else 850), name
        assert browser.see("document.documentElement.scrollWidth") == width
        assert browser.see("location.hash") == f"#{name}"
    assert browser.asked == []


def test_the_keyboard_alone(browser, page):
    browser.open(page, 1280)
    # 1. The filter, by its key, and back
    browser.press("/", *"moco")
    assert browser.see("document.getElementById('filter').value") == "moco"
    assert browser.see(ROWS) == 2
    browser.press(*["Backspace"] * 4)
    assert browser.see(ROWS) == 5
    # 2. A heading sorts, and keeps the focus to sort the other way
    tab_to(browser, '.sort[data-k="0"]')
    browser.press("Enter")
    assert browser.see(FIRST) == "lorac"
    browser.press("Enter")
    assert browser.see(FIRST) == "random"
    assert browser.see("document.querySelector('[aria-sort]').ariaSort") == "ascending"
    # 3. All numbers are one stop; arrows go on from there
    tab_to(browser, ".v")
    browser.press("ArrowRight", "ArrowDown")
    where = "[document.activeElement.dataset.c, document.activeElement.parentElement.parentElement.rowIndex]"
    column, row = browser.see(where)
    assert (column, row) == ("1", 4)
    # 4. Its origin, and back to it
    browser.press("Enter")
    assert browser.see("document.getElementById('detail').open")
    assert browser.see(FOCUS.format(which='"#detail"'))
    browser.press("Escape")
    assert not browser.see("document.getElementById('detail').open")
    assert browser.see(where) == [column, row]
    assert browser.asked == []


def test_on_a_phone_filters_are_folded_and_opened_by_keys(browser, page):
    browser.open(page, 390)
    assert not browser.see("document.getElementById('filters').open")
    tab_to(browser, "#filters summary")
    browser.press("Enter")
    tab_to(browser, "#filter", most=2)
    browser.press(*"lorac")
    assert browser.see(ROWS) == 1
    assert browser.see("document.documentElement.scrollWidth") == 390
    seen = browser.see(
        "[...document.querySelectorAll('#board tbody tr:first-child td')]"
        ".filter(td => td.getBoundingClientRect().right <= innerWidth).length"
    )
    assert seen >= 3, "columns beside the names"
    # The intervals stand below their values, and every link of the navigation can be seen
    intervals = "[...document.querySelectorAll('#board .v small')]"
    assert browser.see(
        f"{intervals}.length > 3 && {intervals}.every(i => i.offsetHeight > 0)"
    )
    browser.see("scrollTo(0, document.documentElement.scrollHeight)")
    links = (
        "[...document.querySelectorAll('#nav a')].map(a => a.getBoundingClientRect())"
    )
    assert browser.see(f"{links}.every(r => r.left >= 0 && r.right <= innerWidth)")
    assert browser.see(f"{links}.every(r => r.top >= 0 && r.bottom <= innerHeight / 5)")
    assert not browser.see("document.getElementById('sideways').hidden")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A page of 24 checkpoints with values close together."""
    root = tmp_path_factory.mktemp("crowded")
    names = [f"trunk-{n:02}" for n in range(24)]
    boards.synthetic(
        root / "runs", names, boards.DEMO[:2], gap=0.3, images=200, kept=False
    )
    boards.write_whole_page(collect([root / "runs"]), root / "l.html")
    return root / "l.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_what_is_said_in_charts_can_be_read(browser, tmp_path, crowded, page, width):
    browser.open(crowded, width)
    count, hit = overlapping(browser, "#transfer-chart text.name")
    assert count >= 8
    assert hit == []
    text = page.read_text()
    marked = text.replace('"marks":[]', '"marks":[{"x":500,"text":"prior on"}]')
    assert marked.count('"prior on"') == 3
    (tmp_path / "marked.html").write_text(marked)
    browser.open(tmp_path / "marked.html", width)
    assert overlapping(browser, "#curve-chart text.marked") == (3, [])


def test_pictures_have_their_room_before_they_are_read(browser, page):
    browser.open(page, 1280)
    heights = browser.see(
        "[...document.querySelectorAll('#pictures img')].map(i => { i.src = ''; "
        "return i.getBoundingClientRect().height / i.getBoundingClientRect().width; })"
    )
    assert heights == pytest.approx([1 / 3] * 5, abs=0.01)
