"""A detector's training step on a GPU that is only pretended: the losses are the CPU's, and the host
waits for little more than each image's NMS."""

import pytest
import torch
from support.detection_runs import built, run_of_config
from support.pretended_gpu import PretendedGpu

from backbench.runs import seeding
from detection.data.split import training_records

IMAGES = 4
# NMS and, in torchvision, a constant for it: once an image. Once a batch: what is drawn of anchors
# and of proposals, boxes that are not empty, levels of two pools, positive ones (twice), masks or
# keypoints (twice), and four constants of torchvision's box coder
WAITS = 2 * IMAGES + 1 + 2 + 2 + 2 + 2 + 4


@pytest.mark.parametrize("task", ["mask", pytest.param("keypoint", marks=pytest.mark.slow)])
def test_a_step_waits_for_what_it_must(task, tiny_root, tmp_path):
    words = ("MODEL.WEIGHTS", "random", "SOLVER.IMS_PER_BATCH", str(IMAGES))
    words = (*words, "INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MAX_SIZE_TRAIN", "64")
    run = run_of_config(f"tiny_{task}_rcnn_R_18_FPN", tiny_root, tmp_path, words)
    losses = []
    with PretendedGpu() as gpu:
        for device in ("cpu", "cuda"):
            prepared, engine = built(run, device)
            engine.start(training_records(prepared.train, prepared.task), 0, 2)
            engine.model.train()
            for number in range(2):
                seeding.seed_everything(0, "iteration", number)
                gpu.take()
                terms = engine.step()
                waits = gpu.take()
            losses.append({name: getattr(v, "host", v) for name, v in terms.items()})
    assert 0 < len(waits) <= WAITS, "\n".join(waits)
    assert losses[0].keys() == losses[1].keys()
    for name, value in losses[0].items():
        torch.testing.assert_close(losses[1][name], value, rtol=1e-5, atol=1e-6, msg=name)
