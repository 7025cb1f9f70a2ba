"""Numbers as other places read them, and back: Every Eval Ever, the Hub, CSV."""

import csv
import dataclasses
import hashlib
import json
import math
import uuid
from collections import Counter
from pathlib import Path

import pytest
from support import boards, records

from backbench.board import every_eval_ever, hub_results
from backbench.board.board import collect
from backbench.cli import program
from backbench.records import store
from backbench.untrusted import yamls

DEMO = Path(__file__).parents[3] / "docs" / "demo" / "records"


def export(runs, to, out, *more):
    words = ["export-results", str(runs), "--to", to, "--out", str(out), "-q", *more]
    return program.main(words)


def refused(capsys, runs, to, out, *more):
    assert export(runs, to, out, *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not out.exists()
    return line


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The demo's records as those of Every Eval Ever."""
    out = tmp_path_factory.mktemp("eee") / "out"
    more = ("--organization", "north", "--model", "lorac-demo=south/lorac")
    assert export(DEMO, "eee", out, *more) == 0
    return out


def numbers(out):
    for file in every_eval_ever.files_below(out):
        yield from json.loads(file.read_text())["evaluation_results"]


def by_id(out, result):
    """The exported forms of a result: those whose own line it is."""
    found = []
    for number in numbers(out):
        line = json.loads(number["score_details"]["details"][every_eval_ever.LINE])
        if all(line[key] == getattr(result, key) for key in store.KEY_NAMES):
            found.append(number)
    return found


def test_every_number_is_there_once_by_its_name_elsewhere(exported):
    results, _ = store.read(DEMO)
    for result in results:
        found = by_id(exported, result)
        if result.value is None:
            assert found == []
            continue
        (number,) = found
        score = number["score_details"]
        assert score["score"] == pytest.approx(result.value / 100, abs=1e-12)
        assert ("uncertainty" in score) == (result.ci95 is not None)
        if result.ci95 is not None:
            interval = score["uncertainty"]["confidence_interval"]
            assert interval["lower"] == pytest.approx(result.ci95[0] / 100)
            assert interval["upper"] == pytest.approx(result.ci95[1] / 100)
        expected = {
            "top1": "accuracy",
            "top1_k5": "accuracy",
            "top1_k20": "accuracy",
            "bbox_AP": "mean_average_precision",
            "bbox_AP50": "mean_average_precision_50",
            "segm_APs": "mean_average_precision_small",
        }
        if result.metric in expected:
            assert number["metric_config"]["metric_id"] == expected[result.metric]


def test_models_have_the_names_that_the_user_gives(exported):
    models = {}
    for file in every_eval_ever.files_below(exported):
        record = json.loads(file.read_text())
        model = record["model_info"]
        models[model["name"]] = model
        assert file.parent == exported / "data" / "backbench" / model["id"]
        by_maker = model["developer"] == "north"
        told = record["source_metadata"]["evaluator_relationship"]
        assert told == ("first_party" if by_maker else "third_party")
    assert models["lorac-demo"]["id"] == "south/lorac"
    assert models["random-demo"]["id"] == "north/random-demo-f7103677"


def test_the_same_numbers_have_the_same_files(exported, tmp_path):
    more = ("--organization", "north", "--model", "lorac-demo=south/lorac")
    export(DEMO, "eee", tmp_path / "again", *more)
    names = [
        sorted(str(file.relative_to(out)) for file in every_eval_ever.files_below(out))
        for out in (exported, tmp_path / "again")
    ]
    assert names[0] == names[1]


def test_merge_reads_them_back_as_unbacked(exported, tmp_path, capsys):
    merging = ["merge", f"north={exported}", "--out", str(tmp_path / "C")]
    assert program.main(merging) == 0
    assert "73 numbers" in capsys.readouterr().out
    board = collect([tmp_path / "C"])
    original = collect([DEMO])
    assert board.columns == [c for c in original.columns if c in board.columns]
    assert not board.problems
    for key, cell in board.cells.items():
        assert cell.value == pytest.approx(original.cells[key].value, abs=1e-9)
        ranked = any(part.result.task != "analyze" for part in cell.parts)
        assert not (ranked and cell.backed), "nothing is kept beside it"


def change(out, edit):
    """Edit the first number of one record in place."""
    file = every_eval_ever.files_below(out)[0]
    record = json.loads(file.read_text())
    edit(record["evaluation_results"][0]["score_details"])
    file.write_text(json.dumps(record))
    return file


@pytest.fixture
def one(tmp_path):
    """The record of one checkpoint with two numbers."""
    boards.synthetic(tmp_path / "runs", ["x"], boards.DEMO[:2], images=50)
    export(tmp_path / "runs", "eee", tmp_path / "eee", "--organization", "north")
    return tmp_path / "eee"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda d: d.update(score=0.999), "its score is 0.999, its own line says"),
        (lambda d: d.update(score="0.5"), "its score is no number"),
        (lambda d: d.pop("details"), "so its protocol is not known"),
        (lambda d: d.pop("score"), "it has no score_details with a score"),
        (lambda d: d["details"].update(backbench_result="{"), "no line of results"),
        (lambda d: d["details"].update(backbench_result="[]"), "a list, not a result"),
    ],
)
def test_a_number_that_does_not_follow_is_named(one, tmp_path, edit, why, caplog):
    change(one, edit)
    merging = ["merge", f"north={one}", "--out", str(tmp_path / "C")]
    with caplog.at_level("WARNING", logger="backbench"):
        assert program.main(merging) == 0
    (line,) = [r.getMessage() for r in caplog.records]
    assert why in line and "evaluation_results[0]" in line
    assert len(collect([tmp_path / "C"]).columns) == 1


