"""Evaluation and detection on a real GPU against the CPU."""

import pytest
import torch
from support.detection_runs import built, near_its_checkpoint, run_of_config
from support.extraction import CPU, checkpoint
from support.gpu import DEVICE, on_gpu

from backbench.cli import program
from backbench.detection.data.split import training_records
from backbench.knn import knn_scores
from backbench.parallel import precision
from backbench.records import store
from backbench.transfer.features.frozen import FrozenTrunk, forward_all

pytestmark = on_gpu

AMP = {
    "fp32": (),
    "bf16": ("SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bf16"),
}
AMP["fp16"] = ("SOLVER.AMP.ENABLED", "True")


@pytest.fixture(autouse=True)
def exact():
    precision.use("fp32")


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_features_are_those_of_the_cpu(arch):
    """Float32 on both: TF32 would be 4e-4 to 8e-4 off."""
    point = checkpoint(arch=arch)
    pixels = torch.randint(256, (8, 3, 64, 64), dtype=torch.uint8)
    (here,) = forward_all([FrozenTrunk.build(point, device=CPU)], pixels)
    there = FrozenTrunk.build(point, device=torch.device(DEVICE))
    (found,) = forward_all([there], pixels.to(DEVICE))
    assert float((found.cpu() - here).norm() / here.norm()) < 1e-5


def test_votes_of_neighbours_repeat_themselves():
    generator = torch.Generator().manual_seed(0)
    bank, queries = (
        torch.randn(n, 64, generator=generator).to(DEVICE) for n in (4096, 512)
    )
    labels = (torch.arange(4096) % 10).to(DEVICE)
    runs = [
        knn_scores(queries, bank, labels, classes=10, k=(200,))[200] for _ in range(3)
    ]
    assert all(torch.equal(run, runs[0]) for run in runs)


def measured(words, tmp_path, monkeypatch):
    """The rows on the CPU and on the device, each from a cache of its own."""
    both = []
    for device in ("cpu", DEVICE):
        monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / f"cache-{len(both)}"))
        out = tmp_path / f"{len(both)}"
        where = ["--out", out, "--accelerator", device, "--workers", "0"]
        assert program.main(list(map(str, [*words, *where]))) == 0
        rows, problems = store.read(out)
        assert rows and not problems
        both.append({(row.task, row.metric): row.value for row in rows})
    return both


@pytest.mark.parametrize(
    "protocol", ["linear_tiny", "knn_demo", "fewshot_demo", "logreg_demo"]
)
def test_probes(protocol, tiny_root, trunk, tmp_path, monkeypatch):
    words = [
        "linear",
        trunk,
        "--datasets",
        "digits",
        "--protocol",
        protocol,
        "--data",
        tiny_root,
    ]
    here, there = measured(words, tmp_path, monkeypatch)
    # One image of the 360 is 0.28
    assert there.keys() == here.keys()
    assert all(there[key] == pytest.approx(here[key], abs=1.0) for key in here)


def test_finetuning_and_analysis(tiny_root, trunk, tmp_path, monkeypatch):
    words = ["finetune", trunk, "--dataset", "digits", "--protocol", "finetune_demo"]
    here, there = measured([*words, "--data", tiny_root], tmp_path / "a", monkeypatch)
    assert there.keys() == here.keys()
    assert all(there[key] == pytest.approx(here[key], abs=5.0) for key in here)
    words = ["analyze", trunk, "--dataset", "digits", "--recipe", "analyze_tiny"]
    here, there = measured([*words, "--data", tiny_root], tmp_path / "b", monkeypatch)
    assert there.keys() == here.keys()


@pytest.mark.parametrize("amp", AMP)
@pytest.mark.parametrize("task", ["faster", "mask", "keypoint"])
@pytest.mark.parametrize("engine", ["torchvision", "detectron2"])
def test_detectors_take_steps(engine, task, amp, tiny_root, tmp_path):
    if engine == "detectron2":
        pytest.importorskip(
            "detectron2", reason="Detectron2 is not installed: `make detectron2`"
        )
    if amp == "fp16" and DEVICE == "cpu":
        pytest.skip("half precision is a GPU's")
    first = []
    for device in ("cpu", DEVICE):
        words = ("MODEL.WEIGHTS", "random", *(AMP[amp] if device == DEVICE else ()))
        name = f"tiny_{task}_rcnn_R_18_FPN"
        run = run_of_config(name, tiny_root, tmp_path / device, words, engine=engine)
        p, made = built(run, device)
        near_its_checkpoint(p, made)
        made.start(training_records(p.train, p.task), 0, 3)
        made.model.train()
        terms = [made.step() for _ in range(3 if device == DEVICE else 1)]
        assert all(torch.isfinite(value) for row in terms for value in row.values())
        first.append({name: float(value) for name, value in terms[0].items()})
    # The draws of anchors are the device's
    close = {"fp32": 0.05, "bf16": 0.2, "fp16": 0.2}[amp]
    assert first[1].keys() == first[0].keys()
    assert sum(first[1].values()) == pytest.approx(sum(first[0].values()), rel=close)
