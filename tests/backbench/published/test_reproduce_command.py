"""`backbench reproduce` from a public file to the bundle; importing and measuring are stand-ins."""

import hashlib
import json
import logging
import re
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import fake_verbs
from support.records import a_result

from backbench.cli import program, reproduce
from backbench.datasets import availability
from backbench.errors import BadInput
from backbench.published import reproduction_lists, timm_scores
from backbench.published.public_files import FoundFile
from backbench.records import store
from backbench.requests.published import ReproduceRequest
from backbench.weights import header, importing

DINO = {"name": "dino", "method": "dino", "arch": "resnet50", "epochs": None}
KNN = {"task": "knn", "dataset": "imagenet", "protocol": "knn-dino-v1"}


class Trial:
    """A list of two checkpoints, of which `dino` is there; its kNN number is printed as 67.5."""

    def __init__(self, root) -> None:
        self.root = root
        shipped = reproduction_lists.read_list("short").checkpoints
        checkpoints = {}
        for name in ("dino", "moco_v2_200"):
            # Without a digest, any file is the published one
            keys = shipped[name].items()
            about = {k: v for k, v in keys if k not in ("md5", "sha256", "digest_page")}
            checkpoints[name] = about | {"file": "a.pth"}
        self.content = {
            "title": "kNN alone",
            "estimate": "not measured",
            "checkpoints": checkpoints,
            "parts": [self.part("dino", "imagenet"), self.part("moco_v2_200", "dtd")],
        }
        for folder in ("data", "files/dino"):
            (root / folder).mkdir(parents=True)
        (root / "files" / "dino" / "a.pth").write_bytes(b"weights")
        self.imported: list[dict] = []
        self.commands: list[list[str]] = []
        self.grids: list[dict] = []
        self.measures: float | None = 67.1
        self.status = 0

    def part(self, name, dataset):
        evaluate = {"verb": "linear", "protocol": "knn_dino", "datasets": [dataset]}
        return {"title": name, "only": [name], "gpu_hours": 2.0, "evaluate": [evaluate]}

    @property
    def runs(self):
        return self.root / "runs"

    def read(self, source, **about):
        """Import a file: the checkpoint says which one it was."""
        self.imported.append({"source": source, **about})

        def save(out):
            sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
            provenance = {"sha256": sha256}
            fake_verbs.write_checkpoint(out, about["name"], provenance=provenance)

        return SimpleNamespace(save=save, arch="resnet50", digest="d" * 64)

    def run_command(self, words):
        """Launch a grid: one row of each of its checkpoints."""
        self.commands.append(words)
        grid = json.loads(Path(words[2]).read_text())
        self.grids.append(grid)
        if self.measures is not None:
            (file,) = grid["checkpoints"]
            about = {**DINO, **KNN, "checkpoint": header.digest(file)}
            row = a_result(**about, metric="top1_k20", value=self.measures)
            store.append(self.runs / "a", [row], skip_known=True)
        return self.status

    def reproduce(self, **more):
        file = self.root / "mine.yaml"
        file.write_text(json.dumps(self.content))  # JSON is YAML
        given = {"list": str(file), "data": self.root / "data", "out": self.runs}
        request = ReproduceRequest(**given, **{"files": self.root / "files", **more})
        return reproduce.run(request, self.run_command)

    def table(self):
        return (self.runs / "reproduce" / "mine.md").read_text()


@pytest.fixture
def trial(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "backbench")
    ours = Trial(tmp_path)
    monkeypatch.setattr(importing, "read", ours.read)
    monkeypatch.setattr(availability, "all_there", lambda *_: None)
    return ours


