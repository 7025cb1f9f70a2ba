"""`analyze` on real files: one decode per image, numbers by hand, known answers, stopped runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.interruptions import terminate
from support.layouts import SMALL as SMALL_TRUNK

from backbench.cli import program
from backbench.datasets import catalog, embedded, splits
from backbench.errors import BadInput
from backbench.images.preprocess import normalise
from backbench.pretrain.methods import _heads
from backbench.recipes import config
from backbench.records import store
from backbench.runs import seeding
from backbench.transfer.analysis import analyze
from backbench.transfer.analysis import pictures as analyze_pictures
from backbench.transfer.analysis import statistics as stats
from backbench.transfer.analysis.analyze import AnalyzedViews
from backbench.transfer.analysis.protocol import load_analysis
from backbench.transfer.features.frozen import build_projector
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint

SMALL = """base: {base}
protocol: analyze-{{space}}-test-v1
augmentations: 6
images: {images}
sample: 60
batch: 4
draws: 3
"""


def save(path, seed, name, *, heads=None, constant=False, arch="resnet18"):
    """Save PATH/<name>.safetensors; a constant one gives every image the same features."""
    seeding.seed_everything("test", seed)
    state = build_trunk(arch).state_dict()
    if constant:
        # The first block of the last stage gives 1 everywhere, the second adds nothing.
        for key in ("layer4.0.bn2", "layer4.0.downsample.1", "layer4.1.bn2"):
            state[f"{key}.weight"].zero_()
            state[f"{key}.bias"].zero_()
        state["layer4.0.downsample.1.bias"].fill_(1.0)
    file = path / f"{name}.safetensors"
    provenance = {"name": name, "recipe": {"precision": "bf16"}}
    about = {"arch": arch, "method": "random", "heads": heads or {}}
    Checkpoint(**about, state_dict=state, provenance=provenance).save(file)
    return file


def recipe(path, count):
    base = Path(__file__).parents[2] / "configs" / "transfer" / "analyze_demo.yaml"
    file = path / "analyze_small.yaml"
    file.write_text(SMALL.format(base=base, images=count))
    return file


def command(files, root, out, file):
    words = ["analyze", *files, "--dataset", "digits", "--data", root, "--out", out]
    return [*map(str, words), "--recipe", str(file), "--workers", "0", "-q"]


def run(files, root, out, file, *more):
    return program.main([*command(files, root, out, file), *more])


def values(out):
    rows, problems = store.read(out)
    assert not problems
    return {(r.name, r.protocol, r.metric): r.value for r in rows}


@pytest.mark.slow
def test_one_pass_serves_all_checkpoints(
    tiny_root, tmp_path, decoder, monkeypatch
) -> None:
    # Thirty images do not have fifty ranks.
    monkeypatch.setattr(stats, "ALPHA_RANKS", (2, 9))
    kind = _heads.Head(layers=2, hidden=24, dim=16, last_batchnorm=True)
    head = _heads.build_head(kind, 512)
    heads = {f"projector.{k}": v for k, v in head.state_dict().items()}
    given = [save(tmp_path, 0, "plain"), save(tmp_path, 1, "headed", heads=heads)]
    given.append(save(tmp_path, 2, "flat", constant=True))
    small = recipe(tmp_path, 30)
    assert run(given, tiny_root, tmp_path / "out", small) == 0
    # 1. Each image is decoded once, for three checkpoints and seven views.
    assert len(decoder.paths) == 30
    assert len(set(decoder.paths)) == 30
    rows, _ = store.read(tmp_path / "out")
    assert all(r.provenance["pretraining"] == {"precision": "bf16"} for r in rows)
    found = values(tmp_path / "out")
    trunk, projector = "analyze-trunk-test-v1", "analyze-projector-test-v1"
    wanted = {
        ("plain", trunk),
        ("headed", trunk),
        ("flat", trunk),
        ("headed", projector),
    }
    assert {key[:2] for key in found} == wanted
    # 2. Features that do not differ
    assert found["flat", trunk, "nuclear_norm"] == pytest.approx(6**0.5, rel=1e-6)
    assert found["flat", trunk, "view_cosine"] == pytest.approx(1.0)
    assert found["flat", trunk, "collapse"] == 2
    assert found["flat", trunk, "live_directions"] == 0
    assert found["flat", trunk, "min_max_contrast"] is None
    assert found["flat", trunk, "class_overlap"] == pytest.approx(100)
    # 3. A random trunk keeps what is in the pixels: it is neither collapsed nor blind to the class.
    assert found["plain", trunk, "collapse"] == 0
    assert found["plain", trunk, "knn"] > 20
    assert 6**0.5 < found["plain", trunk, "nuclear_norm"] < 6
    # 4. The numbers by hand: the same views through torchvision's trunk, singular values by numpy
    config = load_analysis(str(small), None)
    everything = catalog.load("digits", tiny_root).test
    chosen = analyze.choose_images(everything, 30, 0)
    augment = AnalyzedViews(chosen, config, 0)
    for file, protocol, projection in (
        (given[0], trunk, None),
        (given[1], projector, head.eval()),
    ):
        checkpoint = Checkpoint.load(file)
        network = checkpoint.backbone().eval()
        norms = []
        cosines = []
        outputs = []
        with torch.no_grad():
            for i in range(30):
                features = network(normalise(augment[i][0], checkpoint.pixels))
                if projection is not None:
                    features = projection(features)
                outputs.append(features.double())
                rows = features[1:].double().numpy()
                rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
                norms.append(np.linalg.svd(rows, compute_uv=False).sum())
                cosines.append(np.mean([[a @ b for a in rows] for b in rows]))
        key = (checkpoint.name, protocol)
        assert found[*key, "nuclear_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
        assert found[*key, "view_cosine"] == pytest.approx(np.mean(cosines), rel=1e-4)
        groups = stats.Groups(outputs[0].shape[1])
        groups.add(torch.stack(outputs)[:, 1:])
        assert found[*key, "lidar"] == pytest.approx(groups.lidar(), rel=1e-4)
        eigenvalues = np.linalg.eigvalsh(np.cov(torch.stack(outputs)[:, 0].T.numpy()))
        alpha = stats.alpha_req(torch.from_numpy(eigenvalues).flip(0))
        assert found[*key, "alpha_req_2_9"] == pytest.approx(alpha, rel=1e-4)
    # 5. The pictures, and the summary that they are drawn from
    names = {p.name for p in (tmp_path / "out" / "pictures").iterdir()}
    for panel in (
        "kept-overview",
        "trunk-overview",
        "kept-nuclear_norm",
        "kept-distances",
        "kept-spectrum",
    ):
        assert {f"{panel}.svg", f"{panel}.png"} <= names
    summary = json.loads((tmp_path / "out" / "analysis.json").read_text())
    spaces = [(s["name"], s["space"], s["dim"]) for s in summary["spaces"]]
    assert spaces == [
        ("plain", "trunk", 512),
        ("headed", "trunk", 512),
        ("headed", "projector", 16),
        ("flat", "trunk", 512),
    ]
    # 6. The same command again has nothing to do.
    lines = (tmp_path / "out" / "results.jsonl").read_bytes()
    decoder.paths.clear()
    assert run(given, tiny_root, tmp_path / "out", small) == 0
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == lines
    assert not decoder.paths
    # 7. Where rows are missing it is not done, and adds those that are missing.
    monkeypatch.setattr(analyze_pictures, "draw", lambda *_: [])  # once is enough
    before = values(tmp_path / "out")
    half = b"".join(lines.splitlines(keepends=True)[::2])
    (tmp_path / "out" / "results.jsonl").write_bytes(half)
    assert run(given, tiny_root, tmp_path / "out", small) == 0
    completed = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert completed.startswith(half)
    assert completed.count(b"\n") == lines.count(b"\n")
    assert values(tmp_path / "out") == before


def test_projector_and_trunk_never_share_a_panel(tmp_path, monkeypatch) -> None:
    panels: list[list[tuple[str, str]]] = []

    def panel(ax, spaces, colors) -> None:
        panels.append([(s["name"], s["space"]) for s in spaces])

    monkeypatch.setattr(analyze_pictures, "PANELS", {"one": panel})
    spaces = [
        ("plain", "trunk"),
        ("headed", "trunk"),
        ("headed", "projector"),
        ("flat", "trunk"),
    ]
    about = []
    for name, space in spaces:
        about.append({"name": name, "space": space, "checkpoint": name, "dim": 8})
    summary = {"spaces": about, "dataset": "digits", "images": 30, "augmentations": 4}
    analyze_pictures.draw(summary, tmp_path)
    alone = [("headed", "projector")]
    trunks = [s for s in spaces if s[1] == "trunk"]
    assert sorted(panels) == sorted([alone, alone, trunks])


def test_a_stopped_run_continues_to_the_same_numbers(
    tiny_root, tmp_path, decoder, monkeypatch, capsys
):
    # Pictures take most of the time.
    monkeypatch.setattr(analyze_pictures, "draw", lambda *_: [])
    files = [save(tmp_path, 0, "plain", arch=SMALL_TRUNK)]
    small = recipe(tmp_path, 18)
    assert run(files, tiny_root, tmp_path / "whole", small) == 0
    whole = decoder.paths.copy()
    decoder.paths.clear()
    decoder.at[10] = terminate  # in the third batch of four
    assert run(files, tiny_root, tmp_path / "cut", small) == 75
    assert not (tmp_path / "cut" / "results.jsonl").exists()
    assert len(decoder.paths) == 12
    assert run(files, tiny_root, tmp_path / "cut", small) == 0
    assert decoder.paths == whole, "each image once, in order"
    assert values(tmp_path / "cut") == values(tmp_path / "whole")
    assert not list((tmp_path / "cut").glob("state/*"))
    rows_and_summary_tell_of(tmp_path / "whole", files[0], tiny_root, small)
    # The folder is of these weights, these images and this seed
    other = [save(tmp_path, 1, "other", arch=SMALL_TRUNK)]
    for given, count, more, differs in (
        (other, 18, (), "differs in checkpoints"),
        (files, 17, (), "images, recipe"),
        (files, 18, ("--seed", "1"), "seed"),
    ):
        by = recipe(tmp_path, count)
        assert run(given, tiny_root, tmp_path / "whole", by, *more) == 2
        said = capsys.readouterr().err
        assert "another run's state" in said and differs in said


def rows_and_summary_tell_of(out, file, root, small):
    """Hold what stands beside the numbers of a run on one checkpoint and 18 digits."""
    checkpoint = Checkpoint.load(file)
    images = analyze.choose_images(catalog.load("digits", root).test, 18, 0)
    rows, _ = store.read(out)
    for row in rows:
        about = row.provenance
        assert about["recipe"] == config.to_dict(load_analysis(str(small), None))
        assert about["manifest"] == splits.digest(images)
        assert (about["images"], about["sample"]) == (18, 18)
        assert about["space"] == "trunk, 128 dimensions"
        assert (row.dataset, row.split, row.seed) == ("digits", "test", 0)
    summary = json.loads((out / "analysis.json").read_text())
    (space,) = summary.pop("spaces")
    assert summary == {
        "dataset": "digits",
        "images": 18,
        "augmentations": 6,
        "training": [],
    }
    assert space["numbers"] == {row.metric: row.value for row in rows}
    assert (space["name"], space["method"]) == ("plain", "random")
    assert (space["checkpoint"], space["space"]) == (checkpoint.digest, "trunk")
    assert space["dim"] == len(space["spectrum"]) == 128
    assert set(space["histograms"]) == set(stats.PER_IMAGE)


def test_the_projector_of_our_own_heads_is_rebuilt() -> None:
    kinds = [
        _heads.MOCO_HEAD,
        _heads.SIMCLR_HEAD,
        _heads.MIO_HEAD,
        _heads.BARLOW_HEAD,
        _heads.Head(layers=1, dim=7),
        _heads.Head(layers=3, hidden=9, dim=5, last_batchnorm=True, last_affine=False),
    ]
    for kind in kinds:
        seeding.seed_everything("heads")
        head = _heads.build_head(kind, 32).train()
        # So that running statistics are not the initial ones
        head(torch.randn(40, 32) + 1)
        tensors = {f"projector.{k}": v for k, v in head.state_dict().items()}
        tensors["predictor.0.weight"] = torch.zeros(32, 32)
        built = build_projector(tensors, 32)
        x = torch.randn(6, 32)
        assert built is not None, kind
        assert torch.equal(built(x), head.eval()(x)), kind


def test_heads_of_another_form_are_left_alone() -> None:
    weight = torch.zeros(8, 32)
    assert build_projector({}, 32) is None
    assert build_projector({"fc.weight": weight}, 32) is None  # a classifier
    assert build_projector({"predictor.0.weight": weight}, 32) is None
    # A head of another trunk
    assert build_projector({"projector.0.weight": weight}, 16) is None
    unknown = {"projector.0.weight": weight, "projector.last.scale": weight}
    assert build_projector(unknown, 32) is None
    linear = {"encoder_q.fc.0.weight": weight, "encoder_q.fc.0.bias": torch.zeros(8)}
    assert build_projector(linear, 32) is not None


@pytest.mark.parametrize(
    "words, message",
    [
        (["--augmentations", "1"], "--augmentations 1: from 2 to 10000"),
        (["--devices", "2"], "analyze runs in one process"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    tiny_root, tmp_path, capsys, words, message
):
    files = [save(tmp_path, 0, "plain", arch=SMALL_TRUNK)]
    assert run(files, tiny_root, tmp_path / "out", recipe(tmp_path, 8), *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_probes_recipe_is_named_as_one() -> None:
    said = "^--recipe knn: is a probe's, for `backbench linear --protocol knn`"
    with pytest.raises(BadInput, match=said):
        load_analysis("knn", None)


def test_another_number_of_views_is_another_column() -> None:
    config = load_analysis("analyze_demo", 8)
    assert config.augmentations == 8
    assert config.name("trunk") == "analyze-trunk-8views-demo-v1"
    assert load_analysis("analyze", None).name("projector") == "analyze-projector-v1"


PEAK = """
import resource, sys
from backbench.cli import program
assert program.main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images(tmp_path) -> None:
    root = embedded.build(tmp_path / "data")
    file = save(tmp_path, 0, "plain")
    peaks = []
    for count in (64, 700):
        words = command([file], root, tmp_path / f"out{count}", recipe(tmp_path, count))
        line = [sys.executable, "-c", PEAK, *words]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    print(f"peak memory: 64 images {peaks[0]:.0f} MiB, 700 images {peaks[1]:.0f} MiB")
    assert peaks[1] < peaks[0] + 15
