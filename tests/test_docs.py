"""The documentation: links, API and generated pages are current; the built site; the notebook."""

import csv
import importlib
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import backbench
from backbench import plugins
from backbench.untrusted import yamls

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / n for n in ("README.md", "CONTRIBUTING.md")),
]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As mkdocs (and GitHub) make them of headings."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    """Files and headings of this repository; other hosts are not asked."""
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
        # A page of the site may lead to its own files only
        elif page.parent == DOCS and not target.is_relative_to(DOCS):
            broken.append(f"{link} (not on the site)")
    assert not broken


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading\n[a](#one-heading) [b](#two) [c](none.md) `[d](e.md)`\n"
    )
    with pytest.raises(AssertionError, match=r"#two.*none\.md"):
        test_every_link_leads_somewhere(page)


def test_every_page_is_in_the_sites_contents():
    listed = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_python_page_names_everything_that_is_exported():
    page = (DOCS / "python.md").read_text()
    errors = [
        "backbench.errors." + name for name in ("BadInput", "Failed", "Preempted")
    ]
    exported = [
        f"backbench.{name}" for name in backbench.__all__ if name != "Checkpoint"
    ]
    missing = [
        name
        for name in [*errors, *exported, "backbench.Checkpoint"]
        if name not in page
    ]
    assert not missing


def test_the_python_page_explains_every_keyword_of_evaluate():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "python.md").read_text(), re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    parameters = inspect.signature(backbench.evaluate).parameters
    keywords = {
        name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY
    }
    assert keywords <= explained


def test_what_is_exported_says_what_it_is():
    for name in backbench.__all__:
        thing = getattr(backbench, name)
        assert inspect.getdoc(thing), name
        methods = vars(thing).items() if inspect.isclass(thing) else ()
        for method, code in methods:
            if inspect.isfunction(code) and not method.startswith("_"):
                assert inspect.getdoc(code), f"{name}.{method}"


def test_the_page_on_additions_names_every_entry_point_and_its_contract():
    page = (DOCS / "add.md").read_text()
    groups = {plugins.METHODS, plugins.DATASETS, plugins.FORMATS, plugins.TRUNKS}
    assert groups <= set(re.findall(r"backbench\.\w+", page))
    for module, name in re.findall(
        r"# an? (backbench\.[\w.]+)\.(\w+) of that name", page
    ):
        assert hasattr(importlib.import_module(module), name)


def test_the_page_of_protocols_is_current():
    made = runpy.run_path(str(ROOT / "tools" / "protocols_page.py"))
    current = made["PAGE"].read_text() == made["text"]()
    assert current, "run `python tools/protocols_page.py` and commit docs/protocols.md"


def test_nothing_of_the_site_comes_from_elsewhere():
    """No font, script or style of another host; the theme's own fonts would be Google's."""
    text = re.sub(r"(?m)^\s*#.*$|  #.*$", "", (ROOT / "mkdocs.yml").read_text())
    assert yamls.decode(text)["theme"]["font"] is False
    assert not re.search(r"https?://", text)
    assert not re.search(r"url\(|@import", (DOCS / "site.css").read_text())


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="no mkdocs: `make docs`"
)
def test_the_site_is_built_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")], check=True, cwd=ROOT
    )
    pages = list((tmp_path / "site").glob("*.html"))
    assert len(pages) == len(list(DOCS.glob("*.md"))) + 1  # and 404
    for page in pages:
        assert not re.findall(
            r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', page.read_text()
        )


@pytest.mark.slow
def test_the_notebook_goes_from_a_module_to_the_table(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("BACKBENCH_NOTEBOOK", str(tmp_path / "work"))
    notebook = nbformat.read(ROOT / "notebooks" / "module_to_table.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=550, resources=where).execute()
    with (tmp_path / "work" / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["name"] for r in rows] == ["first", "second"]
    values = [float(r[column]) for r in rows for column in r if "/" in column]
    assert len(values) == 4  # two checkpoints, k 5 and 20
    assert all(0 < v <= 100 for v in values)
    assert (tmp_path / "work" / "leaderboard.html").stat().st_size > 20_000
    outputs = [
        out
        for cell in notebook.cells
        if cell.cell_type == "code"
        for out in cell.outputs
    ]
    printed = "".join(out.get("text", "") for out in outputs)
    assert "difference" in printed
    assert any("text/html" in out.get("data", {}) for out in outputs)
