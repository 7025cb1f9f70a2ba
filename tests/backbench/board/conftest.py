"""One page for the tests that read it and for those that use it in a browser."""

import json

import pytest
from PIL import Image
from support import boards

from backbench.cli import program

# Where LORAC's prior begins, as a run's recipe says it, and the same recipe without a prior
LORAC = {
    "epochs": 10,
    "method": {"name": "lorac", "prior": "laplace", "prior_from": 0.5},
}
MOCO_M = {
    "epochs": 10,
    "method": {"name": "moco_m", "prior": "none", "prior_from": 0.5},
}


def a_pretraining(run, recipe, losses):
    """A pretraining's run folder: 100 steps an epoch, and a last line that a kill has torn."""
    run.mkdir(parents=True)
    identity = {"recipe": recipe} if recipe else {}
    (run / "run.json").write_text(
        json.dumps({"verb": "pretrain", "identity": identity})
    )
    lines = [
        json.dumps({"step": s, "loss": v, "epoch": s // 100})
        for s, v in enumerate(losses)
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 10']))


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Five checkpoints in the demo's columns, pretraining curves and detection pictures."""
    root = tmp_path_factory.mktemp("board") / "runs"
    boards.synthetic(
        root, ["random", "simclr", "moco_v2", "moco_m", "lorac"], boards.DEMO, gap=4
    )
    recipes = {"simclr": None, "lorac": LORAC, "moco_m": MOCO_M}
    for nth, (name, recipe) in enumerate(recipes.items()):
        losses = [5 - s / 500 + nth for s in range(1000)]
        a_pretraining(root / "pretrain" / name, recipe, losses)
    a_pretraining(root / "pretrain" / "two_steps", LORAC, [5.0, 4.0])
    for run in (root / "mask_rcnn-scenes").iterdir():
        (run / "pictures").mkdir()
        Image.new("RGB", (1200, 400), (20, 90, 160)).save(
            run / "pictures" / "000001.png"
        )
        (run / "pictures" / "000002.png").write_text("not an image")
    return root


@pytest.fixture(scope="session")
def page(runs):
    path = runs.parent / "leaderboard.html"
    assert program.main(["leaderboard", str(runs), "--html", str(path), "-q"]) == 0
    return path
