"""The suite from Python: light to import, any module in, the verbs' own errors out."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from support.layouts import trunk_file
from support.records import a_result

import backbench
from backbench.errors import BadInput
from backbench.evaluation.api import Results
from backbench.evaluation.plan import make_plan
from backbench.evaluation.wanted import parse_task
from backbench.images.preprocess import Pixels
from backbench.runs.run_progress import read_progress
from backbench.weights.checkpoint import Checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
TASKS = ["knn/digits@knn_demo", "fewshot/digits@fewshot_demo"]


def test_import_is_light():
    heavy = "m.split('.')[0] in ('torch', 'numpy', 'backbench')"
    code = f"import sys, backbench; print(sorted(m for m in sys.modules if {heavy}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['backbench']"


def test_names():
    assert backbench.__version__
    assert set(backbench.__all__) <= set(dir(backbench))
    for name in backbench.__all__:
        assert getattr(backbench, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'evaluat'"):
        _ = backbench.evaluat


def test_tasks_are_named_like_columns():
    assert parse_task("linear/cifar10") == ("linear", "cifar10", "lorac")
    assert parse_task("mask_rcnn/coco2017") == (
        "mask_rcnn",
        "coco2017",
        "mask_rcnn_R_50_FPN_1x",
    )
    assert parse_task("knn/digits@knn_demo") == ("knn", "digits", "knn_demo")
    # The folder of --data is the dataset where none is named, whatever its name
    assert parse_task("knn@knn_demo", "my@home") == ("knn", "my@home", "knn_demo")
    with pytest.raises(BadInput, match="did you mean 'linear'"):
        parse_task("linaer/cifar10")
    with pytest.raises(BadInput, match="expected task/dataset"):
        parse_task("linear")


def test_the_seed_reaches_every_verb(tmp_path):
    others = ("linear/cifar10", "semi_1pct/imagenet", "finetune/dtd", "analyze/dtd")
    trunk = Checkpoint.load(trunk_file(tmp_path / "trunk.safetensors"))
    for text in (*others, "mask_rcnn/coco2017"):
        task = parse_task(text)
        files = {tmp_path / "trunk.safetensors": trunk}
        plan = make_plan([task], files, root=tmp_path, out=tmp_path / "out", seed=3)
        (run,) = plan.runs
        assert run.request.seed == 3
        assert "3" in run.request.argv(), "Slurm would carry it, too"


def test_the_page_names_tasks_that_there_are():
    (call,) = re.findall(r"backbench\.evaluate\(\s*\w+, (\[.*?\])", PAGE.read_text())
    for task in json.loads(call):
        parse_task(task)


def test_mistakes_come_before_any_file(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(BadInput, match="no tasks"):
        backbench.evaluate(model, [], data=tmp_path, out=tmp_path / "out")
    with pytest.raises(BadInput, match=r"module .*Linear"):  # and no file's name
        backbench.evaluate(model, TASKS, data=tmp_path, out=tmp_path / "out")
    with pytest.raises(BadInput, match="not int"):
        backbench.evaluate(3, TASKS, data=tmp_path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Net(torch.nn.Module):
    """Nobody else's: its features are in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 12, 5, stride=3)

    def forward(self, x):
        return {"pooled": self.conv(x).relu().mean((2, 3))}


@pytest.mark.slow
def test_a_module_of_any_kind_is_measured_where_it_lives(tiny_root, tmp_path):
    torch.manual_seed(0)
    net = Net()
    with pytest.raises(BadInput, match=r"no trunk.*given as .*ModuleTrunk"):
        backbench.evaluate(net, TASKS[:1], data=tiny_root, out=tmp_path / "bare")
    trunk = backbench.ModuleTrunk(
        net, feature_dim=12, features=lambda m, x: m(x)["pooled"]
    )
    cache = tmp_path / "cache" / "features"
    pixels = Pixels((0.5,) * 3, (0.5,) * 3)
    out = tmp_path / "out"
    found = backbench.evaluate(
        trunk, TASKS, data=tiny_root, out=out, name="mine", pixels=pixels
    )
    ((name, arch),) = {(r.name, r.arch) for r in found}
    assert name == "mine" and re.fullmatch("python:Net~[0-9a-f]{8}", arch)
    assert not cache.exists() and not list(out.rglob("*.npy")), (
        "nobody may take these features"
    )
    assert all(r.value is not None and 15 < r.value <= 100 for r in found)
    # Another forward function on the same weights
    other = backbench.ModuleTrunk(
        net, feature_dim=12, features=lambda m, x: torch.sin(99 * m(x)["pooled"])
    )
    with pytest.raises(
        BadInput, match="without `identity` is another one in every process"
    ):
        backbench.evaluate(other, TASKS[:1], data=tiny_root, out=out, pixels=pixels)
    said = backbench.evaluate(other, TASKS[:1], data=tiny_root, out=tmp_path / "zero")
    assert {r.value for r in said}.isdisjoint({r.value for r in found})
    # The file alone is no trunk elsewhere
    line = [
        sys.executable,
        "-m",
        "backbench",
        "linear",
        str(out / "checkpoint.safetensors"),
    ]
    line += ["--datasets", "digits", "--protocol", "knn_demo", "--data", str(tiny_root)]
    line += ["--out", str(tmp_path / "b")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 2
        and "only the program that gives it can use it" in done.stderr
    )


