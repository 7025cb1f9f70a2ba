"""COCO's images in its own zip, or in a tar file: the same training and scores in both engines."""

import dataclasses
import json
import shutil
import tarfile
import zipfile

import pytest
from support.detection_runs import ENGINES, run_of_config

from backbench import cli
from backbench.errors import BadInput
from backbench.images import contents
from backbench.results import store
from backbench.runs.folder import RESULTS_FILE
from detection import train_net

CONFIG = "tiny_faster_rcnn_R_18_FPN"


@pytest.fixture
def packed(tiny_root, tmp_path):
    """The scenes with train in a zip file and val in a tar file."""
    base = tmp_path / "packed" / "scenes"
    shutil.copytree(tiny_root / "scenes" / "annotations", base / "annotations")
    with zipfile.ZipFile(base / "train2017.zip", "w") as out:
        for file in (tiny_root / "scenes" / "train2017").iterdir():
            out.write(file, f"train2017/{file.name}")
    with tarfile.open(base / "val2017.tar", "w") as out:
        out.add(tiny_root / "scenes" / "val2017", "val2017")
    return tmp_path / "packed"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_detector_does_not_see_where_its_images_lie(tiny_root, packed, tmp_path, engine):
    rows, metrics = [], []
    for root in (tiny_root, packed):
        out = tmp_path / f"of {root.name}"
        words = ["--config-file", CONFIG, "--engine", engine, "--data", root, "--out", out]
        short = ["MODEL.WEIGHTS", "random", "SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "()"]
        assert cli.main(["detect", *map(str, words), *short]) == 0
        metrics.append((out / "metrics.jsonl").read_text())
        found, problems = store.read(out / RESULTS_FILE)
        assert found and not problems
        for row in found:
            held = row.provenance.pop("container", {})
            kinds = {split: about["kind"] for split, about in held.items()}
            assert kinds == ({} if root == tiny_root else {"train": "zip", "val": "tar"})
        rows.append([dataclasses.replace(row, origin={}) for row in found])
    assert metrics[0] == metrics[1] and rows[0] == rows[1]


def test_what_names_the_images_is_the_same(tiny_root, packed, tmp_path, capsys):
    folder, archive = (
        train_net.prepare(run_of_config(CONFIG, root, tmp_path / "x"))
        for root in (tiny_root, packed)
    )
    for a, b in ((folder.train, archive.train), (folder.val, archive.val)):
        assert (a.fingerprint, a.contents) == (b.fingerprint, b.contents)
        assert contents.whole(a.images) == contents.whole(b.images)
    (packed / "coco").symlink_to(packed / "scenes")
    assert cli.main(["data", "check", "coco", "--data", str(packed)]) == 0
    file = packed / "scenes" / "annotations" / "instances_val2017.json"
    about = json.loads(file.read_text())
    about["images"][0]["file_name"] = "../train2017/1.jpg"
    file.write_text(json.dumps(about))
    with pytest.raises(BadInput, match=r"val2017\.tar: 1 of \d+ images are missing, first \.\./"):
        train_net.prepare(run_of_config(CONFIG, packed, tmp_path / "y"))
    assert cli.main(["data", "check", "coco", "--data", str(packed)]) == 1
    assert "1 of" in capsys.readouterr().out