def test_a_record_may_not_name_files(one):
    """It could name those of another run below the same folder."""

    def name_a_file(details):
        line = json.loads(details["details"][every_eval_ever.LINE])
        line["provenance"]["predictions"] = "predictions/x.npz"
        details["details"][every_eval_ever.LINE] = json.dumps(line)

    file = change(one, name_a_file)
    first, _ = every_eval_ever.read_file(file)
    assert "names a file of a run ('predictions')" in first


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"evaluation_results": 3}', "\0"])
def test_what_is_no_record_is_named(tmp_path, text):
    file = tmp_path / "00000000-0000-4000-8000-000000000000.json"
    file.write_text(text)
    (line,) = every_eval_ever.read_file(file)
    assert "no record of Every Eval Ever" in line


def test_fifty_records_pass_their_own_validator(tmp_path):
    """By `pip install every-eval-ever`, which takes Python 3.12."""
    core = pytest.importorskip(
        "every_eval_ever.validator.validation_core",
        reason="every-eval-ever is not installed",
    )
    names = [f"model {n}/50: ViT-S" for n in range(50)]
    boards.synthetic(tmp_path / "runs", names, boards.DEMO[:3], images=40, gap=0.3)
    rows = [
        records.a_result(name=names[0], task="calibration", metric=metric, value=value)
        for metric, value in (("nll", 2.5), ("ece", 3.0))
    ]
    store.append(tmp_path / "runs" / "unranked", rows)
    out = tmp_path / "out"
    assert export(tmp_path / "runs", "eee", out, "--organization", "north") == 0
    files = every_eval_ever.files_below(out)
    assert len(files) >= 50
    for file in files:
        path = file.relative_to(out).as_posix()
        report = core.validate_aggregate(file, repo_path=path, run_semantic_checks=True)
        assert report.valid and not report.errors, (path, report.errors)
        assert not report.warnings, (path, report.warnings)
    assert core.get_schema_version() == every_eval_ever.SCHEMA_VERSION


