"""Which rows an evaluation returns, what it says of them, and which program makes each run."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.records import a_result

from backbench.board.board import Measurement, fill
from backbench.evaluation import measure as measuring
from backbench.evaluation.api import Results
from backbench.evaluation.plan import EvaluationPlan, PlannedRun
from backbench.evaluation.wanted import parse_task
from backbench.records import store
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.detect import DetectRequest
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.probe import LinearRequest, OodRequest

A, B = "a" * 64, "b" * 64


def a_plan(tmp_path, texts, *, seed=0):
    wanted = tuple(parse_task(text) for text in texts)
    points = (SimpleNamespace(digest=A), SimpleNamespace(digest=B))
    return EvaluationPlan(
        root=tmp_path, out=tmp_path, seed=seed, wanted=wanted, checkpoints=points
    )


def run_of(plan, place, name, request=None):
    run = PlannedRun(plan.wanted[place], request, (), plan.out / name)
    plan.runs.append(run)
    return run


def test_rows_are_those_of_the_tasks_in_their_order(tmp_path, caplog):
    texts = ["knn/digits@knn_demo", "calibration/digits", "logreg/digits@logreg_demo"]
    plan = a_plan(tmp_path, texts, seed=1)
    # 1. Two runs of the last task, planned before the first one's
    first = run_of(plan, 2, "logreg-1")
    second = run_of(plan, 2, "logreg-2")
    neighbours = run_of(plan, 0, "knn")
    rows = {}
    for run, task, checkpoint in (
        (first, "logreg", A),
        (second, "logreg", B),
        (neighbours, "knn", A),
    ):
        rows[run.out.name] = a_result(task=task, checkpoint=checkpoint, seed=1)
        other = dataclasses.replace(rows[run.out.name], seed=0)
        store.append(run.out, [other, rows[run.out.name]])
    # 2. Rows that follow from kept scores lie anywhere below, of these and of other checkpoints
    about = {"task": "calibration", "metric": "nll", "value": 0.5, "ci95": (0.4, 0.6)}
    kept = a_result(checkpoint=A, seed=1, **about)
    others = [
        dataclasses.replace(kept, checkpoint="c" * 64),
        dataclasses.replace(kept, dataset="cifar10"),
        dataclasses.replace(kept, seed=0),
        kept,
    ]
    store.append(first.out, others)
    found = measuring._rows_of(plan)
    calibrated = [row for row in found if row.task == "calibration"]
    assert calibrated[:1] == [kept]
    assert [row.task for row in found][:2] == ["knn", "calibration"]
    of_heads = [row for row in found if row.task == "logreg"]
    assert of_heads == [rows["logreg-1"], rows["logreg-2"]]
    assert {row.seed for row in found} == {1}
    # Of several datasets, each one's
    both = plan.wanted[1]._replace(dataset="digits,cifar10")
    of_both = dataclasses.replace(plan, wanted=(both,))
    datasets = {row.dataset for row in measuring._rows_of(of_both)}
    assert datasets == {"digits", "cifar10"}
    # 3. A line that cannot be read is said, and the others count
    with (neighbours.out / "results.jsonl").open("a") as file:
        file.write("no row\n")
    caplog.clear()
    assert measuring._rows_of(plan) == found
    assert "results.jsonl" in caplog.text


def test_only_probes_of_this_seed_are_told_together(tmp_path, monkeypatch):
    from backbench.transfer import linear

    plan = a_plan(tmp_path, ["knn/digits@knn_demo", "finetune/digits"], seed=1)
    probe = LinearRequest(
        checkpoints=("x",), datasets="digits", data=tmp_path, out=tmp_path / "k"
    )
    training = FinetuneRequest(
        checkpoint=Path("x"), dataset="digits", data=tmp_path, out=tmp_path / "f"
    )
    assert measuring.sayings(plan) == []
    for place, name, request in ((0, "k", probe), (0, "l", probe), (1, "f", training)):
        out = run_of(plan, place, name, request).out
        task = "knn" if place == 0 else "finetune"
        store.append(out, [a_result(task=task, seed=seed) for seed in (0, 1)])
    told = []
    monkeypatch.setattr(
        linear, "sayings", lambda rows: told.append(list(rows)) or ["x"]
    )
    assert measuring.sayings(plan) == ["x"]
    ((first, second),) = told
    assert [folder.name for _, folder in (first, second)] == ["k", "l"]
    assert {row.seed for row, _ in (first, second)} == {1}


REQUESTS = {
    LinearRequest: {"checkpoints": ("x",), "datasets": "digits"},
    OodRequest: {"checkpoints": ("x",), "datasets": "imagenet-a"},
    SemisupRequest: {"checkpoint": Path("x"), "percent": 1},
    FinetuneRequest: {"checkpoint": Path("x"), "dataset": "digits"},
    AnalyzeRequest: {"checkpoints": ("x",), "dataset": "digits"},
    DetectRequest: {"config_file": "faster_rcnn_own", "checkpoint": Path("x")},
}


def a_request(kind, tmp_path):
    return kind(data=tmp_path, out=tmp_path / "o", **REQUESTS[kind])


@pytest.mark.parametrize("kind", REQUESTS)
def test_each_request_is_measured_and_refused_by_its_own_program(
    tmp_path, monkeypatch, kind
):
    from backbench.detection import dialect, train_net
    from backbench.transfer import finetune, protocols
    from backbench.transfer.analysis import analyze
    from backbench.transfer.analysis import protocol as of_analysis

    asked = []

    def note(name):
        return lambda *given: asked.append((name, *given))

    monkeypatch.setattr(protocols, "check", note("protocols"))
    monkeypatch.setattr(measuring.gpus, "refuse_missing", note("gpus"))
    monkeypatch.setattr(of_analysis, "check_analysis", note("analysis"))
    monkeypatch.setattr(dialect, "check", note("dialect"))
    monkeypatch.setattr(finetune, "run_semisup", note("semisup"))
    monkeypatch.setattr(finetune, "run", note("finetune"))
    monkeypatch.setattr(analyze, "run", note("analyze"))
    monkeypatch.setattr(train_net, "run", note("detect"))
    request = a_request(kind, tmp_path)
    points = (SimpleNamespace(digest=A),)
    run = PlannedRun(parse_task("knn/digits"), request, points, tmp_path)
    assert measuring.is_probe(run) == (kind in (LinearRequest, OodRequest))
    measuring._refuse(run)
    if kind is AnalyzeRequest:
        assert asked == [("analysis", request)]
    elif kind is DetectRequest:
        assert asked == [("dialect", request)]
    else:
        assert asked == [("protocols", request), ("gpus", request.accelerator)]
    asked.clear()
    measuring._measure_training(run)
    expected = {
        SemisupRequest: [("semisup", request, points[0])],
        FinetuneRequest: [("finetune", request, points[0])],
        AnalyzeRequest: [("analyze", request, points)],
        DetectRequest: [("detect", request)],
    }
    assert asked == expected.get(kind, [])


def test_probes_are_measured_together_before_trainings_and_scores_last(
    tmp_path, monkeypatch, capsys
):
    from backbench.cli import calibrate
    from backbench.transfer import devices, linear

    plan = a_plan(tmp_path, ["finetune/digits", "knn/digits", "calibration/digits"])
    tuned = run_of(plan, 0, "f", a_request(FinetuneRequest, tmp_path))
    probes = [
        run_of(plan, 1, name, a_request(kind, tmp_path))
        for name, kind in (("k", LinearRequest), ("o", OodRequest))
    ]
    done = []

    def measure_runs(runs, machine):
        print("a line of its own")
        done.append(("probes", runs, machine))

    monkeypatch.setattr(
        linear, "plan_run", lambda request, points, images: (request, points, images)
    )
    monkeypatch.setattr(linear, "measure_runs", measure_runs)
    monkeypatch.setattr(devices, "start_for", lambda request: ("here", request))
    monkeypatch.setattr(
        measuring, "_measure_training", lambda run: done.append(("training", run))
    )
    monkeypatch.setattr(calibrate, "run", lambda request: done.append(request.runs))
    monkeypatch.setattr(measuring, "_rows_of", lambda plan: ["the rows"])
    assert measuring.measure(plan) == ["the rows"]
    planned = [(run.request, run.checkpoints, plan.images) for run in probes]
    assert done == [
        ("probes", planned, ("here", probes[0].request)),
        ("training", tuned),
        (tmp_path,),
    ]
    assert capsys.readouterr().out == "", "the rows are returned"
    # Without scores, and without probes, neither is asked for
    done.clear()
    less = dataclasses.replace(plan, wanted=plan.wanted[:1], runs=[tuned])
    assert measuring.measure(less) == ["the rows"]
    assert done == [("training", tuned)]


# How they print


def test_results_stand_below_one_another_in_columns():
    about = {"task": "knn", "dataset": "digits", "protocol": "knn-v1"}
    one = a_result(
        checkpoint=A, name="x", metric="top1", value=7.125, ci95=None, **about
    )
    other = a_result(checkpoint=B, name="other", metric="top1", value=None, **about)
    first, second = repr(Results([one, other])).splitlines()
    assert first == f"{'x':20} {one.column:60}      7.12"
    assert second == f"{'other':20} {other.column:60} undefined"
    assert Results([one]).board.columns == fill([Measurement(one, Path())]).columns
