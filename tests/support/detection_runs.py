"""Makes detection runs as the command line does, for tests that call the program's parts."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backbench.detection import backbones, dialect, train_net
from backbench.detection.engine import DetectionEngine
from backbench.detection.run import DetectionRun, Prepared
from backbench.records import store

needs_detectron2 = pytest.mark.skipif(
    importlib.util.find_spec("detectron2") is None,
    reason="it is not installed: `make detectron2`",
)
ENGINES = ["torchvision", pytest.param("detectron2", marks=needs_detectron2)]


def overrides(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the `KEY VALUE` words of a command that sets these keys of a config."""
    words: list[str] = []
    for key, value in values.items():
        words += [key, str(value)]
    return tuple(words)


def run_of_config(
    name: str,
    root: Path,
    out: Path,
    opts: Sequence[str] = ("MODEL.WEIGHTS", "random"),
    *,
    engine: str = "torchvision",
    checkpoint: Path | None = None,
    world: int = 1,
) -> DetectionRun:
    given = dialect.read(name, opts)
    run = train_net.new_run(
        given, engine=engine, checkpoint=checkpoint, root=root, out=out
    )
    return replace(run, world=world)


def built(run: DetectionRun, device: str = "cpu") -> tuple[Prepared, DetectionEngine]:
    """Prepare a run and build its engine on the device."""
    prepared = train_net.prepare(run)
    return prepared, train_net.build_engine(run, prepared, torch.device(device))


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Load the weights that a run has trained."""
    return torch.load(out / "model_final.pth", weights_only=True)["model"]


def numbers(out: Path) -> dict[str, tuple[float | None, tuple[float, float] | None]]:
    """Return the value and interval of each column of a run's results."""
    rows, problems = store.read(out / "results.jsonl")
    assert not problems
    return {row.column: (row.value, row.ci95) for row in rows}


def rates_and_decays(engine: DetectionEngine) -> dict[str, tuple[float, float] | None]:
    """Return each parameter's learning rate and weight decay; None for one that is not trained."""
    by_id = {}
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            by_id[id(parameter)] = (group["lr"], group["weight_decay"])
    out = {}
    for name, parameter in engine.model.named_parameters():
        out[name] = by_id.get(id(parameter))
    return out


def near_its_checkpoint(p: Prepared, engine: DetectionEngine) -> float:
    """Measure how far the detector's maps are from the checkpoint's, as the command does."""
    sides = backbones.padded_test_size(p.cfg)
    trunk = p.checkpoint.backbone()
    return backbones.check_features(p.checkpoint, trunk, engine, sides)
