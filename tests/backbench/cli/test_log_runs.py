"""`backbench log`: runs in TensorBoard's real reader, and in stand-ins of other loggers, once."""

import sys
import types
from unittest import mock

import pytest
from support.records import a_result

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
