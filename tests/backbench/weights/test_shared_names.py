"""Files of one name are rows of several names: their folders tell them apart."""

import pytest
import torch

from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.shared_names import told_apart

LAST = "last.ckpt"


ARCH = "resnet18,width=0.125"


def named(name):
    state = {
        key: torch.zeros_like(each, device="cpu")
        for key, each in archs.tensors(ARCH).items()
    }
    return Checkpoint(
        arch=ARCH, method="x", state_dict=state, provenance={"name": name}
    )


def names(tmp_path, *given):
    """Return the rows' names of files, each with its own name behind a colon, and of what is no
    file."""
    points = []
    models = []
    for each in given:
        where, _, name = each.partition(":")
        file = tmp_path / where
        if where:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        models.append(str(file) if where else f"timm:{name}")
        points.append(named(name or "last"))
    return [point.name for point in told_apart(points, models)]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["simclr/last.ckpt", "byol/last.ckpt"], ["simclr-last", "byol-last"]),
        # Folders that all have tell nothing
        (["simclr/s0/last.ckpt", "byol/s0/last.ckpt"], ["simclr-last", "byol-last"]),
        (["a/s0/last.ckpt", "a/s1/last.ckpt"], ["s0-last", "s1-last"]),
        (
            ["a/x/last.ckpt", "b/x/last.ckpt", "b/y/last.ckpt"],
            ["a-x-last", "b-x-last", "b-y-last"],
        ),
        # Others keep their names
        (["a/last.ckpt", "b/best.ckpt:best"], ["last", "best"]),
        (
            ["a/last.ckpt", "b/last.ckpt", "b/best.ckpt:best"],
            ["a-last", "b-last", "best"],
        ),
        (["a/last.ckpt", ":last"], ["last", "last"]),
        (["a/last.ckpt"], ["last"]),
        (["a/1/2/3/4/5/last.ckpt", "b/1/2/3/4/5/last.ckpt"], ["last", "last"]),
        (["a\n/last.ckpt", "b/last.ckpt"], ["last", "last"]),
    ],
)
def test_the_nearest_folders_that_differ_are_named(files, wanted, tmp_path):
    assert names(tmp_path, *files) == wanted


def test_a_link_counts_where_it_lies(tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for repository, blob in (("org--a", "1f"), ("org--b", "2e")):
        (blobs / blob).touch()
        (tmp_path / repository).mkdir()
        (tmp_path / repository / LAST).symlink_to(blobs / blob)
    files = [tmp_path / "org--a" / LAST, tmp_path / "org--b" / LAST]
    found = told_apart([named("last"), named("last")], files)
    assert [point.name for point in found] == ["org--a-last", "org--b-last"]
