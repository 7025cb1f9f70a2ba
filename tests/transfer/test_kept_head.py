"""Features of a head that the checkpoint has kept (CLLR's L phi), apart from the trunk's."""

import json

import pytest
import torch
from support.layouts import trunk_file

from backbench.cli import main
from backbench.errors import EXIT_BAD_INPUT
from backbench.results import store
from backbench.weights.checkpoint import Checkpoint
from transfer.frozen import FrozenTrunk

GEOMETRY = {"geometry": {"resize": 32, "crop": 32}}


@pytest.fixture
def cllr(tmp_path):
    """A checkpoint with the head `lphi`, which is blind to all but three directions of phi."""
    head = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    return trunk_file(tmp_path / "cllr.safetensors", heads={"lphi.0.weight": head})


def probe(trunk, root, tmp_path, **protocol):
    name = "lphi" if "head" in protocol else "phi"
    file = tmp_path / f"{name}.yaml"
    recipe = {"kind": "knn", "protocol": "knn-v1", "k": [1], **GEOMETRY, **protocol}
    file.write_text(json.dumps(recipe))
    words = ["linear", str(trunk), "--datasets", "classes", "--protocol", str(file)]
    words += ["--data", str(root), "--out", str(tmp_path / name), "--accelerator", "cpu"]
    return main([*words, "--workers", "0"]), tmp_path / name


def test_phi_and_l_phi_are_columns_apart(cllr, trees, tmp_path, monkeypatch):
    monkeypatch.setenv("BACKBENCH_CACHE", str(tmp_path / "cache"))
    root = trees("classes", classes=("a", "b"))
    rows = []
    for protocol in ({}, {"head": "lphi"}):
        status, out = probe(cllr, root, tmp_path, **protocol)
        assert status == 0
        rows += store.read_file(out / "results.jsonl")
    assert [row.protocol for row in rows] == ["knn-v1", "knn-v1-lphi"]
    assert rows[0].checkpoint == rows[1].checkpoint
    # Neither took the other's features out of the cache
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 2 * 3


def test_features_are_the_heads_output(cllr):
    checkpoint = Checkpoint.load(cllr)
    phi, l_phi = (
        FrozenTrunk.build(checkpoint, device=torch.device("cpu"), head=head)
        for head in (None, "lphi")
    )
    images = torch.randn(2, 3, 32, 32)
    assert l_phi.dim == 3
    torch.testing.assert_close(l_phi(images), phi(images) @ checkpoint.heads["lphi.0.weight"].T)


def test_a_checkpoint_without_the_head_is_refused(trees, tmp_path, capsys):
    plain = trunk_file(tmp_path / "plain.safetensors")
    status, out = probe(plain, trees("classes"), tmp_path, head="lphi")
    assert status == EXIT_BAD_INPUT and not out.exists()
    assert "'random0' has no head 'lphi' (it keeps: none)" in capsys.readouterr().err
