"""benchmarks/waits.py: today's code and an earlier one wait for the same things, in turns."""

import json
import re
import subprocess
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.syspath_prepend(HOME / "benchmarks")
    import waits

    return waits


def test_both_codes_take_turns_and_the_least_seconds_stand(waits, tmp_path):
    seen = []
    seconds = iter([8.0, 4.0, 2.0, 6.0, 5.0, 1.0])

    def wait(tree, folder):
        assert (folder / "made").exists()
        seen.append(tree)
        return {"a part": next(seconds)}

    work = waits.Waiting(
        "a work",
        make=lambda folder: (folder / "made").touch(),
        wait=wait,
        plain=lambda folder: wait(None, folder),
    )
    before = tmp_path / "before"
    lines = waits.compare(work, before, tmp_path, turns=2)
    assert seen == [None, before, waits.HOME] * 2
    title, line = lines
    assert title == "a work"
    assert "now   1.00 s" in line
    assert "before   4.00 s (4.00x)" in line
    assert "a plain script   6.00 s (6.00x)" in line


def test_what_was_stopped_is_no_time(waits, monkeypatch, tmp_path):
    monkeypatch.setattr(waits, "LIMIT_S", 0.2)
    seconds, printed = waits.run_in(
        HOME, ["-c", "import time; time.sleep(60)"], tmp_path
    )
    assert (seconds, printed) == (waits.STOPPED, "")
    assert waits.against(seconds, 0.1) == "over 0.2 s (over 2.00x)"


def test_a_fault_is_no_time_either_and_a_refusal_is(waits, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        waits.run_in(HOME, ["-c", "raise SystemExit('broken')"], tmp_path)
    assert waits.verb(HOME, tmp_path, "inspect", "absent.pth") < waits.LIMIT_S


def test_a_process_takes_the_code_of_its_tree(waits, tmp_path):
    """Its own package comes before the one that is installed."""
    package = tmp_path / "tree" / "backbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("AGE = 'earlier'\n")
    show = ["-c", "import backbench; print(backbench.AGE)"]
    assert waits.run_in(tmp_path / "tree", show, tmp_path)[1] == "earlier\n"


def test_the_files_of_a_commit_are_written_out(waits, monkeypatch, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").write_text("first")
    person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run(["git", *person, *words], cwd=home, check=True)
    (home / "file").write_text("second")
    monkeypatch.setattr(waits, "HOME", home)
    tree = waits.tree_of("HEAD", tmp_path)
    assert (tree / "file").read_text() == "first"


def test_hostile_files_are_what_they_are_called(waits, tmp_path):
    waits.make_hostile(tmp_path)
    content = (tmp_path / "names.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert len(json.loads(content[8 : 8 + length])) == 300_000
    assert 5e6 < (tmp_path / "steps.pth").stat().st_size < 7e6


def test_the_page_holds_the_last_run(waits, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(waits.PAGE.read_text())
    monkeypatch.setattr(waits, "PAGE", page)
    waits.write_page(["a machine", "a work"])
    above, block, below = re.split("```text\n|```\n", page.read_text(), maxsplit=2)
    assert block == "a machine\na work\n"
    whole = (HOME / "docs" / "benchmarks.md").read_text()
    assert whole.startswith(above) and whole.endswith(below)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "unknown: nothing; take evaluate"),
        (["--data", "/none"], "--data /none: no folder with train and test"),
        (["--before", "no-such-commit"], "no commit of this clone"),
    ],
)
def test_words_that_mean_nothing_are_refused_in_a_line(
    waits, monkeypatch, capsys, words, says
):
    monkeypatch.setattr("sys.argv", ["waits.py", *words])
    with pytest.raises(SystemExit) as ended:
        waits.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