def test_a_file_is_imported_measured_and_compared(trial, capsys, caplog):
    outcome = trial.reproduce(cluster="debug", overrides=("cluster.jobs=2",))
    assert outcome.status == 0
    (imported,) = trial.imported
    assert imported["source"] == trial.root / "files" / "dino" / "a.pth"
    assert (imported["name"], imported["method"]) == ("dino", "dino")
    assert "about 2.0 GPU-hours for 1 checkpoints (not measured)" in caplog.text
    assert "moco_v2_200: no " in caplog.text
    # 1. One grid, as the other part has no file
    (words,) = trial.commands
    assert words[:2] == ["launch", "run"]
    assert words[3] == "cluster.jobs=2"
    options = dict(zip(words[4:-1:2], words[5:-1:2], strict=True))
    assert options == {
        "--cluster": "debug",
        "--data": str(trial.root / "data"),
        "--out": str(trial.runs),
    }
    assert words[-1] == "--data-later"
    (grid,) = trial.grids
    assert grid["checkpoints"] == [str(trial.runs / "checkpoints" / "dino.safetensors")]
    assert grid["evaluate"][0]["datasets"] == ["imagenet"]
    # 2. The table, its JSON and the bundle
    said = "| dino | knn/imagenet/top1_k20@knn-dino-v1 | 67.5 | 67.10 |"
    assert said in capsys.readouterr().out
    assert said in trial.table()
    verdicts = json.loads((trial.runs / "reproduce" / "mine.json").read_text())
    (found,) = [one for one in verdicts if "top1_k20" in one["column"]]
    assert (found["verdict"], found["measured"]) == ("within", 67.1)
    assert [one.verdict for one in outcome.document if one.measured] == ["within"]
    sent = trial.runs / "reproduce" / "mine.zip"
    assert zipfile.is_zipfile(sent)
    assert program.main(["reproduce", "--check", str(sent)]) == 0
    assert "its table follows from its rows" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "status"), [(67.1, 0), (61.0, 1)])
def test_a_number_outside_of_the_printed_ones_fails(trial, value, status):
    trial.measures = value
    assert trial.reproduce().status == status


def test_jobs_that_fail_are_the_status(trial):
    trial.status = 1
    assert trial.reproduce().status == 1
    assert "67.10" in trial.table()  # what there is, is compared all the same


def test_a_part_that_fails_ends_no_other_and_a_stop_does(trial):
    (trial.root / "files" / "moco_v2_200").mkdir()
    (trial.root / "files" / "moco_v2_200" / "a.pth").write_bytes(b"others")
    run = trial.run_command

    def ending(*statuses):
        ends = iter(statuses)
        trial.commands.clear()
        trial.run_command = lambda words: run(words) or next(ends)
        return trial.reproduce().status, len(trial.commands)

    assert ending(1, 0) == (1, 2)
    assert ending(0, 3) == (3, 2)
    assert ending(75) == (75, 1)


def test_a_stop_ends_without_an_outcome(trial):
    trial.status = 75
    assert trial.reproduce().status == 75
    assert not (trial.runs / "reproduce" / "mine.md").exists()


def test_the_same_command_imports_nothing_twice(trial):
    trial.reproduce()
    trial.reproduce()
    assert len(trial.imported) == 1
    # Another file under the same name is imported
    (trial.root / "files" / "dino" / "a.pth").write_bytes(b"other weights")
    trial.reproduce()
    assert len(trial.imported) == 2


def test_a_dry_run_shows_the_jobs_of_the_file_itself_and_leaves_nothing(trial, caplog):
    trial.measures = None
    assert trial.reproduce(dry_run=True).status == 0
    assert trial.imported == []
    (words,) = trial.commands
    assert words[-1] == "--dry-run"
    (grid,) = trial.grids
    assert grid["checkpoints"] == [str(trial.root / "files" / "dino" / "a.pth")]
    assert not trial.runs.exists()


def test_data_that_are_missing_here_are_said_before_anything_runs(trial, monkeypatch):
    asked = []
    monkeypatch.setattr(availability, "all_there", lambda *words: asked.append(words))
    trial.reproduce()
    trial.reproduce(cluster="debug")
    assert asked == [(["imagenet"], trial.root / "data")] * 2
    # On a cluster they may lie where this machine cannot see them
    cluster = trial.root / "ours.yaml"
    cluster.write_text("kind: slurm\n")
    trial.reproduce(cluster=str(cluster))
    assert len(asked) == 2


def refuse(*_, **__):
    raise BadInput("a.pth: no format of ours")


def test_a_file_that_cannot_be_imported_ends_the_command(trial, monkeypatch):
    monkeypatch.setattr(importing, "read", refuse)
    with pytest.raises(BadInput, match="no format of ours"):
        trial.reproduce()
    assert trial.commands == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only": ("dnio",)}, "--only dnio: .*dino"),
        ({"only": ("moco_v2_200",)}, "none of the files of 'mine' is below"),
        ({"data": None}, "--data ROOT: "),
        ({"list": "timm-v9"}, "timm-v9: .*timm-v2"),
        ({"models": ("resnet18.a1_in1k",)}, "--models is for .*timm-v2.*; give --only"),
    ],
)
def test_a_mistake_is_said_before_anything_runs(trial, given, said):
    given = {"list": str(trial.root / "mine.yaml"), **given}
    (trial.root / "mine.yaml").write_text(json.dumps(trial.content))
    request = {"data": trial.root / "data", "out": trial.runs, **given}
    whole = ReproduceRequest(files=trial.root / "files", **request)
    with pytest.raises(BadInput, match=said):
        reproduce.run(whole, trial.run_command)
    assert trial.commands == []