def test_the_hub_reads_what_is_written_for_it(tmp_path):
    """By its own library: the card's `model-index`, and the entries of .eval_results."""
    from huggingface_hub import ModelCard, parse_eval_result_entries

    more = ("--organization", "north", "--model", "lorac-demo=south/lorac")
    more += ("--benchmark", "digits=south/digits:classify")
    assert export(DEMO, "hub", tmp_path / "hub", *more) == 0
    results, _ = store.read(DEMO)
    of_lorac = [r for r in results if r.name == "lorac-demo" and r.value is not None]
    card = ModelCard.load(tmp_path / "hub" / "south" / "lorac" / "README.md")
    assert card.data.model_name == "lorac-demo"
    told = sorted(one.metric_value for one in card.data.eval_results)
    assert told == sorted(round(r.value, 4) for r in of_lorac)
    tasks = Counter(one.task_type for one in card.data.eval_results)
    assert tasks["image-classification"] and tasks["object-detection"]
    for kind, task in (
        ("segm", "image-segmentation"),
        ("keypoints", "keypoint-detection"),
    ):
        count = sum(r.metric.startswith(kind) for r in of_lorac)
        assert tasks[task] == count > 0, task
    files = sorted((tmp_path / "hub" / "south" / "lorac" / ".eval_results").iterdir())
    on_digits = [r for r in of_lorac if r.dataset == "digits"]
    assert len(files) == len(on_digits), "one number a file"
    notes = set()
    for file in files:
        (entry,) = parse_eval_result_entries(yamls.read(file))
        assert (entry.dataset_id, entry.task_id) == ("south/digits", "classify")
        assert entry.value in told
        notes.add(entry.notes)
    assert len(notes) == len(files), "the notes tell them apart"


