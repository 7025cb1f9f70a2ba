"""What `evaluate` says around its numbers: the plan, the table, and what can be measured next."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.records import a_result

from backbench.board.board import Measurement, fill
from backbench.cli import evaluate
from backbench.evaluation.wanted import WantedTask
from backbench.records import store
from backbench.requests import parsing
from backbench.requests.detect import DetectRequest
from backbench.requests.evaluate import EvaluateRequest
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint


class Images(list):
    """Splits of 80, 20 and 50 images of three classes."""

    train = SimpleNamespace(classes=("a", "b", "c"))

    def items(self):
        return {"train": range(80), "val": range(20), "test": range(50)}.items()

    def both(self):
        return range(100)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "images_of", lambda *_, **__: Images())
    task = WantedTask("knn", "mine", "knn_own")
    about = {"wanted": [task], "root": tmp_path / "data", "runs": []}
    return SimpleNamespace(**about, checkpoints=["one", "two"])


def recipe(folder, **content):
    file = folder / f"recipe{len(list(folder.iterdir()))}.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    return str(file)


BY_EPOCHS = {"default": {"epochs": 10}, "flowers": {"iterations": 100}}
PARTS = {"10": {"length": {"epochs": 20}}, "100": {"length": {"epochs": 5}}}


@pytest.mark.parametrize(
    ("task", "content", "passes"),
    [
        # Features are computed once
        ("linear/mine", {"augment": None}, 150),
        # All rates in one pass, then the best one again
        ("linear/mine", {"augment": {}, "length": BY_EPOCHS}, 2 * 10 * 100),
        ("linear/flowers", {"augment": {}, "length": BY_EPOCHS}, 2 * 100 * 256),
        (
            "linear/flowers",
            {"augment": {}, "length": BY_EPOCHS, "batch_size": 8},
            1600,
        ),
        # A backward pass costs two; three rates and the best one again
        ("semi_10pct/mine", {"parts": PARTS, "head_lr": [1, 2, 3]}, 3 * 4 * 20 * 10),
        ("finetune/mine", {"parts": PARTS, "head_lr": [1]}, 3 * 2 * 5 * 100),
    ],
)
def test_a_price_is_in_images_through_the_trunk(tmp_path, task, content, passes):
    wanted = WantedTask(*task.split("/"), recipe(tmp_path, **content))
    assert evaluate.forward_passes(wanted, Images()) == passes


def offered(monkeypatch, passes):
    """Let the tasks that are offered cost so many passes."""

    def price(task, images):
        return passes[task.task]

    monkeypatch.setattr(evaluate, "forward_passes", price)


def rows(*speeds):
    return [
        a_result(origin={} if speed is None else {"images_per_second": speed})
        for speed in speeds
    ]


def test_what_takes_an_hour_at_most_comes_first(plan, monkeypatch, capsys):
    offered(
        monkeypatch, {"linear": 3600 * 50, "semi_10pct": 3600 * 50 + 50, "finetune": 10}
    )
    evaluate.tell_what_is_next(
        plan, Path("out/checkpoint.safetensors"), rows(200, 50, None)
    )
    soon, later = capsys.readouterr().out.split("What takes longer:\n")
    first, *lines = soon.splitlines()
    assert first.startswith("Next, at most an hour each, for one model")
    verbs = [line.split()[1] for line in lines]
    assert verbs == ["linear", "finetune", "linear", "finetune"]
    # By the slowest speed just seen
    assert "(as 180,000 images through the trunk, about 1.0 hours)" in lines[0]
    assert [line.split()[1] for line in later.splitlines()[:-1]] == [
        "semisup",
        "semisup",
    ]
    assert (
        later.splitlines()[-1]
        .strip()
        .startswith("detection needs boxes, as COCO's json")
    )


def test_without_a_speed_all_may_take_longer(plan, monkeypatch, capsys):
    offered(monkeypatch, {"linear": 1500, "semi_10pct": 20, "finetune": 10})
    evaluate.tell_what_is_next(plan, Path("out/checkpoint.safetensors"), rows(None))
    said = capsys.readouterr().out
    assert said.startswith("Next (no time is known, as all features were kept")
    assert "longer" not in said
    assert "(as 1,500 images through the trunk)" in said
    assert len(said.splitlines()) == 8


def test_what_is_offered_is_read_and_priced_at_the_size_that_was_asked_for(
    plan, monkeypatch, capsys
):
    """A speed at 32 pixels says little of 224; and who measures at 32 goes on at 32."""
    offered(monkeypatch, {"linear": 3600, "semi_10pct": 360, "finetune": 3600})
    seen = [
        a_result(origin={"images_per_second": 10}, provenance={"trunk": {"side": 32}})
    ]
    evaluate.tell_what_is_next(plan, Path("out/checkpoint.safetensors"), seen, size=32)
    soon, later = capsys.readouterr().out.split("What takes longer:\n")
    lines = soon.splitlines()[1:]
    assert len(lines) == 4
    for line, minutes in zip(lines[:3], ("6 minutes", "36 seconds", "6 minutes")):
        words = line.split()
        request = parsing.parse(words[1 : words.index("(as")])
        assert request.overrides == ("geometry.of=32",), line
        assert minutes in line
    # The papers' protocols read 224 pixels: 49 times as many
    assert "geometry.of" not in lines[3] and "about 29 minutes" in lines[3]
    assert later.count("about 4.9 hours") == 2 and "geometry.of" not in later


def test_commands_that_are_offered_are_commands(plan, tmp_path, monkeypatch, capsys):
    offered(monkeypatch, {"linear": 10, "semi_10pct": 10, "finetune": 10})
    file = tmp_path / "out" / "checkpoint.safetensors"
    evaluate.tell_what_is_next(plan, file, rows(100))
    for line in capsys.readouterr().out.splitlines()[1:7]:
        command = line.strip().partition("  (")[0].removeprefix("backbench ")
        request = parsing.parse(command.split())
        assert request.data == plan.root
        assert request.out.parent == file.parent


def test_a_shared_dataset_has_no_recipe_of_its_own(plan, monkeypatch, capsys):
    plan.wanted = [WantedTask("knn", "cifar10", "knn")]
    offered(monkeypatch, {"linear": 10, "semi_10pct": 10, "finetune": 10})
    evaluate.tell_what_is_next(plan, Path("out/checkpoint.safetensors"), rows(100))
    said = capsys.readouterr().out
    assert "_own" not in said
    assert len(said.splitlines()) == 1 + 3 + 2


def test_seeds_of_the_detectors_are_offered(plan, capsys):
    file = Path("out/checkpoint.safetensors")
    own = DetectRequest(
        config_file="faster_rcnn_own",
        checkpoint=file,
        out=Path("out/a"),
        seed=0,
        resume=True,
    )
    other = DetectRequest(config_file="x", checkpoint=Path("other"), out=Path("out/b"))
    plan.runs = [
        SimpleNamespace(request=own, out=Path("out/faster_rcnn")),
        SimpleNamespace(request=other, out=Path("out/b")),
        SimpleNamespace(request=object(), out=Path("out/c")),
    ]
    evaluate.tell_more_seeds(plan, file)
    first, command = capsys.readouterr().out.splitlines()
    assert first.startswith("Next, for one model: three seeds")
    request = parsing.parse(command.split()[1:])
    assert (request.seeds, request.seed, request.resume) == (3, None, False)
    assert request.out == Path("out/faster_rcnn-seeds")
    assert request.checkpoint == file


def test_the_plan_says_what_the_images_are(plan, caplog):
    caplog.set_level(logging.INFO, "backbench")
    plan.wanted.append(WantedTask("knn", "cifar10", "knn"))
    evaluate.tell_plan(plan)
    first, second = caplog.messages
    assert first == "mine: 3 classes; 80 train, 20 val, 50 test images"
    assert "(knn_own)" in second and "(knn)" in second
    assert second.endswith("; 2 models on mine, cifar10")


def test_the_table_has_a_line_for_each_value(capsys):
    about = {"task": "knn", "dataset": "digits", "protocol": "knn-x-v1"}
    results = [
        a_result(
            checkpoint="a" * 64, name="good", value=81.26, ci95=(80.0, 82.5), **about
        ),
        a_result(
            checkpoint="b" * 64, name="undefined one", value=None, ci95=None, **about
        ),
    ]
    board = fill(Measurement(result, Path("runs")) for result in results)
    evaluate.print_table(board)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == board.measured_columns()[0].name
    good = next(line for line in lines if "good" in line)
    assert re.fullmatch(r"  good           +81.3 ± 1.[23]( [*°])?", good)


# The verb

VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"
KNN = WantedTask("knn", "mine", "knn_own")
BOXES = WantedTask("faster_rcnn", "mine", "faster_rcnn_own")


class EvaluationSteps(list):
    """What `evaluate` does, in order; the tasks that it is given, and whether they have results."""

    tasks = (KNN,)
    measures = True


@pytest.fixture
def steps(monkeypatch):
    done = EvaluationSteps()

    def place_tasks(tasks, data, out, *, size):
        done.append(("tasks", tasks, size))
        return data.parent, list(done.tasks)

    def measure(plan):
        done.append(("measure",))
        row = a_result(name="mine", origin={"images_per_second": 50})
        store.append(plan.out / "knn", [row])
        return [row] if done.measures else []

    def note(name):
        return lambda *given, **more: done.append((name, *given, *more.items())) or []

    monkeypatch.setattr(evaluate.wanted, "place_tasks", place_tasks)
    monkeypatch.setattr(evaluate.wanted, "refuse_boxes", note("boxes"))
    monkeypatch.setattr(evaluate, "measure", measure)
    monkeypatch.setattr(evaluate, "sayings", lambda plan: ["a saying"])
    told = ("tell_untrained", "tell_plan", "tell_more_seeds", "tell_what_is_next")
    for name in ("refuse", *told):
        monkeypatch.setattr(evaluate, name, note(name))
    monkeypatch.setattr(
        evaluate,
        "make_plan",
        lambda *given, **more: SimpleNamespace(
            given=given, more=more, out=more["out"], wanted=given[0]
        ),
    )
    return done


def evaluated(tmp_path, *words, **more):
    file = tmp_path / "given.safetensors"
    state = build_trunk(VIT).state_dict()
    Checkpoint(arch=VIT, method="m", state_dict=state).save(file)
    about = {"words": (str(file), *words), "data": tmp_path / "mine"}
    return evaluate.run(EvaluateRequest(**about, out=tmp_path / "runs", **more))


def names(steps):
    return [step[0] for step in steps]


def test_an_evaluation_is_refused_told_measured_and_shown(steps, tmp_path, capsys):
    (tmp_path / "lists").mkdir()
    how = {"seed": 3, "accelerator": "cpu", "workers": 2}
    outcome = evaluated(tmp_path, size=64, **how)
    assert names(steps) == [
        "tasks",
        "boxes",
        "tell_untrained",
        "refuse",
        "tell_plan",
        "measure",
        "tell_what_is_next",
    ]
    assert steps[0] == ("tasks", None, 64)
    assert steps[1] == ("boxes", tmp_path, [KNN])
    _, plan, file, results, size = steps[-1]
    assert size == ("size", 64)
    assert file == tmp_path / "runs" / "checkpoint.safetensors" and file.exists()
    assert list(plan.given[1]) == [file]
    lists = tmp_path / "lists"
    assert plan.more == {
        "root": tmp_path,
        "out": tmp_path / "runs",
        "lists": lists,
        **how,
    }
    assert outcome.document == results and outcome.status == 0
    lines = capsys.readouterr().out.splitlines()
    column = results[0].column
    assert lines[0] == column
    assert lines[1].startswith("  mine ")
    assert lines[2] == "a saying"
    page, table = (tmp_path / "runs" / f"leaderboard.{end}" for end in ("html", "csv"))
    assert lines[-1] == f"table: {table}   page: {page}"
    assert column in table.read_text().splitlines()[0]
    assert column in page.read_text()


def test_what_is_next_is_told_where_no_task_was_named(steps, tmp_path):
    evaluated(tmp_path, "knn", "fewshot")
    assert steps[0][1] == ["knn", "fewshot"]
    assert names(steps)[-1] == "measure"
    # Detectors are trained again; beside a reading of classes they are not
    for tasks, told in (
        ([BOXES, BOXES], "tell_more_seeds"),
        ([BOXES, KNN], "tell_what_is_next"),
    ):
        steps.tasks = tasks
        evaluated(tmp_path)
        assert names(steps)[-2:] == ["measure", told]
    steps.measures = False
    evaluated(tmp_path)
    assert names(steps)[-1] == "measure"


def test_weights_that_look_untrained_are_told(caplog):
    """As a file that was written after a load that took nothing and said nothing."""
    state = build_trunk("resnet18").state_dict()
    asked = Checkpoint(arch="resnet18", method="random", state_dict=state, epochs=0)
    mine = Checkpoint(arch="resnet18", method="m", state_dict=state).described(
        "mine", None, None
    )
    seen = {name: value.clone() for name, value in state.items()}
    for name in seen:
        if name.endswith(("running_var", "weight")):
            seen[name] *= 1.3
    trained = mine.replace(state_dict=seen).described("trained", None, None)
    with caplog.at_level(logging.WARNING):
        evaluate.tell_untrained([asked, mine, trained])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("mine: looks untrained: every running variance is 1")
