"""What is scored on the way, and how the processes of a run wait for one another."""

import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from support.detection_loop import OneNumber
from support.detection_runs import run_of_config
from support.slurm_cluster import free_ports

from backbench.detection import evaluate, measure, process_group, train_net
from backbench.detection.protocol import decisive
from backbench.errors import BadInput, Failed
from backbench.images import contents
from backbench.records import store
from backbench.runs.state import StopFlag


@pytest.fixture
def run(tiny_root, tmp_path):
    words = ("MODEL.WEIGHTS", "random")
    return run_of_config("tiny_faster_rcnn_R_18_FPN", tiny_root, tmp_path, words)


def test_scores_on_the_way_are_one_line_a_step(run, monkeypatch):
    """Lines of later steps are of a killed run, which continues from an earlier state."""
    p = train_net.prepare(run)
    engine = OneNumber(p)
    whole = {
        "image_id": p.val.records[0]["image_id"],
        "category_id": p.val.ids[0],
        "bbox": [0.0, 0.0, 5.0, 5.0],
        "score": 0.5,
    }
    monkeypatch.setattr(measure, "predict", lambda *_: [whole])
    file = run.out / measure.EVALUATIONS_FILE
    assert not measure.was_scored(run, 4)
    for step in (4, 8, 12, 8):
        measure.on_the_way(run, p, engine, 0, step)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8]
    assert {"bbox_AP", "bbox_AP50"} <= lines[0].keys()
    assert measure.was_scored(run, 4) and measure.was_scored(run, 8)
    assert not measure.was_scored(run, 12)
    # Other ranks than the first write nothing, and wait until it has scored
    before = file.read_text()
    measure.on_the_way(run, p, engine, 1, 16)
    assert file.read_text() == before


def test_detections_of_all_ranks_come_in_the_order_of_the_images(run):
    """Rank r of three has the images r, r + 3, ...; of seven images the first has three."""
    run = dataclasses.replace(run, world=3)
    shares = {rank: [[f"image {i}"] for i in range(rank, 7, 3)] for rank in range(3)}
    for rank in (1, 2):
        assert measure._gather(run, shares[rank], rank, images=7) == []
    found = measure._gather(run, shares[0], 0, images=7)
    assert found == [[f"image {i}"] for i in range(7)]
    measure.scored(run, 0)
    assert not list(run.out.glob(".predictions*"))
    measure.scored(run, 1)  # which waits for nothing now


def test_who_waits_hears_that_the_first_rank_has_ended(monkeypatch):
    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.01)
    (port,) = free_ports()
    server = dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", port, 1, is_master=False)
    monkeypatch.setattr(process_group, "_meeting", [client])
    looks = iter([False, False, True])
    process_group.wait_until(lambda: next(looks))
    del server
    with pytest.raises(Failed, match="rank 0 has ended before its work was done"):
        process_group.wait_until(lambda: False)
    # Its last file came just before its end
    looks = iter([False, True])
    process_group.wait_until(lambda: next(looks))


def _end(after_s, status):
    time.sleep(after_s)
    os._exit(status)


STAYS = (100_000, 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("ends", "ended_with"),
    [
        # One that is done does not end the others, however long they take
        (((0, 0), (1, 0)), (0, 0)),
        (((0, 1), STAYS), (1, -signal.SIGKILL)),
        ((STAYS, (0, 2)), (-signal.SIGKILL, 2)),
    ],
)
def test_a_rank_whose_neighbour_died_is_killed(monkeypatch, ends, ended_with):
    monkeypatch.setattr(process_group, "GRACE_SECONDS", 0.1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_end, args=how, daemon=True) for how in ends]
    for rank in ranks:
        rank.start()
    with StopFlag() as stop:
        process_group._watch(ranks, stop)
    assert tuple(rank.exitcode for rank in ranks) == ended_with


@pytest.mark.timeout(60)
def test_a_signal_to_the_run_reaches_its_ranks(monkeypatch):
    monkeypatch.setattr(process_group, "GRACE_SECONDS", 0.1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_end, args=STAYS, daemon=True) for _ in range(2)]
    for rank in ranks:
        rank.start()
    stop = StopFlag()
    stop.requested = "SIGTERM"
    process_group._watch(ranks, stop)
    assert [rank.exitcode for rank in ranks] == [-signal.SIGTERM] * 2


# Where --eval-only evaluates


TRAINED = {
    "config": {"SOLVER.BASE_LR": 0.02, "TEST.DETECTIONS_PER_IMAGE": 100},
    "train": "coco_2017_train:aa",
    "train_images": "11",
    "val": "coco_2017_val:bb",
    "val_images": "22",
}