def test_csv_has_a_row_for_each_number(tmp_path):
    assert export(DEMO, "csv", tmp_path / "csv") == 0
    with (tmp_path / "csv" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    results, _ = store.read(DEMO)
    values = sorted(r.value / 100 for r in results if r.value is not None)
    assert sorted(float(row["score"]) for row in rows) == pytest.approx(values)


def test_names_of_datasets_are_those_of_their_owners(tmp_path):
    store.append(tmp_path / "run", [records.a_result(dataset="cifar10")])
    assert export(tmp_path / "run", "csv", tmp_path / "csv") == 0
    assert "uoft-cs/cifar10" in (tmp_path / "csv" / "results.csv").read_text()
    more = ("--organization", "north")
    assert export(tmp_path / "run", "eee", tmp_path / "eee", *more) == 0
    (number,) = numbers(tmp_path / "eee")
    assert number["source_data"]["hf_repo"] == "uoft-cs/cifar10"


def test_what_is_no_share_keeps_its_scale(tmp_path):
    row = records.a_result(task="calibration", metric="nll", value=2.5, ci95=(2.0, 3.0))
    store.append(tmp_path / "run", [row])
    export(tmp_path / "run", "eee", tmp_path / "eee", "--organization", "north")
    (number,) = numbers(tmp_path / "eee")
    metric = number["metric_config"]
    assert metric["metric_id"] == "backbench.calibration.nll"
    assert metric["lower_is_better"] and metric["max_score"] == "Infinity"
    assert math.isclose(number["score_details"]["score"], 2.5)
    export(tmp_path / "run", "hub", tmp_path / "hub", "--organization", "north")
    (card,) = (tmp_path / "hub").rglob("README.md")
    assert "nll" in card.read_text() and "%" not in card.read_text().partition("95%")[0]


DETECTED = records.a_result(
    checkpoint="d" * 64,
    name="their trunk",
    epochs=None,
    task="mask_rcnn",
    dataset="coco2017",
    split="val",
    metric="segm_APs",
    value=37.125,
    ci95=(36.0, 39.5),
    protocol="detection-1x-v1",
    engine="detectron2",
    seed=3,
    provenance={
        "manifests": {"train": None, "val": "f" * 64},
        "predictions": "predictions/x.npz",
        "scores": "scores/x.npz",
    },
    origin={
        "recorded": 1000.5,
        "code": "abc",
        "versions": {"backbench": "0.1.0"},
        "command": "backbench detect --out /home/me/runs",
        "cwd": "/home/me",
        "verified": 2,
    },
)
OLDER = dataclasses.replace(
    DETECTED,
    metric="segm_AP",
    value=100.00000001,
    ci95=None,
    engine=None,
    provenance={},
    origin={
        "recorded": 900.0,
        "versions": {"backbench": "0.2.0"},
        "command": ["backbench", "detect", "/home/me/x"],
    },
)


def test_a_record_says_all_that_a_number_says():
    none = dataclasses.replace(DETECTED, value=None, metric="segm_APl")
    ours = records.a_result(name="my trunk", epochs=7, provenance={})
    given = [none, OLDER, DETECTED, ours]
    models = {"their trunk": "south/trunk"}
    found = every_eval_ever.records(given, "north", models)
    (path, record), (own_path, own) = found.items()
    # 1. The record of a checkpoint, by its newest number
    numbers = record.pop("evaluation_results")
    content = json.dumps(numbers, sort_keys=True)
    digest = hashlib.sha256(content.encode())
    name = uuid.UUID(bytes=digest.digest()[:16], version=4)
    assert path == f"data/backbench/south/trunk/{name}.json"
    assert float(record.pop("retrieved_timestamp")) > 1.7e9
    assert record == {
        "schema_version": "0.3.0",
        "evaluation_id": f"backbench/south/trunk/{digest.hexdigest()[:16]}",
        "evaluation_timestamp": "1000.5",
        "source_metadata": {
            "source_name": "backbench",
            "source_type": "evaluation_run",
            "source_organization_name": "north",
            "evaluator_relationship": "third_party",
        },
        "eval_library": {
            "name": "backbench",
            "version": "0.1.0",
            "additional_details": {"code": "abc"},
        },
        "model_info": {
            "name": "their trunk",
            "id": "south/trunk",
            "developer": "south",
            "additional_details": {
                "deployment_type": "self_deployed",
                "model_availability": "open_weights",
                "checkpoint": "d" * 64,
                "arch": "resnet18",
                "pretraining_method": "simclr",
                "pretraining_epochs": "null",
            },
        },
    }
    # 2. Its numbers
    perfect, small = numbers
    line = json.loads(small["score_details"]["details"].pop("backbench_result"))
    assert line["provenance"] == {"manifests": {"train": None, "val": "f" * 64}}
    assert line["origin"] == {
        "recorded": 1000.5,
        "code": "abc",
        "versions": {"backbench": "0.1.0"},
        "command": "backbench detect --out runs",
    }
    key = ["d" * 64, "mask_rcnn/coco2017/segm_APs@detection-1x-v1+detectron2", "val", 3]
    assert small == {
        "evaluation_result_id": hashlib.sha256(json.dumps(key).encode()).hexdigest()[
            :32
        ],
        "evaluation_name": "backbench.mask_rcnn.coco2017",
        "source_data": {
            "dataset_name": "coco2017",
            "source_type": "other",
            "additional_details": {"split": "val", "images_val": "f" * 64},
        },
        "metric_config": {
            "evaluation_description": "Mask R-CNN, protocol detection-1x-v1",
            "metric_id": "mean_average_precision_small",
            "metric_name": "COCO APs (segm)",
            "metric_kind": "mean_average_precision",
            "metric_unit": "proportion",
            "metric_parameters": {"iou_type": "segm"},
            "lower_is_better": False,
            "score_type": "continuous",
            "min_score": 0.0,
            "max_score": 1.0,
        },
        "score_details": {
            "score": pytest.approx(0.37125),
            "details": {},
            "uncertainty": {
                "confidence_interval": {
                    "lower": 0.36,
                    "upper": 0.395,
                    "confidence_level": 0.95,
                }
            },
        },
        "generation_config": {
            "additional_details": {
                "protocol": "detection-1x-v1",
                "seed": "3",
                "engine": "detectron2",
                "command": "backbench detect --out runs",
            }
        },
    }
    assert perfect["score_details"]["score"] == 1.0
    assert perfect["score_details"].keys() == {"score", "details"}
    assert perfect["generation_config"]["additional_details"] == {
        "protocol": "detection-1x-v1",
        "seed": "3",
        "command": '["backbench", "detect", "x"]',
    }
    # 3. A model without a name on the Hub has one of its maker's own
    assert own_path.startswith("data/backbench/north/my-trunk-aaaaaaaa/")
    about = own["model_info"]["additional_details"]
    assert (about["model_availability"], about["pretraining_epochs"]) == (
        "unknown",
        "7",
    )
    assert own["source_metadata"]["evaluator_relationship"] == "first_party"
    assert own["eval_library"]["version"] == "unknown"
    assert own["eval_library"]["additional_details"] == {"code": "unknown"}
    assert "evaluation_timestamp" not in own


def test_a_card_and_an_entry_say_how_each_number_was_measured():
    of_errors = records.a_result(
        checkpoint="d" * 64,
        name="their trunk",
        task="calibration",
        metric="nll",
        dataset="birds|boats",
        value=2.123456,
        ci95=None,
        seed=1,
        provenance={},
    )
    benchmarks = {"coco2017": hub_results.Benchmark("org/coco", "detect")}
    given = [DETECTED, OLDER, of_errors, dataclasses.replace(OLDER, value=None)]
    models = {"their trunk": "south/trunk"}
    files = hub_results.files(given, "north", models, benchmarks)
    entries = "south/trunk/.eval_results/mask_rcnn-coco2017-"
    small = f"{entries}segm_APs-detection-1x-v1-detectron2-s3.yaml"
    whole = f"{entries}segm_AP-detection-1x-v1-s3.yaml"
    assert list(files) == ["south/trunk/README.md", small, whole]
    dataset = {"id": "org/coco", "task_id": "detect"}
    assert yamls.decode(files[small]) == [
        {
            "dataset": dataset,
            "value": 37.125,
            "date": "1970-01-01",
            "notes": "Mask R-CNN, COCO APs (segm) in %, detection-1x-v1, detectron2, seed 3",
        }
    ]
    (entry,) = yamls.decode(files[whole])
    assert entry["value"] == 100.0
    assert entry["notes"] == "Mask R-CNN, COCO AP (segm) in %, detection-1x-v1, seed 3"
    card = files["south/trunk/README.md"]
    _, head, body = card.split("---\n", 2)
    about = yamls.decode(head)
    assert about["tags"] == ["backbench", "self-supervised-learning"]
    (model,) = about["model-index"]
    assert model["name"] == "their trunk"
    # The Hub's library keeps the numbers of one task and dataset together
    found = [
        (kind["task"], kind["dataset"], metric)
        for kind in model["results"]
        for metric in kind["metrics"]
    ]
    segmented = {"type": "image-segmentation", "name": "Mask R-CNN"}
    coco = {"name": "coco2017", "type": "coco2017", "split": "val"}
    assert found[0] == (
        segmented,
        coco,
        {
            "type": "mean_average_precision_small",
            "value": 37.125,
            "name": "Mask R-CNN, COCO APs (segm) in %, detection-1x-v1, detectron2, seed 3",
        },
    )
    assert [metric["value"] for *_, metric in found] == [37.125, 100.0, 2.1235]
    assert found[2][0] == {
        "type": "image-classification",
        "name": "Calibration (less is better)",
    }
    assert body.splitlines() == [
        "",
        "# their trunk",
        "",
        "A resnet18, pretrained by simclr; measured by backbench.",
        f"The trunk's digest is `{'d' * 64}`.",
        "",
        "| measured | dataset | metric | value | 95% interval | protocol |",
        "|---|---|---|---:|---|---|",
        "| Mask R-CNN | coco2017 (val) | COCO APs (segm) in % | 37.12 | 36.00 to 39.50"
        " | detection-1x-v1 |",
        "| Mask R-CNN | coco2017 (val) | COCO AP (segm) in % | 100.00 |  | detection-1x-v1 |",
        "| Calibration (less is better) | birds\\|boats (test) | nll | 2.12 |  |"
        " linear-demo-v1 |",
    ]


def test_refusals(tmp_path, capsys):
    out = tmp_path / "out"
    line = refused(capsys, DEMO, "eee", out)
    assert "--organization ''" in line and "say who measured" in line
    north = ("--organization", "north")
    line = refused(capsys, DEMO, "eee", out, *north, "--model", "lorac=a/b")
    assert "--model lorac=...: no number has it" in line and "lorac-demo" in line
    line = refused(capsys, DEMO, "hub", out, *north, "--model", "lorac-demo=a")
    assert "it has the form ROW=ORG/REPO" in line
    line = refused(capsys, DEMO, "hub", out, *north, "--benchmark", "digits=a/b")
    assert "it has the form DATASET=ORG/NAME:TASK" in line
    both = ("--model", "lorac-demo=a/b", "--model", "simclr-demo=a/b")
    line = refused(capsys, DEMO, "hub", out, *north, *both)
    assert "would both be a/b" in line
    (tmp_path / "empty").mkdir()
    line = refused(capsys, tmp_path / "empty", "csv", out)
    assert "no number to export" in line
    out.mkdir()
    (out / "x").write_text("")
    assert export(DEMO, "csv", out) == 2
    assert "is there already" in capsys.readouterr().err
