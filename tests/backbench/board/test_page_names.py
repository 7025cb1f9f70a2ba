"""Names on the page: of checkpoints beside their numbers and curves, and of columns alike."""

import pytest
from support import boards, small_boards
from support.small_boards import Kind, bare
from support.tab import CHROMIUM, tab

from backbench.board.board import collect

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser():
    with tab() as opened:
        yield opened


LONG = "lorac_resnet50_imagenet_400ep_batch4096_seed0"


@pytest.fixture(scope="module")
def scattered(tmp_path_factory):
    """A page of checkpoints with long names and numbers in some columns each: in two groups, with
    two columns of one task and dataset, and one number that nothing was kept of."""
    root = tmp_path_factory.mktemp("scattered")
    near: Kind = ("knn", "cifar", "top1_k20", "knn-v1", None)
    small: Kind = ("knn", "cifar", "top1_k20", "knn-32px-v1", None)
    few: Kind = ("fewshot", "cifar", "top1", "fewshot-v1", None)
    probe: Kind = ("linear", "cifar", "top1", "linear-lorac-v1", None)
    regression: Kind = ("logreg", "cifar", "top1", "logreg-v1", None)
    table = {
        LONG: {near: 80, probe: 75, few: 60, regression: 81},
        "simclr": {near: 75, few: 64, regression: 72, small: 60},
        "within": {regression: 70, small: 66},
        "bare": {near: bare(85), regression: 60},
        "random": {near: 30, probe: 25, few: 20, regression: 30, small: 20},
    }
    small_boards.write(root / "runs", table)
    boards.write_whole_page(collect([root / "runs"]), root / "l.html")
    return root / "l.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_names_take_a_quarter_of_the_table_at_most(browser, scattered, width):
    browser.open(scattered, width)
    shares = browser.see(
        "[...document.querySelectorAll('#board .first')].map(e =>"
        " e.getBoundingClientRect().width / document.getElementById('frame').clientWidth)"
    )
    assert len(shares) >= 6
    assert max(shares) <= 0.25 + 0.005
    shown = browser.see(
        "[...document.querySelectorAll('#board tbody .first')].map(e => e.innerText)"
    )
    assert any(LONG in text.replace("\n", "") for text in shown)
    # Nothing of a name is behind the numbers
    assert browser.see(
        "[...document.querySelectorAll('#board .first')].every(e =>"
        " e.scrollWidth <= e.clientWidth + 1)"
    )


CROSSINGS = """[...document.querySelectorAll('#rank-chart text.name')].filter(text => {
  const box = text.getBoundingClientRect();
  return [...document.querySelectorAll('#rank-chart path.line')].some(path => {
    const where = path.getScreenCTM();
    for (let at = 0; at <= path.getTotalLength(); at += 2) {
      const point = path.getPointAtLength(at).matrixTransform(where);
      const beside = point.x > box.left && point.x < box.right;
      if (beside && point.y > box.top + 3 && point.y < box.bottom - 3) return true;
    }
    return false;
  });
}).map(text => text.textContent)"""


@pytest.mark.parametrize("width", [1280, 390])
def test_no_curve_crosses_a_name(browser, scattered, width):
    browser.open(scattered, width)
    names = browser.see(
        "[...document.querySelectorAll('#rank-chart text.name')].map(t => t.textContent)"
    )
    assert "within" in names and "random" in names
    assert browser.see(CROSSINGS) == []


def test_the_answer_has_its_commands_and_columns_their_protocols(browser, scattered):
    browser.open(scattered, 1280)
    said = browser.see("document.getElementById('answer').innerText")
    assert "othing kept to test or rank: bare in Nearest neighbours" in said
    commands = browser.see(
        "[...document.querySelectorAll('#answer code')].map(e => e.textContent)"
    )
    assert len(commands) == 1 and commands[0].endswith("--seeds 3")
    axes = browser.see(
        "[...document.querySelectorAll('#rank-chart text')].map(t => t.textContent)"
    )
    assert "knn-32px-v1" in axes and "knn-v1" in axes and "fewshot-v1" not in axes


NUMBERS = [  # value, decimals, what is shown
    (71.254, 2, "71.25"),
    (100, 2, "100.0"),
    (1234.56, 1, "1235"),
    (12345.6, 1, "12350"),
    (0.12345, 2, "0.12"),
    (-3.14159, 4, "-3.142"),
    (0, 1, "0.0"),
]


def test_a_number_has_four_digits_at_most(browser, scattered):
    browser.open(scattered, 1280)
    for value, decimals, shown in NUMBERS:
        assert browser.see(f"num({value}, {decimals})") == shown