@pytest.fixture
def detector(run):
    """The run of a detector that is there, with the identity of its training."""
    run.out.mkdir(parents=True, exist_ok=True)
    run.final.write_bytes(b"")
    about = {"verb": "detect", "identity": TRAINED}
    (run.out / "run.json").write_text(json.dumps(about))
    return run


def config(**changes):
    return {"config": TRAINED["config"] | changes}


def test_without_a_detector_there_is_nothing_to_evaluate(run):
    with pytest.raises(BadInput, match="no trained detector to evaluate; run without"):
        measure.evaluation(run, TRAINED)


@pytest.mark.parametrize(
    "other", [{}, {"train": "voc_2007_train:cc"}, config(**{"SOLVER.BASE_LR": 0.01})]
)
def test_the_trainings_own_evaluation_stays_in_its_folder(detector, other):
    """So does another training's: opening the folder says that it is one."""
    assert measure.evaluation(detector, TRAINED | other) == detector


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"identity": 3}'])
def test_a_folder_that_does_not_say_how_it_was_trained_is_evaluated(detector, content):
    (detector.out / "run.json").write_text(content)
    assert measure.evaluation(detector, TRAINED) == detector


@pytest.mark.parametrize(
    "other",
    [
        {"val": "other_val:dd", "val_images": "33"},
        config(**{"TEST.DETECTIONS_PER_IMAGE": 300}),
        config(**{"INPUT.MIN_SIZE_TEST": 640}),
        config(**{"DATASETS.TEST": ["other"]}),
    ],
)
def test_what_only_scoring_reads_makes_a_run_below_the_detectors(detector, other):
    wanted = TRAINED | other
    run = measure.evaluation(detector, wanted)
    assert run.out.parent == detector.out / "evaluations"
    assert run.out.name.startswith(wanted["val"].split(":")[0] + "-")
    assert run.final == detector.final
    # The same evaluation has the same folder, another one another
    assert measure.evaluation(detector, wanted) == run
    more = wanted | {"val": "third_val:ee"}
    assert measure.evaluation(detector, more).out != run.out
    # Changed images are seen when that folder is opened
    changed = wanted | {"val_images": "55"}
    assert measure.evaluation(detector, changed).out == run.out


def test_a_trained_detector_is_not_trained_again_to_be_scored(detector):
    kept = f"{detector.out}: holds the detector of this training, but "
    end = " changed since; --eval-only scores it again without training, or choose"
    for other, what in (
        ({"val": "own_mine_test:dd"}, "its scored boxes"),
        ({"val_images": "33"}, "what scoring reads"),
        (config(**{"INPUT.MIN_SIZE_TEST": 640}), "what scoring reads"),
    ):
        with pytest.raises(BadInput) as error:
            measure.refuse_another_scoring(detector, TRAINED | other)
        assert str(error.value).startswith(kept + what + end)
    # The same run goes on; that another training's is another is said where the folder is opened
    measure.refuse_another_scoring(detector, TRAINED)
    measure.refuse_another_scoring(detector, TRAINED | {"train": "voc:c", "val": "d"})
    # Without a detector there is nothing to score
    detector.final.unlink()
    measure.refuse_another_scoring(detector, TRAINED | {"val": "own_mine_test:dd"})


def test_the_trainings_own_statistics_are_not_scoring(detector):
    other = TRAINED | config(**{"TEST.PRECISE_BN.NUM_ITER": 100})
    assert measure.evaluation(detector, other) == detector


def test_a_finished_run_tells_its_numbers(run, caplog):
    caplog.set_level(logging.INFO, "backbench")
    assert measure.report(run.out) == []
    about = {"checkpoint": "aa", "name": "x", "method": "m", "arch": "resnet18"}
    about |= {"epochs": 1, "task": "faster_rcnn", "dataset": "coco", "split": "val"}
    about |= {"protocol": "tiny-v1", "seed": 0}
    rows = [
        store.Result(**about, metric="bbox_AP", value=41.256, ci95=(40.04, 42.46)),
        store.Result(**about, metric="bbox_APs", value=None),
    ]
    run.out.mkdir(parents=True, exist_ok=True)
    store.owe(run.out, 2)
    store.append(run.out, rows[:1])
    assert measure.report(run.out) == []
    store.append(run.out, rows[1:])
    assert [row.metric for row in measure.report(run.out)] == ["bbox_AP", "bbox_APs"]
    assert re.search(r"bbox_AP +41.26  \[40.0, 42.5\]", caplog.text)
    assert re.search(r"bbox_APs +undefined", caplog.text)
    # What errors cost is no AP
    about["task"] = "faster_rcnn_errors"
    store.append(run.out, [store.Result(**about, metric="bbox_missed", value=3.5)])
    assert [row.metric for row in measure.report(run.out)] == ["bbox_AP", "bbox_APs"]


