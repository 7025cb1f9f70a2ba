"""`backbench log`: runs in TensorBoard's real reader, and in stand-ins of other loggers, once."""

import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from support.records import a_result

from backbench.cli import log as loggers
from backbench.cli import program
from backbench.records import store
from backbench.runs.step_metrics import Metrics


@pytest.fixture
def runs(tmp_path):
    run = tmp_path / "runs" / "pretrain"
    run.mkdir(parents=True)
    metrics = Metrics(run, from_step=0)
    for step in (0, 10):
        metrics.write(step, loss=4.0 - step / 10, lr=0.1)
    metrics.write(float("inf"), loss=1.0)  # no logger is sent a step that is none
    (run / "recipe.yaml").write_text("name: mine\nepochs: 2\n")
    store.append(tmp_path / "runs" / "linear", [a_result(value=91.25)])
    return tmp_path / "runs"


def log(runs, to):
    return program.main(["log", str(runs), "--to", to])


def scalars(folder):
    module = "tensorboard.backend.event_processing.event_accumulator"
    event_accumulator = pytest.importorskip(module)
    read = event_accumulator.EventAccumulator(str(folder))
    read.Reload()
    scalars = {name: read.Scalars(name) for name in read.Tags()["scalars"]}
    return {
        name: [(e.step, round(e.value, 4)) for e in es] for name, es in scalars.items()
    }


def test_tensorboard_shows_steps_and_numbers_once(runs, caplog):
    for _ in range(2):
        assert log(runs, "tensorboard") == 0
    assert "has all of it already" in caplog.text
    steps = scalars(runs / "pretrain" / "tensorboard")
    assert steps["loss"] == [(0, 4.0), (10, 3.0)]
    numbers = scalars(runs / "linear" / "tensorboard")
    assert list(numbers.values()) == [[(0, 91.25)]]
    # What is new is sent by the next call, and nothing else
    Metrics(runs / "pretrain", from_step=20).write(20, loss=1.0, lr=0.1)
    assert log(runs, "tensorboard") == 0
    assert scalars(runs / "pretrain" / "tensorboard")["loss"] == [
        (0, 4.0),
        (10, 3.0),
        (20, 1.0),
    ]


def logger(name):
    """A package that takes every call, and notes it."""
    module = mock.MagicMock(__spec__=types.SimpleNamespace(name=name))
    module.search_runs.return_value = []
    return module


@pytest.mark.parametrize("to", ["wandb", "mlflow", "trackio"])
def test_the_others_are_called_for_every_step_and_number(runs, monkeypatch, to):
    module = logger(to)
    monkeypatch.setitem(sys.modules, to, module)
    for _ in range(2):
        assert log(runs, to) == 0
    said = repr(module.mock_calls)
    assert (
        said.count("'loss': 4.0")
        == said.count("'loss': 3.0")
        == said.count("91.25")
        == 1
    )
    assert "mine" in said and "linear" in said


STEPS = [(3, {"loss": 1.0}), (7, {"loss": 0.5, "lr": 0.1})]


def sent_to(to, monkeypatch, *, known=(), **changes):
    """The calls by which a logger is sent a run."""
    module = logger(to)
    module.search_runs.return_value = list(known)
    monkeypatch.setitem(sys.modules, to, module)
    about = {
        "folder": Path("runs/a"),
        "name": "a",
        "id": "0123",
        "config": {"epochs": 2, "text": "x" * 600},
        "steps": STEPS,
        "numbers": {"linear/top1@v1": 91.0, "knn": 80.0},
    }
    run = loggers.LoggedRun(**about | changes)
    loggers.LOGGERS[to](run)
    return run, module.mock_calls


def test_wandb_continues_a_run_by_its_number(monkeypatch):
    run, calls = sent_to("wandb", monkeypatch)
    started = {"project": "backbench", "name": "a", "id": "0123", "resume": "allow"}
    assert calls == [
        mock.call.init(**started, config=run.config, dir=run.folder),
        mock.call.init().log({"loss": 1.0}, step=3),
        mock.call.init().log({"loss": 0.5, "lr": 0.1}, step=7),
        mock.call.init().summary.update(run.numbers),
        mock.call.init().finish(),
    ]


def test_mlflow_is_told_a_runs_recipe_once(monkeypatch):
    """A run is found by our tag; its parameters are never logged again."""
    values = [
        mock.call.log_metrics({"loss": 1.0}, step=3),
        mock.call.log_metrics({"loss": 0.5, "lr": 0.1}, step=7),
        mock.call.log_metric("linear/top1_v1", 91.0),
        mock.call.log_metric("knn", 80.0),
    ]
    looked = [
        mock.call.set_experiment("backbench"),
        mock.call.search_runs(
            filter_string="tags.backbench = '0123'", output_format="list"
        ),
    ]
    _, calls = sent_to("mlflow", monkeypatch)
    assert [call for call in calls if "__" not in call[0]] == [
        *looked,
        mock.call.start_run(run_name="a"),
        mock.call.set_tag("backbench", "0123"),
        mock.call.log_params({"epochs": "2", "text": "x" * 500}),
        *values,
    ]
    there = types.SimpleNamespace(info=types.SimpleNamespace(run_id="theirs"))
    _, calls = sent_to("mlflow", monkeypatch, known=[there, None])
    assert [call for call in calls if "__" not in call[0]] == [
        *looked,
        mock.call.start_run(run_id="theirs"),
        *values,
    ]


