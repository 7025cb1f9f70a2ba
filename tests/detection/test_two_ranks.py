"""Compares two gloo ranks with one process, in both engines: fresh, and continued."""

import pytest
import torch
from support.detection_ranks import CONFIGS, all_runs
from support.detection_runs import numbers, weights

from backbench.runs.step_metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def runs(tiny_root, tmp_path_factory):
    """Run all kinds of Detectron2's runs and return their folder."""
    pytest.importorskip(
        "detectron2", reason="Detectron2 is not installed: `make detectron2`"
    )
    out = tmp_path_factory.mktemp("ranks")
    all_runs("detectron2", tiny_root, out)
    return out


@pytest.fixture(scope="module")
def precise_runs(tiny_root, tmp_path_factory):
    """Run all kinds of torchvision's runs, in float64, and return their folder."""
    out = tmp_path_factory.mktemp("ranks")
    all_runs("torchvision", tiny_root, out)
    return out


def losses(out):
    """Return the loss of each iteration, followed by its terms."""
    keys = (
        "loss",
        "loss_rpn_cls",
        "loss_rpn_loc",
        "loss_cls",
        "loss_box_reg",
        "loss_mask",
        "loss_keypoint",
    )
    return [[row[key] for key in keys if key in row] for row in read_metrics(out)]


@pytest.mark.parametrize("name", CONFIGS["detectron2"])
def test_stopped_and_continued_by_two_is_the_same_run(runs, name):
    a = runs / "two" / name
    b = runs / "two_two" / name
    for key, value in weights(a).items():
        assert torch.equal(value, weights(b)[key]), key
    assert losses(a) == losses(b) and numbers(a) == numbers(b)
    assert not list(a.glob(".predictions*"))


@pytest.mark.parametrize("name", CONFIGS["detectron2"])
@pytest.mark.parametrize("kind", ["two", "two_one", "one_two"])
def test_near_to_one_process(runs, name, kind):
    """Each process divides the heads' losses by its own count of boxes: near, but not equal."""
    one = runs / "one" / name
    other = runs / kind / name
    mine = losses(one)
    theirs = losses(other)
    assert len(mine) == len(theirs) == 3
    # 1. The first iteration. Detectron2 divides the keypoints' loss by the visible ones of its
    #    process, of which two processes do not have quite as many.
    assert theirs[0][1:5] == pytest.approx(mine[0][1:5], rel=1e-4)
    tolerance = 2e-3 if "keypoint" in name else 1e-4
    assert theirs[0] == pytest.approx(mine[0], rel=tolerance)
    # 2. The second. After another update, at the full rate, C4's few boxes are no longer alike.
    assert theirs[1][0] == pytest.approx(mine[1][0], rel=0.05)
    # 3. A continued run began as the run of as many processes.
    if kind == "two_one":
        assert theirs[0] == losses(runs / "two" / name)[0]
    if kind == "one_two":
        assert theirs[0] == losses(runs / "one" / name)[0]
    assert numbers(other).keys() == numbers(one).keys()
    assert weights(other).keys() == weights(one).keys()


@pytest.mark.parametrize("name", CONFIGS["torchvision"])
@pytest.mark.parametrize("kind", ["two", "two_two", "two_one", "one_two"])
def test_two_processes_are_one(precise_runs, name, kind):
    """The loss is over the global batch and draws are per image, so the detectors are equal."""
    one = precise_runs / "one" / name
    other = precise_runs / kind / name
    a = weights(one)
    b = weights(other)
    assert a.keys() == b.keys()
    floats = [key for key in a if a[key].is_floating_point()]
    x = torch.cat([a[key].flatten().double() for key in floats])
    y = torch.cat([b[key].flatten().double() for key in floats])
    # Targets are float32 all the same. Where one of them is rounded otherwise, the weights follow.
    assert float((x - y).norm() / x.norm()) < 1e-7
    assert len(losses(one)) == 3
    for mine, theirs in zip(losses(one), losses(other), strict=True):
        assert theirs == pytest.approx(mine, rel=1e-6)  # one term is logged in float32
    assert numbers(other).keys() == numbers(one).keys()
    assert not list(other.glob(".predictions*"))
