"""What is scored on the way, and how the processes of a run wait for one another."""

import dataclasses
import json
import multiprocessing
import os
import signal
import time

import pytest
import torch.distributed as dist
from support.detection_loop import OneNumber
from support.detection_runs import run_of_config
from support.slurm_cluster import free_ports

from backbench.detection import measure, process_group, train_net
from backbench.errors import Failed
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
