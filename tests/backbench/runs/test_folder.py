"""Run folders, metrics and progress."""

import json

import pytest

from backbench.errors import BadInput
from backbench.runs.folder import PROGRESS_FILE, RUN_FILE, open_run
from backbench.runs.run_progress import Progress, seconds
from backbench.runs.step_metrics import Metrics, read_metrics
from backbench.runs.terminal import setup_logging

IDENTITY = {"recipe": {"optim": {"lr": 0.1}, "epochs": 3}, "data": "abc"}


def opened(out, verb="pretrain", **identity):
    """The folder, made or recognised, and closed again."""
    with open_run(out, verb=verb, identity=IDENTITY | identity) as run:
        return run


def test_a_run_folder_knows_its_run(tmp_path):
    out = opened(tmp_path / "a" / "b")
    assert opened(out) == out
    with pytest.raises(BadInput, match="holds a run of 'pretrain', not 'linear'"):
        opened(out, "linear")
    with pytest.raises(BadInput, match=r"recipe\.optim\.lr \(0\.1 there, 0\.2 now\)"):
        opened(out, recipe={"optim": {"lr": 0.2}, "epochs": 3})
    with pytest.raises(BadInput, match=r"data \(abc there, abd now\)"):
        opened(out, data="abd")


def test_the_first_difference_is_shown_and_the_others_are_named(tmp_path):
    out = opened(tmp_path / "run", text="x" * 50, null={"seed": None})

    def refused(**identity):
        same = {"text": "x" * 50, "null": {"seed": None}}
        with pytest.raises(BadInput) as error:
            opened(out, **same | identity)
        return str(error.value).removeprefix(f"{out}: holds another run's state ")

    other = {"recipe": {"optim": {"lr": 0.2}, "epochs": 3}, "data": "abd"}
    assert refused(**other) == (
        "(differs in data (abc there, abd now), recipe); choose another --out"
    )
    # Long values are cut, and a key that is missing is not one that is null
    cut = f"text ({'x' * 40} there, {'y' * 40} now)"
    assert refused(text="y" * 50) == f"(differs in {cut}); choose another --out"
    (out / "recipe.yaml").touch()
    assert refused(null={"more": 1, "seed": None}, new=2) == (
        "(differs in new (None there, 2 now), null); choose another --out, or continue it"
        f" with its own recipe, {out / 'recipe.yaml'}"
    )
    assert refused(null={}).startswith("(differs in null.seed (None there, None now));")


def test_a_file_or_a_damaged_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file"):
        opened(tmp_path / "file")
    out = opened(tmp_path / "run")
    (out / RUN_FILE).write_text("{")
    with pytest.raises(BadInput, match="damaged"):
        opened(out)


def test_metrics_drop_the_future_that_was_lost(tmp_path):
    metrics = Metrics(tmp_path)
    for step in range(5):
        metrics.write(step, loss=float(step))
    with metrics.path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    Metrics(tmp_path, from_step=3).write(3, loss=30.0)
    assert [row["loss"] for row in read_metrics(tmp_path)] == [0.0, 1.0, 2.0, 30.0]


def test_progress_says_how_far_and_how_long(tmp_path, capsys):
    setup_logging(0)
    progress = Progress(tmp_path, 10, "work", done=4)
    assert progress.eta == float("inf")
    for _ in range(6):
        progress.advance(loss=1.0)
    assert progress.eta == 0
    state = json.loads((tmp_path / PROGRESS_FILE).read_text())
    assert (state["done"], state["total"], state["eta_s"]) == (10, 10, 0.0)
    assert "work: 10/10 steps" in capsys.readouterr().err


def test_seconds():
    shown = [seconds(s) for s in (0.42, 75.2, 3675, float("inf"))]
    assert shown == ["0.4 s", "1:15", "1:01:15", "?"]


@pytest.mark.parametrize("measured", [False, True])
def test_a_refusal_takes_back_what_holds_no_measurement(tmp_path, measured):
    out = tmp_path / "lab" / "run"
    with (
        pytest.raises(BadInput, match="corrupt"),
        open_run(out, verb="linear", identity={"seed": 0}),
    ):
        (out / "manifests").mkdir()
        (out / "manifests" / "test.tsv").write_text("a\t0\n")
        if measured:
            (out / "results.jsonl").write_text("{}\n")
        raise BadInput("a.jpg: corrupt image")
    assert out.exists() == measured
    assert out.parent.exists() == measured


def test_a_refusal_leaves_a_run_that_had_begun(tmp_path):
    out = tmp_path / "run"
    with open_run(out, verb="linear", identity={"seed": 0}):
        pass
    with pytest.raises(BadInput), open_run(out, verb="linear", identity={"seed": 0}):
        raise BadInput("a.jpg: corrupt image")
    assert (out / "run.json").exists()
