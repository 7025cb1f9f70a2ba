"""Both engines keep the promises of engine.py."""

import pytest
import torch
from support.detection_runs import ENGINES, built, run_of_config

from backbench.errors import BadInput
from backbench.runs import seeding
from detection.data.split import training_records


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tiny_root, tmp_path_factory):
    """A mask detector, and the images that it trains on."""
    out = tmp_path_factory.mktemp("run")
    run = run_of_config("tiny_mask_rcnn_R_18_FPN", tiny_root, out, engine=request.param)
    p, engine = built(run)
    engine.model.train()
    return engine, training_records(p.train, p.task)


def losses_of(engine, iteration):
    seeding.seed_everything(engine.seed, "iteration", iteration, 0)
    return {name: float(value.detach()) for name, value in engine.losses().items()}


def test_an_iteration_does_not_depend_on_where_the_stream_was_opened(engine):
    engine, records = engine
    engine.start(records, 0, 3)
    whole = [losses_of(engine, i) for i in range(3)]
    engine.start(records, 2, 3)
    assert losses_of(engine, 2) == whole[2]
    assert whole[0] != whole[2]
    terms = ("rpn_cls", "rpn_loc", "cls", "box_reg", "mask")
    assert set(whole[0]) == {f"loss_{term}" for term in terms}


def test_a_step_moves_by_the_optimisers_rate(engine):
    engine, records = engine
    before = {k: v.clone() for k, v in engine.model.named_parameters()}
    engine.start(records, 0, 2)
    for rate, moves in ((0.0, False), (0.01, True)):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        losses = engine.step()
        assert not any(v.requires_grad for v in losses.values())
        same = [torch.equal(before[k], v) for k, v in engine.model.named_parameters()]
        assert all(same) is not moves


def test_stages_and_detections_are_those_of_the_file(engine):
    engine, records = engine
    stages = engine.stages(torch.zeros(1, 3, 64, 64))
    shapes = [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)]
    assert [tuple(s.shape[1:]) for s in stages] == shapes
    record = {**records[0], "annotations": []}
    found = engine.predict(record)
    engine.model.train()
    assert found
    for d in found:
        x, y, w, h = d["bbox"]
        assert d["image_id"] == record["image_id"]
        assert 0 <= d["category_id"] < 10
        assert x >= 0 and y >= 0 and x + w <= record["width"] and y + h <= record["height"]
        assert d["segmentation"]["size"] == [record["height"], record["width"]]


def test_images_read_by_workers_have_the_same_detections(engine):
    """In the records' order; an unreadable image ends it in one line after the others."""
    engine, records = engine
    records = records[:3]
    expected = [engine.predict(record) for record in records]
    engine.model.train()
    assert len({len(str(found)) for found in expected}) > 1  # images differ
    assert list(engine.predictions(records, workers=2)) == expected
    torn = {**records[1], "file_name": str(records[1]["file_name"]) + ".gone"}
    found = engine.predictions([records[0], torn], workers=1)
    assert next(found) == expected[0]
    with pytest.raises(BadInput, match=r"\.gone"):
        next(found)