@pytest.mark.parametrize("numbers", [{}, {"knn": 80.0}])
def test_trackio_is_sent_numbers_only_where_there_are_some(monkeypatch, numbers):
    run, calls = sent_to("trackio", monkeypatch, numbers=numbers)
    started = {"project": "backbench", "name": "a", "resume": "allow"}
    assert calls == [
        mock.call.init(**started, config=run.config),
        mock.call.log({"loss": 1.0}, step=3),
        mock.call.log({"loss": 0.5, "lr": 0.1}, step=7),
        *([mock.call.log(numbers)] if numbers else []),
        mock.call.finish(),
    ]


ROWS = [
    a_result(checkpoint="a" * 64, value=11.0),
    a_result(checkpoint="b" * 64, value=12.0),
    a_result(checkpoint="b" * 64, value=13.0, seed=1),
    a_result(checkpoint="c" * 64, name="y", value=14.0),
    a_result(checkpoint="a" * 64, value=15.0, protocol="mine~1"),
    a_result(checkpoint="a" * 64, value=16.0, protocol="mine+1"),
]


@pytest.mark.parametrize("to", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_checkpoints_of_one_name_seeds_and_protocols_are_numbers_of_their_own(
    tmp_path, monkeypatch, to
):
    store.append(tmp_path / "r", ROWS[:1])
    store.append(tmp_path / "r", ROWS)
    if to == "tensorboard":
        assert log(tmp_path / "r", to) == 0
        shown = scalars(tmp_path / "r" / "tensorboard")
        values = [value for ((_, value),) in shown.values()]
    else:
        module = logger(to)
        monkeypatch.setitem(sys.modules, to, module)
        assert log(tmp_path / "r", to) == 0
        sent = {}
        for call in (module.init().summary.update, module.log):
            for (numbers,), _ in call.call_args_list:
                sent |= numbers
        for (name, value), _ in module.log_metric.call_args_list:
            sent[name] = value
        values = list(sent.values())
    assert sorted(values) == [row.value for row in ROWS]


def test_a_logger_that_is_not_installed_is_named(runs, monkeypatch, bad_input):
    monkeypatch.setitem(sys.modules, "wandb", None)
    bad_input(log(runs, "wandb"), "pip install wandb")


def test_all_folders_that_are_named_are_sent(tmp_path, monkeypatch, caplog):
    names = []
    monkeypatch.setitem(
        loggers.LOGGERS, "tensorboard", lambda run: names.append(run.name)
    )
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        store.append(root / f"of {root.name}", [a_result(provenance={})])
    words = ["log", *map(str, roots), "--to", "tensorboard"]
    for told in ("2 runs sent to tensorboard", "tensorboard has all of it already"):
        caplog.clear()
        assert program.main(words) == 0
        assert caplog.messages[-1] == told
    assert names == ["of a", "of b"]


def test_a_folder_without_runs_is_named(tmp_path, bad_input):
    bad_input(log(tmp_path, "tensorboard"), str(tmp_path))


def test_a_logger_that_fails_is_one_line_and_is_asked_again(runs, monkeypatch, capfd):
    module = logger("wandb")
    module.init.side_effect = ZeroDivisionError
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert log(runs, "wandb") == 1
    said = capfd.readouterr().err
    assert "wandb refused it" in said and "fault" not in said
    assert not list(runs.rglob("logged.json"))


@pytest.mark.parametrize(
    "of_tensorboard",
    [
        None,
        '"x"',
        '{"step": 1}',
        '{"step": "a", "numbers": []}',
        '{"step": 1e999, "numbers": []}',
        '{"step": 1, "numbers": 3}',
        "}",
    ],
)
def test_a_damaged_note_is_named(runs, bad_input, of_tensorboard):
    note = f'{{"tensorboard": {of_tensorboard}}}' if of_tensorboard else "[1]"
    (runs / "linear" / "logged.json").write_text(note)
    bad_input(
        log(runs, "tensorboard"), "logged.json: damaged; remove it to send all again"
    )


def test_a_score_of_the_last_step_that_comes_later_is_sent(runs):
    """A pretraining's kNN score has the number of a step whose loss was sent minutes before."""
    assert log(runs, "tensorboard") == 0
    Metrics(runs / "pretrain", from_step=20).write(10, knn_top1=55.5)
    for _ in range(2):
        assert log(runs, "tensorboard") == 0
    steps = scalars(runs / "pretrain" / "tensorboard")
    assert steps["knn_top1"] == [(10, 55.5)]
    assert steps["loss"] == [(0, 4.0), (10, 3.0)]