def test_only_some_of_the_checkpoints(trial):
    trial.content["parts"].append(trial.part("moco_v2_200", "imagenet"))
    (trial.root / "files" / "moco_v2_200").mkdir()
    (trial.root / "files" / "moco_v2_200" / "a.pth").write_bytes(b"others")
    trial.reproduce(only=("dino",))
    assert [each["name"] for each in trial.imported] == ["dino"]
    assert len(trial.commands) == 1
    trial.reproduce()
    assert {each["name"] for each in trial.imported} == {"dino", "moco_v2_200"}
    assert len(trial.commands) == 4


def test_the_lists_are_printed(trial, capsys):
    request = ReproduceRequest()
    document = reproduce.run(request, trial.run_command).document
    said = capsys.readouterr().out
    assert {"short", "full", "vits", "heads"} <= {one["name"] for one in document}
    short = next(one for one in document if one["name"] == "short")
    assert "dino" in short["checkpoints"] and 0 < short["gpu_hours"] <= 1.0
    line = f"short +{len(short['checkpoints'])} checkpoints, .*: about "
    assert re.search(rf"^{line}", said, re.MULTILINE)
    assert "timm-v2" in said


# timm's printed counts


@pytest.fixture
def printed():
    """Models of which timm prints a count on ImageNetV2: one at one size, and one at two."""
    dataset = timm_scores.LISTS["timm-v2"]
    scores = timm_scores.scores()
    sizes = Counter(model for model, _, of in scores if of == dataset)
    one = min(model for model, count in sizes.items() if count == 1)
    two = min(model for model, count in sizes.items() if count == 2)
    return one, two


def test_timms_models_are_measured_at_the_sizes_that_are_printed(printed):
    one, two = printed
    listed = reproduction_lists.timm_list("timm-v2", [two, one, one])
    assert list(listed.checkpoints) == sorted([one, two])
    own, train_size = listed.parts
    assert (own.evaluate[0]["protocol"], own.only) == (
        "ood_own",
        tuple(sorted([one, two])),
    )
    assert train_size.evaluate[0]["protocol"] == "ood_own_train_size"
    assert train_size.only == (two,)
    # 10,000 images at 1,200 a second, for each of three measurements
    assert listed.gpu_hours([one, two]) == pytest.approx(3 * 10_000 / 1200 / 3600)
    assert "1,200 images a second" in listed.estimate
    about = listed.files[one]
    assert (about.timm, about.file) == (one, "model.safetensors")
    assert about.page == f"https://huggingface.co/timm/{one}"
    alone = reproduction_lists.timm_list("timm-v2", [one])
    assert len(alone.parts) == 1


def test_without_models_those_of_the_cache_are_taken(printed, monkeypatch):
    _, two = printed
    monkeypatch.setattr(reproduction_lists, "_is_cached", lambda model: model == two)
    assert list(reproduction_lists.timm_list("timm-v2", []).checkpoints) == [two]
    monkeypatch.setattr(reproduction_lists, "_is_cached", lambda model: False)
    with pytest.raises(BadInput, match="the Hub's cache on this machine holds none of"):
        reproduction_lists.timm_list("timm-v2", [])
    with pytest.raises(BadInput, match="--models resnet18"):
        reproduction_lists.timm_list("timm-v2", ["resnet18.a9_in1k"])


def test_a_model_of_the_cache_that_cannot_be_imported_is_left_out(
    trial, printed, monkeypatch, caplog
):
    """It was not asked for by its name; the others are measured."""
    one, two = printed
    listed = reproduction_lists.timm_list("timm-v2", [one, two])
    found = {}
    for name in (one, two):
        path = trial.root / name
        path.write_bytes(b"weights")
        about = listed.files[name]
        sha256 = hashlib.sha256(b"weights").hexdigest()
        found[name] = FoundFile(path, about, 7, sha256, "")

    def read(source, **about):
        if about["name"] == two:
            raise BadInput("no classifier")
        assert source == f"timm:{one}"
        return SimpleNamespace(save=lambda out: None, arch="x", digest="d" * 64)

    monkeypatch.setattr(importing, "read", read)
    request = ReproduceRequest(list="timm-v2", out=trial.runs)
    assert list(reproduce._import_files(request, found)) == [one]
    assert f"{two}: left out: no classifier" in caplog.text
    named = ReproduceRequest(list="timm-v2", out=trial.runs, models=(one, two))
    with pytest.raises(BadInput, match="no classifier"):
        reproduce._import_files(named, found)