PROGRAM = """
import sys
import backbench
model, protocol, data, out = sys.argv[1:]
backbench.evaluate(model, "linear/digits@" + protocol, data=data, out=out)
"""


def test_a_program_that_is_ended_saves_what_it_trained(
    tiny_root, trunk, tmp_path, python
):
    """SIGTERM is no exception in a program of somebody's own, but where something is trained."""
    protocol = tmp_path / "long.yaml"
    long = "kind: sgd\nprotocol: long-v1\nlr: [1.0]\naugment: null\n"
    long += (
        "length: {default: {iterations: 100000000}}\ngeometry: {resize: 32, crop: 32}\n"
    )
    protocol.write_text(long)
    out = tmp_path / "out"
    program = python.start(PROGRAM, trunk, protocol, tiny_root, out)
    run = out / "linear-digits-long"

    def until(condition, what):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, what
            time.sleep(0.2)

    def training():
        note = read_progress(run)
        return note is not None and note["unit"] == "step"

    until(training, "nothing was trained")
    program.terminate()
    status, _, said = program.end()
    assert status == 1 and "Preempted" in said.splitlines()[-1]
    assert list((run / "state").iterdir()), "it was told to save, and did"


@pytest.mark.slow
def test_a_model_that_timm_registers_otherwise_is_refused(tiny_root, tmp_path):
    torch.manual_seed(0)
    # An activation changes the features and leaves no tensor; heads are told by the module
    other = timm.create_model("test_vit", act_layer="relu")
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with pytest.raises(BadInput, match="not timm's test_vit as it is registered"):
        backbench.evaluate(other, TASKS[0], data=tiny_root, out=tmp_path / "other")


def test_a_notebook_shows_a_line_per_column_and_a_field_per_checkpoint():
    one = {"checkpoint": "a" * 64, "name": "one <b>"}
    other = {"checkpoint": "b" * 64, "name": "other"}
    shown = Results(
        [
            a_result(**one),
            a_result(**other, value=80.0, ci95=None),
            a_result(**other, metric="top5", value=None),
        ]
    )._repr_html_()
    head, *lines = re.findall(r"<tr>(.*?)</tr>", shown)
    assert re.findall(r"<th>(.*?)</th>", head) == ["", "one &lt;b&gt;", "other"]
    fields = {}
    for line in lines:
        fields[re.findall(r">([^<]*)</th>", line)[0]] = re.findall(
            r"<td>(.*?)</td>", line
        )
    assert list(fields.values()) == [["91.2 ± 1.2", "80.0"], ["", "undefined"]]
    assert [name.split("@")[0] for name in fields] == [
        "linear/digits/top1",
        "linear/digits/top5",
    ]


@pytest.mark.slow
def test_a_module_goes_to_the_table(tiny_root, tmp_path):
    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    found = backbench.evaluate(
        model, TASKS, data=tiny_root, out=tmp_path / "out", name="mine"
    )
    assert isinstance(found, Results)
    assert {r.task for r in found} == {"knn", "fewshot"}
    assert {r.name for r in found} == {"mine"}
    assert all(r.value is not None and 20 < r.value <= 100 for r in found)
    saved = backbench.load(tmp_path / "out" / "checkpoint.safetensors")
    assert {r.checkpoint for r in found} == {saved.digest}
    assert torch.equal(saved.backbone().conv1.weight, model.conv1.weight)
    assert "mine" in repr(found)
    assert "<table>" in found._repr_html_()
    again = backbench.evaluate(saved, TASKS, data=tiny_root, out=tmp_path / "out")
    assert again == found, "recognised, not measured again"
    model, out = torchvision.models.resnet18(), tmp_path / "out"
    more = backbench.evaluate(model, TASKS[0], data=tiny_root, out=out)
    assert {r.checkpoint for r in more}.isdisjoint({saved.digest}), (
        "other weights, other files"
    )
    assert len(backbench.collect([tmp_path / "out"]).rows) == 2
    with pytest.raises(BadInput, match="digitz"):
        backbench.evaluate(
            saved, "knn/digitz@knn_demo", data=tiny_root, out=tmp_path / "other"
        )