# What a detector finds, and what is written of it


class Finds:
    """An engine that finds as many objects in an image as its id says, of two classes in turn."""

    def __init__(self):
        self.asked = []

    def predictions(self, records, *, workers):
        self.asked.append(([r["image_id"] for r in records], workers))
        for record in records:
            id = record["image_id"]
            yield [
                {"image_id": id, "category_id": n % 2, "score": n} for n in range(id)
            ]


@pytest.mark.parametrize(("cores", "workers"), [(8, 5), (3, 3)])
def test_each_rank_looks_at_its_images_and_the_first_gathers(
    run, monkeypatch, cores, workers
):
    monkeypatch.setattr(measure.loading, "cores", lambda world: cores)
    records = [{"image_id": id} for id in (2, 0, 1, 3, 1)]
    prepared = SimpleNamespace(
        val=SimpleNamespace(records=records, ids=(30, 10)),
        cfg=SimpleNamespace(DATALOADER=SimpleNamespace(NUM_WORKERS=5)),
    )
    found = [(2, 30, 0), (2, 10, 1), (1, 30, 0), (3, 30, 0), (3, 10, 1), (3, 30, 2)]
    found.append((1, 30, 0))
    for world in (1, 2, 3):
        run = dataclasses.replace(run, world=world)
        engine = Finds()
        for rank in reversed(range(world)):
            rows = measure.predict(run, prepared, engine, rank)
            assert rank == 0 or rows == []
        assert [tuple(row.values()) for row in rows] == found
        ids = [record["image_id"] for record in records]
        shares = [(ids[rank::world], workers) for rank in reversed(range(world))]
        assert engine.asked == shares
        measure.scored(run, 0)


def test_a_record_is_rows_and_files(run, monkeypatch):
    p = train_net.prepare(run)
    monkeypatch.setattr(evaluate, "AP_COUNT", 40)
    image = p.val.records[1]
    truth = image["annotations"][0]
    found = {
        "image_id": image["image_id"],
        "category_id": p.val.ids[truth["category_id"]],
        "bbox": truth["bbox"],
        "score": 0.5,
    }
    measure.record(run, p, [found], 12.5)
    manifest = hashlib.sha256(p.val.fingerprint.encode()).hexdigest()
    scores = evaluate.score(p.val, [found], "bbox", (), manifest=manifest)
    rows, problems = store.read(run.out / "results.jsonl")
    assert not problems
    assert scores.values["AP"] > 0
    assert [(row.metric, row.value, row.ci95) for row in rows] == [
        (f"bbox_{name}", value, scores.ci95.get(name))
        for name, value in scores.values.items()
    ]
    for row in rows:
        assert (row.task, row.dataset, row.split) == ("faster_rcnn", "scenes", "val")
        assert (row.engine, row.seed, row.name) == ("torchvision", p.seed, "random")
        assert (row.arch, row.checkpoint) == ("resnet18", p.checkpoint.digest)
        assert (row.method, row.epochs) == ("random", p.checkpoint.epochs)
        assert row.protocol == "detection-tiny-v1"
        assert row.provenance["evaluator"] == "hotcoco"
        assert row.provenance["config"] == "tiny_faster_rcnn_R_18_FPN"
        assert row.provenance["train"] == p.train.fingerprint
        assert row.provenance["val"] == p.val.fingerprint
        assert row.provenance["per_category"] == "per_category.json"
        assert row.provenance["recipe"] == decisive(run.given)
        assert row.provenance[contents.KEY] == contents.whole(p.val.images)
        assert row.provenance["trunk"]["sides"] == [128, 192]
        assert row.origin["images_per_second"] == 12.5
    assert json.loads((run.out / "predictions.json").read_text()) == [found]
    of_classes = json.loads((run.out / "per_category.json").read_text())
    assert of_classes == {"bbox": dict(scores.per_category)}
    with np.load(run.out / rows[0].provenance["predictions"]) as kept:
        for name, draws in scores.samples.items():
            np.testing.assert_allclose(kept[f"bootstrap_bbox_{name}"], draws, atol=1e-4)
    pictures = sorted((run.out / "pictures").iterdir())
    assert [each.suffix for each in pictures] == [".png"] * 2
    # A run that was killed after its rows has them once
    measure.record(run, p, [found], None)
    assert len(store.read(run.out / "results.jsonl")[0]) == len(rows)
    assert measure.report(run.out) == rows
